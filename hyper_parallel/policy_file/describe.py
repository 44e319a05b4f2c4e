"""A plan as plain text: aligned columns, one line per cell."""

from collections.abc import Iterable, Sequence

from hyper_parallel.core.activation_memory.operator_policy import Table
from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.resolve import PlanRow, Resolution
from hyper_parallel.policy_file.rule import Rule
from hyper_parallel.policy_file.sizes import size_in_words
from hyper_parallel.policy_file.specs import options_of, selection_of

_HEAD = ("path", "cell", "policy", "why", "keeps")
_NET = "(the net)"


def rules_as_text(source: Source) -> list[str]:
    """Write a file that isn't worked out for a net yet.

    Args:
        source: The validated file.

    Returns:
        One line per rule (those of each stage after the common ones), one for the default, one per pair of layers that
        are loaded ahead, and one for the swap settings that are given.
    """
    rules = [*source.common, *(placed for rules in source.staged for placed in rules)]
    lines = [(placed.label, placed.rule.selector, rule_in_words(placed.rule)) for placed in rules]
    lines.append(("default", "any other cell", source.file.default.name.lower()))
    lines += [(pair.label, pair.load, f"loaded when backward reaches {pair.at}") for pair in source.pairs]
    text = aligned(lines)
    given = source.file.swap.model_dump(exclude_unset=True)
    if given:
        text.append("swap: " + ", ".join(f"{key} {_setting(value)}" for key, value in given.items()))
    return text


def rule_in_words(rule: Rule) -> str:
    """What a rule says, in one line."""
    parts = [rule.policy.name.lower()]
    if rule.swap_inputs:
        parts.append("swapped inputs")
    if rule.determinism_check == "values":
        parts.append("values compared")
    if rule.ops:
        parts.append(f"operators: {Table(rule.ops, rule.selector)}")
    if rule.preset:
        parts.append(f"preset {', '.join(rule.preset)}")
    if rule.tensors is not None:
        parts.append(f"tensors {selection_of(rule.tensors)}")
    if rule.exclude:
        parts.append(f"without {', '.join(rule.exclude)}")
    if rule.keep_collectives:
        parts.append("collectives kept")
    if rule.graph is not None:
        parts.append(f"graph: {options_of(rule.graph)}")
    if rule.allow_cache_entry_mutation:
        parts.append("kept results may be written")
    return " + ".join(parts)


def resolution_as_text(resolution: Resolution) -> list[str]:
    """Write what a file means for a net.

    Args:
        resolution: Rows and notes.

    Returns:
        A heading and one line per row, then one line per note.
    """
    lines = aligned([_HEAD, *map(_columns, resolution.rows)]) if resolution.rows else []
    return lines + [f"note: {note}" for note in resolution.notes]


def _columns(row: PlanRow) -> tuple[str, ...]:
    return row.path or _NET, row.class_name, row.policy_text, row.why, row.keeps


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write lines of columns, each column as wide as it needs."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _setting(value: object) -> str:
    if isinstance(value, int):
        return size_in_words(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", then ".join(map(str, value)) or "none"
    return str(value)
