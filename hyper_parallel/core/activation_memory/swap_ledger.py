"""`Ledger`: what the engine counts, how much lies where, and whom it tells."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.activation_memory.swap_stats import CellStats, SwapStats
from hyper_parallel.core.activation_memory.swap_trace import Trace
from hyper_parallel.core.errors import SwapStateError

_COUNTERS = tuple(field.name for field in dataclasses.fields(CellStats))
_PLACES = ("resident", "pending", "window", "host")


class Ledger:
    """Counters per region, and the bytes in every place with their peaks. Used under the engine's lock."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self.now: dict[str, int] = dict.fromkeys(_PLACES, 0)
        """Bytes of swapped tensors: on the device, on their way to host, loaded and not given up, on host."""
        self.peaks: dict[str, int] = dict.fromkeys(_PLACES, 0)
        self.trace: Trace | None = None
        self.broken: BaseException | None = None
        """What left the books half written; see Note: [An engine that can't be relied on]."""
        self.interrupted: BaseException | None = None
        """What ended the last wait early: then nothing is half written."""
        self._cells: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def count(self, path: str, name: str, amount: float) -> None:
        """Add to a counter of the region `path`."""
        self.counts[name] += amount
        self._cells[path][name] += amount

    def move(self, place: str, nbytes: int) -> None:
        """So many bytes have come to a place, or have left it."""
        now = self.now[place] = self.now[place] + nbytes
        if now > self.peaks[place]:
            self.peaks[place] = now
        if self.trace is not None:
            self.trace.levels(self.now)

    def wait(self, back_end: Any, condition: Callable[[], bool], path: str, why: str, *loads: Any) -> None:
        """See to it that `condition()` holds; block only where the back end has no other way.

        Args:
            back_end: Ends transfers.
            condition: What is waited for.
            path: The region.
            why: For the trace.
            loads: The loads that are waited for; none: what is on its way to host.

        Raises:
            SwapStateError: It never will.
        """
        if condition():
            return
        back_end.advance(condition, *loads)
        if condition():
            return
        begin = time.perf_counter()
        try:
            back_end.wait(lambda: self.broken is not None or condition(), *loads)
        except BaseException as error:
            self.interrupted = error
            raise
        finally:
            self.waited(begin, path, why)
        self.check()

    def check(self) -> None:
        """Raise SwapStateError if the books can't be relied on."""
        if self.broken is not None:
            raise SwapStateError(
                f"what this step has swapped was given up, since {self.broken!r} came in the middle of the engine's "
                f"work; take the step again"
            ) from self.broken

    def continued(self) -> "Ledger":
        """A ledger that goes on counting, with nothing in any place: for the engine after this one's."""
        after = Ledger()
        after.counts, after.peaks, after.trace, after._cells = self.counts, self.peaks, self.trace, self._cells
        return after

    def waited(self, begin: float, path: str, why: str) -> None:
        """A thread of the user's has waited since `begin`."""
        end = time.perf_counter()
        self.count(path, "wait_seconds", end - begin)
        if self.trace is not None:
            self.trace.span("wait", why, begin, end, cell=path)

    def reset(self) -> None:
        """Begin to count anew."""
        self.counts = dict.fromkeys(self.counts, 0)
        self.peaks = dict(self.now)
        self._cells.clear()

    def stats(self, allocated: int, allocations: int) -> SwapStats:
        """All of it, for the user."""
        return SwapStats(
            live_bytes=self.now["resident"] + self.now["host"],
            host_live_bytes=self.now["host"],
            **{f"{place}_peak_bytes": peak for place, peak in self.peaks.items()},
            allocated_bytes=allocated,
            host_allocations=allocations,
            cells=self.regions(),
            **_whole(self.counts),
        )

    def regions(self) -> dict[str, CellStats]:
        """The counters of every region, by its path."""
        return {path: CellStats(**_whole(counts)) for path, counts in self._cells.items()}


def _whole(counts: Mapping[str, float]) -> dict[str, Any]:
    return {name: value if name == "wait_seconds" else int(value) for name, value in counts.items()}
