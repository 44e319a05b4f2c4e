"""Tables for the terminal."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def table(
    title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str | Text]], caption: str | None = None
) -> Table:
    """Build a table.

    Args:
        title: Stands above it.
        columns: Pairs of a heading and ``left`` or ``right``; numbers (right) and the first column are never wrapped.
        rows: The cells; a `str` is shown as it is, without markup.
        caption: Stands below it.

    Returns:
        Something for a rich console to print.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.report.tables import table
        >>> table("memory", [("mode", "left"), ("MB", "right")], [("plain", "500")]).row_count
        1
    """
    built = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for number, (heading, justify) in enumerate(columns):
        is_number = justify == "right"
        built.add_column(
            heading, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number or number == 0
        )
    for row in rows:
        built.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return built


def yes_no(value: bool) -> Text:
    """Give a green yes or a red NO.

    Args:
        value: What to say.

    Returns:
        Styled text that reads well without colours too.
    """
    return Text("yes", "green") if value else Text("NO", "bold red")


def megabytes(size: float) -> str:
    """Give a size in MB (2**20 bytes), rounded.

    Args:
        size: Bytes.

    Returns:
        For example ``"12"``.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.report.tables import megabytes
        >>> megabytes(12.4 * 2**20)
        '12'
    """
    return f"{size / 2**20:.0f}"
