"""A picture of resident memory against time."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MB = 2**20
_COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Distinguishable with any colour vision (Okabe and Ito); grey for the first curve, the reference."""


@dataclass(frozen=True)
class Curve:
    """Resident memory of one training run, above its value before the first step."""

    name: str
    samples: Sequence[tuple[float, int]]
    """Pairs of seconds since the first step's start and bytes."""
    step_starts: Sequence[float]
    """Seconds from the first step's start to each step's."""
    step_seconds: Sequence[float]
    """Duration of each step."""
    peak: int
    """Growth of the peak, in bytes. Samples can miss it."""

    def by_steps(self) -> list[tuple[float, int]]:
        """Give the samples with the time counted in steps: 2.5 is half-way through the third step."""
        ends = [*self.step_starts, self.step_starts[-1] + self.step_seconds[-1]]
        numbers = [bisect_right(ends, at) - 1 for at, _ in self.samples]
        return [
            (number + (at - ends[number]) / (ends[number + 1] - ends[number]), size)
            for number, (at, size) in zip(numbers, self.samples, strict=True)
            if 0 <= number < len(self.step_starts)
        ]


def plot_memory(curves: Sequence[Curve], subtitle: str, path: Path) -> None:
    """Draw memory against time: all runs together with time counted in steps, and every run by itself in seconds.

    Args:
        curves: The runs; the first one is the reference.
        subtitle: What was trained.
        path: The PNG file to write.

    Supported Platforms:
        ``CPU``
    """
    rows = len(curves)
    figure = Figure(figsize=(10, 4.2 + 1.05 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Resident memory while training\n{subtitle}", fontsize=11)
    grid = figure.add_gridspec(rows + 1, 1, height_ratios=[3.4, *([1] * rows)])
    _draw_together(figure.add_subplot(grid[0]), curves)
    longest = max(at for curve in curves for at, _ in curve.samples)
    shared: Axes | None = None
    for number, curve in enumerate(curves):
        axes = figure.add_subplot(grid[number + 1], sharex=shared, sharey=shared)
        shared = shared or axes
        _draw_run(axes, curve, curves[0], _COLOURS[number % len(_COLOURS)])
        axes.tick_params(labelbottom=number == rows - 1)
    axes.set_xlabel("seconds since the first step began")
    axes.set_xlim(0, longest)
    figure.supxlabel("what MindSpore frees mostly stays resident, for the next step", fontsize=8, color="#777777")
    figure.savefig(path, dpi=150)


def _draw_together(axes: Axes, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        steps, sizes = zip(*curve.by_steps(), strict=True)
        axes.plot(
            steps,
            [size / _MB for size in sizes],
            color=_COLOURS[number % len(_COLOURS)],
            label=curve.name,
            linewidth=2.2 if number == 0 else 1.4,
        )
    axes.set_title("all modes, time counted in steps", loc="left", fontsize=10)
    axes.set_xlabel("steps")
    axes.set_ylabel("MB above the value\nbefore training")
    axes.set_xlim(0, max(len(curve.step_starts) for curve in curves))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_run(axes: Axes, curve: Curve, reference: Curve, colour: str) -> None:
    seconds = [at for at, _ in curve.samples]
    sizes = [size / _MB for _, size in curve.samples]
    axes.fill_between(seconds, sizes, color=colour, alpha=0.3, linewidth=0)
    axes.plot(seconds, sizes, color=colour, linewidth=0.8)
    axes.axhline(reference.peak / _MB, color=_COLOURS[0], linewidth=0.8, linestyle=(0, (4, 3)))
    share = "" if curve is reference else f"\n{curve.peak / max(reference.peak, 1):.0%} of {reference.name}"
    axes.text(
        1.01,
        0.5,
        f"{curve.name}\npeak {curve.peak / _MB:.0f} MB{share}",
        transform=axes.transAxes,
        va="center",
        fontsize=9,
        color=colour,
    )
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
