"""What was swapped and what was left alone, per cell."""

from collections.abc import Callable, Mapping

from rich.table import Table

from hyper_parallel.core.activation_memory.swap_stats import CellStats, SwapStats
from hyper_parallel.report.tables import table

_MB, _MS, _COUNT = "MB", "ms", ""
_ALWAYS = 2
_COLUMNS: list[tuple[str, str, str, str]] = [
    ("offloaded_bytes", "to host", _MB, "copied to host"),
    ("loaded_bytes", "back", _MB, "copied back"),
    ("wait_seconds", "waits", _MS, "time that forward and backward spent waiting for copies"),
    ("duplicate_bytes", "duplicates", _MB, "not copied, since the same storage was saved more than once"),
    ("cancelled_bytes", "cancelled", _MB, "not copied, since backward arrived first"),
    ("held_bytes", "held", _MB, "left alone: other code held the tensor"),
    ("parameter_bytes", "parameters", _MB, "left alone: parameters, their views and casts"),
    ("small_bytes", "small", _MB, "left alone: below min_bytes"),
    ("kept_bytes", "kept", _MB, "left alone: a policy said so, or the host is exhausted"),
    ("no_room_bytes", "no room", _MB, "the part of what is kept for which the host had no room"),
    ("recomputed_regions", "recomputed", _COUNT, "calls that were recomputed, since the host is exhausted"),
    ("kept_regions", "kept calls", _COUNT, "calls whose tensors all stayed, since the host is exhausted"),
    ("late_loads", "late loads", _COUNT, "tensors that backward needed before their load was begun"),
    ("evicted_bytes", "evicted", _MB, "loaded too early, and given up for something that was needed first"),
]
"""Counter, heading, unit, meaning."""
_FORMS: dict[str, Callable[[float], str]] = {
    _MB: lambda value: f"{value / 2**20:.1f}",
    _MS: lambda value: f"{value * 1e3:.1f}",
    _COUNT: str,
}


def cell_columns(cells: Mapping[str, CellStats]) -> list[tuple[str, str]]:
    """Which counters are worth a column: both copies, and every other one that isn't 0 in all cells.

    Args:
        cells: The counters, by the cell's path.

    Returns:
        Pairs of a heading and what it means.

    Supported Platforms:
        ``CPU``
    """
    return [(f"{heading} {unit}".strip(), meaning) for _, heading, unit, meaning in _shown(cells)]


def cell_rows(cells: Mapping[str, CellStats]) -> list[tuple[str, ...]]:
    """Give a row per cell in the order of `cell_columns`, its path first.

    Args:
        cells: The counters, by the cell's path.

    Returns:
        Text, one row per cell.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.core.activation_memory.swap_stats import CellStats
        >>> from hyper_parallel.report.cell_table import cell_rows
        >>> cell_rows({"layers.0": CellStats(offloaded_bytes=3 * 2**20, late_loads=1)})
        [('layers.0', '3.0', '0.0', '1')]
    """
    shown = _shown(cells)
    return [
        (path or "(the net)", *(_FORMS[unit](getattr(cell, counter)) for counter, _, unit, _ in shown))
        for path, cell in cells.items()
    ]


def _shown(cells: Mapping[str, CellStats]) -> list[tuple[str, str, str, str]]:
    return [
        column
        for number, column in enumerate(_COLUMNS)
        if number < _ALWAYS or any(getattr(cell, column[0]) for cell in cells.values())
    ]


def swap_table(stats: SwapStats, title: str = "swapped since reset()") -> Table:
    """Build a table of what was swapped and what was left alone, per cell.

    Args:
        stats: What `SwapManager().stats()` gives.
        title: Stands above it.

    Returns:
        Something for a rich console to print.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from rich.console import Console
        >>> from hyper_parallel import SwapManager
        >>> from hyper_parallel.report.cell_table import swap_table
        >>> swap_table(SwapManager().stats()).row_count == len(SwapManager().stats().cells)
        True
    """
    columns = cell_columns(stats.cells)
    caption = "\n".join(f"{heading}: {meaning}" for heading, meaning in columns)
    return table(
        title, [("cell", "left"), *((heading, "right") for heading, _ in columns)], cell_rows(stats.cells), caption
    )
