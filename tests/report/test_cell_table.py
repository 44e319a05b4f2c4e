"""What was swapped and left alone, per cell, for people."""

import io

from rich.console import Console

from hyper_parallel.core.activation_memory.swap_stats import CellStats, SwapStats
from hyper_parallel.report.cell_table import cell_columns, cell_rows, swap_table

MB = 2**20
CELLS = {
    "layers.0": CellStats(offloaded_bytes=3 * MB, loaded_bytes=2 * MB, wait_seconds=0.0125, late_loads=2),
    "": CellStats(parameter_bytes=5 * MB),
}


def test_a_counter_that_is_0_everywhere_has_no_column() -> None:
    headings = [heading for heading, _ in cell_columns(CELLS)]
    assert headings == ["to host MB", "back MB", "waits ms", "parameters MB", "late loads"]


def test_every_counter_can_have_a_column() -> None:
    full = CellStats(**dict.fromkeys(CellStats.__dataclass_fields__, 1))
    assert len(cell_columns({"": full})) == len(CellStats.__dataclass_fields__)


def test_both_copies_have_a_column_even_if_nothing_moved() -> None:
    assert [heading for heading, _ in cell_columns({"layers.0": CellStats()})] == ["to host MB", "back MB"]


def test_rows_have_the_unit_of_their_heading() -> None:
    assert cell_rows(CELLS) == [
        ("layers.0", "3.0", "2.0", "12.5", "0.0", "2"),
        ("(the net)", "0.0", "0.0", "0.0", "5.0", "0"),
    ]


def test_the_table_explains_its_columns() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(swap_table(SwapStats(cells=CELLS)))
    text = console.file.getvalue()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("layers.0")]
    assert line.split() == ["layers.0", "3.0", "2.0", "12.5", "0.0", "2"]
    assert "late loads: tensors that backward needed before their load was begun" in text
