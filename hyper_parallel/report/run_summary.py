"""`RunSummary`: the figures of a run."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.core.activation_memory.swap_stats import CellStats
from hyper_parallel.report.run import Run, Span

PLACES: dict[str, str] = {
    "resident": "on the device",
    "pending": "on the way to host",
    "window": "loaded, not given up",
    "host": "on host",
}
"""What the engine calls each place, and what that means."""
_CAUSES = {
    "offload": "forward waits for copies to host (limit: pending)",
    "load": "backward waits for a tensor",
    "operators": "backward waits for operators (limit: window)",
}
_BY_HAND = "the user waits: {}"


@dataclass(frozen=True)
class Copies:
    """All copies in one direction."""

    count: int
    bytes: int
    seconds: float
    """How long the copy thread was busy with them."""


@dataclass(frozen=True)
class PlaceRow:
    """The most bytes in one place."""

    place: str
    meaning: str
    peak_bytes: int
    limit_bytes: int | None
    """None: it has no limit of its own."""


@dataclass(frozen=True)
class WaitRow:
    """The waits of one cause in one cell."""

    cell: str
    cause: str
    count: int
    seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class TensorRow:
    """A tensor of one cell; equal ones of one cell are one row."""

    cell: str
    tensor: str
    bytes: int
    """Of one copy."""
    offloads: int
    loads: int


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run, counted from the spans and levels of its trace.

    Args:
        run: The run.

    Supported Platforms:
        ``CPU``
    """

    seconds: float
    offloads: Copies
    loads: Copies
    wait_seconds: float
    places: list[PlaceRow]
    waits: list[WaitRow]
    """Longest first."""
    largest_tensors: list[TensorRow]
    cells: dict[str, CellStats] | None
    """What was counted per cell since `SwapManager().reset()`; None if it couldn't be read."""
    counters_hold_more: bool
    """Whether the counters hold more than these figures: they began before the trace, or this is a part of it."""
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The same in dicts, lists and numbers."""
        return asdict(self)


def summarize(run: Run, largest: int = 10) -> RunSummary:
    """Work out the figures of a run.

    Args:
        run: The run.
        largest: How many of the largest tensors to name.

    Returns:
        The figures.

    Supported Platforms:
        ``CPU``
    """
    offloads, loads = _copies(run.of("offload")), _copies(run.of("load"))
    stats = run.stats
    return RunSummary(
        seconds=run.seconds,
        offloads=offloads,
        loads=loads,
        wait_seconds=sum(span.seconds for span in run.of("wait")),
        places=[
            PlaceRow(place, meaning, _peak(run, place), run.limits.get(place)) for place, meaning in PLACES.items()
        ],
        waits=_waits(run.of("wait")),
        largest_tensors=_tensors(run)[:largest],
        cells=None if stats is None else dict(stats.cells),
        counters_hold_more=stats is not None
        and (stats.offloaded_bytes > offloads.bytes or stats.loaded_bytes > loads.bytes),
        settings=run.settings.model_dump(mode="json"),
    )


def _copies(spans: list[Span]) -> Copies:
    return Copies(len(spans), sum(span.args.bytes for span in spans), sum(span.seconds for span in spans))


def _peak(run: Run, place: str) -> int:
    return max((getattr(levels.args, place) for levels in run.levels), default=0)


def _waits(spans: Iterable[Span]) -> list[WaitRow]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        word = span.name.split(" ", 1)[0]
        found[span.args.cell, _CAUSES.get(word, _BY_HAND.format(span.name))].append(span.seconds)
    rows = [WaitRow(cell, cause, len(times), sum(times), max(times)) for (cell, cause), times in found.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.cell, row.cause))


def _tensors(run: Run) -> list[TensorRow]:
    found: dict[tuple[str, str, int], dict[str, int]] = defaultdict(lambda: {"offload": 0, "load": 0})
    for track in ("offload", "load"):
        for span in run.of(track):
            found[span.args.cell, span.name, span.args.bytes][track] += 1
    rows = [
        TensorRow(cell, name, nbytes, counts["offload"], counts["load"])
        for (cell, name, nbytes), counts in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.cell, row.tensor))
