"""A picture of a run: what was computed, copied and waited for, and how much lay where."""

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from hyper_parallel.report.run import Run
from hyper_parallel.report.run_summary import PLACES

_MB = 2**20
_COLOURS = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "wait": "#d55e00",
    "offload": "#009e73",
    "load": "#cc79a7",
    "resident": "#56b4e9",
    "pending": "#009e73",
    "window": "#cc79a7",
    "host": "#8c8c8c",
}
"""Distinguishable with any colour vision (Okabe and Ito), and readable on white and on black."""
_TEXT = "#123456"
"""Stands for the page's own text colour until the picture is in the page."""
_MOST_SHAPES = 2000
"""With more of them the marks become pixels, so that a page of a long run stays small; text and axes don't."""
_NEAR = 1.5
"""A limit further above the peak than so many times isn't drawn: the curve would be flat."""


def draw_run(run: Run, text_colour: str = "black") -> Figure:
    """Draw a run against time: its tracks, then the bytes in every place with their limits.

    Args:
        run: The run.
        text_colour: Of text and axes; the background is transparent.

    Returns:
        The picture.

    Supported Platforms:
        ``CPU``
    """
    kinds = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colours: dict[Any, Any] = dict.fromkeys(kinds, text_colour)
    with rc_context({**colours, "font.size": 9}):
        tracks = max(1, len(run.tracks))
        figure = Figure(figsize=(10, 1.0 + 0.34 * tracks + 1.1 * len(PLACES)), layout="constrained")
        figure.patch.set_alpha(0)
        grid = figure.add_gridspec(1 + len(PLACES), 1, height_ratios=[0.34 * tracks, *([1.1] * len(PLACES))])
        timeline = figure.add_subplot(grid[0])
        _draw_tracks(timeline, run)
        for number, place in enumerate(PLACES, 1):
            axes = figure.add_subplot(grid[number], sharex=timeline)
            _draw_place(axes, run, place)
            axes.tick_params(labelbottom=number == len(PLACES))
        axes.set_xlabel("seconds since the trace began")
        timeline.tick_params(labelbottom=False)
        timeline.set_xlim(run.begin, run.begin + max(run.seconds, 1e-6))
        for axes in figure.axes:
            axes.tick_params(colors=text_colour)  # ticks are made when the picture is saved
    return figure


def _draw_tracks(axes: Axes, run: Run) -> None:
    lines = {tid: -place for place, tid in enumerate(run.tracks)}
    pixels = len(run.spans) > _MOST_SHAPES
    for kind in ("forward", "backward", "wait", "offload", "load"):
        for tid, line in lines.items():
            bars = [
                (span.begin, span.seconds)
                for span in run.spans
                if span.tid == tid and kind in (span.cat, span.name.split(" ", 1)[0] if span.cat == "compute" else "")
            ]
            if bars:
                faces = [to_rgba(_COLOURS[kind], (0.95, 0.65)[number % 2]) for number in range(len(bars))]
                axes.broken_barh(bars, (line - 0.38, 0.76), facecolors=faces, linewidth=0, rasterized=pixels)
    handles = [axes.plot([], [], color=_COLOURS[kind], linewidth=5)[0] for kind in ("forward", "backward")]
    axes.legend(handles, ["forward", "backward"], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set_yticks(list(lines.values()), list(run.tracks.values()))
    axes.set_ylim(-max(1, len(lines)) + 0.4, 0.6)
    _bare(axes)


def _draw_place(axes: Axes, run: Run, place: str) -> None:
    end = run.begin + run.seconds
    moments = [max(levels.at, run.begin) for levels in run.levels]
    sizes = [getattr(levels.args, place) / _MB for levels in run.levels]
    peak, limit = max(sizes, default=0.0), run.limits.get(place)
    axes.fill_between(
        [*moments, end],
        [*sizes, sizes[-1] if sizes else 0],
        step="post",
        color=_COLOURS[place],
        alpha=0.55,
        linewidth=0,
        rasterized=len(sizes) > _MOST_SHAPES,
    )
    label = f"{PLACES[place]}\npeak {peak:.1f} MB"
    if limit is not None:
        label += f"\nlimit {limit / _MB:.0f} MB"
        if limit / _MB <= _NEAR * peak:
            axes.axhline(limit / _MB, color=_COLOURS["wait"], linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1.01, 0.5, label, transform=axes.transAxes, va="center")
    axes.set_ylabel(f"{place}\nMB")
    axes.set_ylim(bottom=0)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.patch.set_alpha(0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def run_as_svg(run: Run) -> str:
    """Draw a run for a page: in the page's text colour, so that it can be read on a light and on a dark one.

    Args:
        run: The run.

    Returns:
        An `<svg>` element.

    Supported Platforms:
        ``CPU``
    """
    target = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "run"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw_run(run, _TEXT).savefig(target, format="svg", metadata=nothing, dpi=150)
    text = target.getvalue()
    return text[text.index("<svg") :].replace(_TEXT, "currentColor")
