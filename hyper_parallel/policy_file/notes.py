"""What a reader of a plan should know besides its rows: what has no effect, what is never moved, what is shared."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import CellStats
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.keeps import Decision, Regions, place
from hyper_parallel.policy_file.loading import PlacedRule, Source
from hyper_parallel.policy_file.sizes import size_in_words
from hyper_parallel.policy_file.tensors import TensorSelection


def overruled_notes(matched: Sequence[tuple[PlacedRule, list[Node]]], winners: dict[str, int]) -> list[str]:
    """Name the rules that decide nothing.

    Args:
        matched: Every rule with the cells that it names.
        winners: By path, the place of the last rule that names the cell.

    Returns:
        A note per rule that others overrule on every cell.
    """
    deciding = set(winners.values())
    notes = []
    for number, (placed, nodes) in enumerate(matched):
        if nodes and number not in deciding:
            labels = [matched[other][0].label for other in sorted({winners[node.path] for node in nodes})]
            who = labels_together(labels)
            notes.append(
                f"{placed.label} ({placed.rule.selector}) has no effect: {who} overrule"
                f"{'s' if len(labels) == 1 else ''} it on every cell it matches"
            )
    return notes


def remaining_notes(
    source: Source, regions: Regions, settings: SwapSettings, prefetch: Sequence[tuple[str, Node, Node]]
) -> list[str]:
    """Tell the rest, once everything is decided.

    Args:
        source: The file.
        regions: The decisions.
        settings: The swap settings that will be in force.
        prefetch: Name and cells of each pair.

    Returns:
        The notes.
    """
    notes = [f"rule set {name} has no effect: nothing uses it" for name in source.unused]
    if not regions.decisions:
        notes.append("no cell is under a policy: every cell keeps everything")
    for decision in regions.decisions:
        notes.extend(_of_one(decision, regions))
    notes.extend(_of_selections(regions, settings))
    notes.extend(_of_prefetch(regions, prefetch))
    if any(_swaps(decision) for decision in regions.decisions):
        if settings.when_exhausted:
            ladder = ", then ".join(settings.when_exhausted)
            notes.append(f"when the host budget is exhausted, a region may {ladder} instead of swapping")
        size = f"tensors below {size_in_words(settings.min_bytes)}, " if settings.min_bytes else ""
        notes.append(
            "never moved to host: parameters, their views and casts, tensors owned outside the region, "
            f"{size}and tensors without computation between their forward and their backward"
        )
    elif source.file.swap.model_fields_set:
        notes.append("swap has no effect: nothing is swapped")
    return notes


def ladder_notes(rows: Sequence[Any], counters: Mapping[str, CellStats]) -> list[str]:
    """Tell what regions did instead of swapping, since the host was exhausted.

    Args:
        rows: The rows of a plan, with their paths.
        counters: What was counted for every region, by its path.

    Returns:
        A note per region that went down the ladder.
    """
    notes = []
    for path in dict.fromkeys(row.path for row in rows):
        counted = counters.get(path)
        if counted is None:
            continue
        calls = [(counted.recomputed_regions, "recomputed"), (counted.kept_regions, "kept on the device")]
        parts = [f"{number} call{'s' if number != 1 else ''} {what}" for number, what in calls if number]
        if counted.no_room_bytes:
            parts.append(f"{size_in_words(counted.no_room_bytes)} of other calls kept on the device")
        if parts:
            notes.append(f"{path or 'the net'}: {', '.join(parts)} instead of swapped, since the host was exhausted")
    return notes


def _of_one(decision: Decision, regions: Regions) -> Iterator[str]:
    path = decision.node.path
    aliases = [node.path for node in regions.nodes_of[id(decision.node.cell)] if node.path != path]
    if aliases:
        same = "is" if len(aliases) == 1 else "are"
        yield f"{path} is shared: {', '.join(aliases)} {same} the same cell"
    outer = regions.around(decision.node)
    if decision.spec.swap_inputs and outer is not None and outer.spec.policy.replays:
        yield f"swap_inputs has no effect for {path}: {place(outer.node)} replays its inputs"


def _of_selections(regions: Regions, settings: SwapSettings) -> Iterator[str]:
    small = [
        decision.node.path
        for decision in regions.decisions
        if isinstance(selection := decision.spec.tensor_policy, TensorSelection)
        and 0 < selection.min_bytes <= settings.min_bytes
    ]
    if small:
        yield (
            f"tensors.min_bytes has no effect for {shown(small)}: swap.min_bytes leaves all tensors below "
            f"{size_in_words(settings.min_bytes)} on the device"
        )


def _of_prefetch(regions: Regions, prefetch: Sequence[tuple[str, Node, Node]]) -> Iterator[str]:
    swapping = {id(decision.node.cell) for decision in regions.decisions if _swaps(decision)}
    for label, load, _ in prefetch:
        here = {id(node.cell) for node in (load, *load.below(), *load.above())}
        if not here & swapping:
            yield f"{label} has no effect: nothing in {load.path} is swapped"


def _swaps(decision: Decision) -> bool:
    spec = decision.spec
    by_operator = getattr(spec.operators, "policies", {}).values()
    return spec.policy.swaps or spec.swap_inputs or any(policy.swaps for policy in by_operator)


def shown(paths: list[str]) -> str:
    """Some of many paths, and how many there are besides."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def labels_together(labels: list[str]) -> str:
    """Draw together what several rules are called: ``rules 1, 3``."""
    numbers = [label.removeprefix("rule ") for label in labels]
    if len(labels) > 1 and all(number.isdigit() for number in numbers):
        return f"rules {', '.join(numbers)}"
    return ", ".join(labels)
