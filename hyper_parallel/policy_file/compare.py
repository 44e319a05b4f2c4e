"""What changes for a net from one policy file to another."""

from dataclasses import dataclass

from hyper_parallel.policy_file.keeps import Decision
from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.resolve import PlanRow, Resolution
from hyper_parallel.policy_file.specs import differs


@dataclass(frozen=True)
class Change:
    """One cell for which two files say different things."""

    path: str
    before: PlanRow | None
    """None: nobody decides about the cell."""
    after: PlanRow | None


def changes_between(
    first: tuple[Source, Resolution], second: tuple[Source, Resolution]
) -> tuple[list[Change], list[str]]:
    """Compare two files on one net.

    Args:
        first: A file and what it means for the net.
        second: Another one.

    Returns:
        The cells for which they differ, in the order of the net; and a line for each setting that isn't about one cell.
    """
    one, other = _by_cell(first[1]), _by_cell(second[1])
    changes = []
    for key in _in_order(first[1], set(one) | set(other)):
        before, after = one.get(key), other.get(key)
        if before is None or after is None or differs(before[0].spec, after[0].spec):
            shown = before or after
            assert shown is not None
            changes.append(Change(shown[1].path, before and before[1], after and after[1]))
    return changes, _settings(first, second)


def _by_cell(resolution: Resolution) -> dict[int, tuple[Decision, PlanRow]]:
    pairs = zip(resolution.regions.decisions, resolution.rows, strict=True)
    return {id(decision.node.cell): (decision, row) for decision, row in pairs}


def _in_order(resolution: Resolution, wanted: set[int]) -> list[int]:
    return [key for key in resolution.regions.nodes_of if key in wanted]


def _settings(first: tuple[Source, Resolution], second: tuple[Source, Resolution]) -> list[str]:
    lines = []
    one, other = first[0].file, second[0].file
    for key in type(one.swap).model_fields:
        before, after = getattr(one.swap, key), getattr(other.swap, key)
        if before != after:
            lines.append(f"swap.{key}: {_shown(before)} in A, {_shown(after)} in B")
    pairs = [{(pair.load, pair.at) for pair in source.pairs} for source, _ in (first, second)]
    for name, only in (("A", pairs[0] - pairs[1]), ("B", pairs[1] - pairs[0])):
        lines += [f"prefetch: only {name} loads {load} when backward reaches {at}" for load, at in sorted(only)]
    return lines


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", then ".join(map(str, value)) or "nothing"
    return "its default" if value is None else str(value)
