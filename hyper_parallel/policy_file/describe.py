"""A plan as plain text: aligned columns, one line per cell."""

from collections.abc import Iterable, Sequence

from hyper_parallel.core.activation_memory.operator_policy import Table
from hyper_parallel.policy_file.resolve import PlanRow, Resolution, size_in_words
from hyper_parallel.policy_file.schema import PolicyFile, Rule

_HEAD = ("path", "cell", "policy", "why", "keeps")
_NET = "(the net)"


def rules_as_text(file: PolicyFile) -> list[str]:
    """Write a file that isn't worked out for a net yet.

    Args:
        file: The validated file.

    Returns:
        One line per rule, one for the default, and one for the swap settings that are given.
    """
    cells = [(f"rule {number}", rule.cells, _says(rule)) for number, rule in enumerate(file.rules, 1)]
    cells.append(("default", "any other cell", file.default.name.lower()))
    lines = _aligned(cells)
    given = file.swap.model_dump(include=file.swap.model_fields_set)
    if given:
        lines.append("swap: " + ", ".join(f"{key} {_setting(value)}" for key, value in given.items()))
    return lines


def _says(rule: Rule) -> str:
    inputs = " + swapped inputs" if rule.swap_inputs else ""
    operators = f" + operators: {Table(rule.ops, rule.cells)}" if rule.ops else ""
    return rule.policy.name.lower() + inputs + operators


def resolution_as_text(resolution: Resolution) -> list[str]:
    """Write what a file means for a net.

    Args:
        resolution: Rows and notes.

    Returns:
        A heading and one line per row, then one line per note.
    """
    lines = _aligned([_HEAD, *map(_columns, resolution.rows)]) if resolution.rows else []
    return lines + [f"note: {note}" for note in resolution.notes]


def _columns(row: PlanRow) -> tuple[str, ...]:
    return row.path or _NET, row.class_name, row.policy_text, row.why, row.keeps


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _setting(value: object) -> str:
    if isinstance(value, int):
        return size_in_words(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", then ".join(map(str, value)) or "none"
    return str(value)
