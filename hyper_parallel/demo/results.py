"""What a mode measured, and how it compares with plain training."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hyper_parallel.demo.settings import DemoSettings


class Task(BaseModel):
    """What a worker is asked to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str
    """The mode's name."""
    policy: Path | None = None
    """The policy file of a mode that is one."""
    settings: DemoSettings = DemoSettings()
    """The size of the net and of the training."""


class ModeResult(BaseModel):
    """What a worker measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str
    """The mode's name."""
    losses: list[str]
    """The loss of every step, as a hexadecimal float: exact."""
    weights_sha256: str
    """Of all parameters after the last step."""
    step_starts: list[float]
    """Seconds from the first step's start to each step's start."""
    step_seconds: list[float]
    """Duration of each step."""
    peak_growth_bytes: int
    """Growth of the peak of resident memory over its value before the first step."""
    samples: list[tuple[float, int]]
    """Seconds since the first step's start, and bytes of resident memory above its value before the first step."""
    live_bytes: list[int]
    """What the swap manager held after each step: 0 if all is well."""
    swap: dict[str, float]
    """The swap manager's statistics after the last step."""

    @property
    def median_step(self) -> float:
        """Median duration of a step in seconds, without the first step if there are others."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)


@dataclass(frozen=True)
class Row:
    """One mode beside plain training."""

    mode: str
    final_loss: float
    bit_identical: bool
    """Whether every loss and the final weights are those of plain training, bit for bit."""
    step_seconds: float
    """Median duration of a step."""
    step_ratio: float
    """That, divided by plain training's."""
    peak_growth_bytes: int
    peak_ratio: float
    """The growth of the peak, divided by plain training's."""
    offloaded_bytes: int
    """Bytes that went to host, over all steps."""
    all_returned: bool
    """Whether the swap manager held nothing after every step."""

    @property
    def passed(self) -> bool:
        """Whether the mode kept its promises: the same numbers, and nothing left behind."""
        return self.bit_identical and self.all_returned

    def as_dict(self) -> dict[str, Any]:
        """Give the row as plain values, for JSON."""
        return asdict(self)


def compare(results: Sequence[ModeResult], reference: ModeResult) -> list[Row]:
    """Set every mode beside plain training.

    Args:
        results: What the modes measured.
        reference: What plain training measured.

    Returns:
        One row per result, in their order.
    """
    return [_compare(result, reference) for result in results]


def _compare(result: ModeResult, reference: ModeResult) -> Row:
    same_losses = result.losses == reference.losses
    return Row(
        mode=result.mode,
        final_loss=float.fromhex(result.losses[-1]),
        bit_identical=same_losses and result.weights_sha256 == reference.weights_sha256,
        step_seconds=result.median_step,
        step_ratio=result.median_step / reference.median_step,
        peak_growth_bytes=result.peak_growth_bytes,
        peak_ratio=result.peak_growth_bytes / max(reference.peak_growth_bytes, 1),
        offloaded_bytes=int(result.swap.get("offloaded_bytes", 0)),
        all_returned=not any(result.live_bytes),
    )


def summary(settings: DemoSettings, rows: Sequence[Row], versions: Mapping[str, str]) -> dict[str, Any]:
    """Give the demo's result as plain values, for JSON.

    Args:
        settings: The size of the net and of the training.
        rows: The modes beside plain training.
        versions: Versions of what the figures depend on.

    Returns:
        Settings, versions and modes.
    """
    return {
        "settings": settings.model_dump(),
        "versions": dict(versions),
        "modes": [row.as_dict() for row in rows],
    }
