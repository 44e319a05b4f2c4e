"""From what a policy file says about layers to `recompute_config` and `swap_config` for graph mode."""

import re
from typing import Any

from hyper_parallel.policy_file.mindformers.layer_policies import REPLAYS, SAVES, LayerPolicies
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges
from hyper_parallel.policy_file.mindformers.pipeline import Pipeline
from hyper_parallel.policy_file.mindformers.to_pynative import refuse_regions_in_regions

_NAME = re.compile(r"[A-Za-z0-9_*]+")


def graph_blocks(policies: LayerPolicies, pipeline: Pipeline, prefetch: int) -> dict[str, Any]:
    """Write `recompute_config` and `swap_config`.

    Without swapping, MindFormers' lists are counts of the first layers of each stage; with it, they are layer numbers.

    Args:
        policies: What the file says; gets a problem for what can't be said.
        pipeline: Which layer is in which stage.
        prefetch: MindFormers' `backward_prefetch` for what is swapped.

    Returns:
        The blocks, those that say something.
    """
    full = policies.having("", REPLAYS)
    selected = {pattern: policies.having(pattern, REPLAYS) for pattern in policies.patterns}
    refuse_regions_in_regions(policies, full, selected)
    whole = policies.swapped("")
    parts = {pattern: policies.swapped(pattern) - whole for pattern in policies.patterns}
    _refuse(policies, full, whole)
    recompute: dict[str, Any] = {}
    if whole.union(*parts.values()):
        if full:
            recompute["recompute"] = sorted(full)
        if any(selected.values()):
            recompute["select_recompute"] = {_as_names(policies, p): sorted(at) for p, at in selected.items() if at}
        swap = _swap(policies, whole, parts, prefetch)
        return ({"recompute_config": recompute} if recompute else {}) | {"swap_config": swap}
    if full:
        recompute["recompute"] = _counts(policies, pipeline, full, set(), "")
    if any(selected.values()):
        recompute["select_recompute"] = {
            _as_names(policies, pattern): _counts(policies, pipeline, layers, full, pattern)
            for pattern, layers in selected.items()
            if layers
        }
    return {"recompute_config": recompute} if recompute else {}


def _refuse(policies: LayerPolicies, full: set[int], whole: set[int]) -> None:
    for pattern in policies.patterns:
        if kept := policies.having(pattern, SAVES):
            policies.problems.append(
                f"{policies.who(pattern, kept)}: {pattern} is a cell that runs once; in graph mode MindFormers "
                f"excludes only operators from recomputing"
            )
    if both := full & whole:
        policies.problems.append(
            f"{policies.who('', both)}layers {in_ranges(both)} are recomputed with swapped inputs; in graph mode "
            f"recompute wins over swap"
        )
    for pattern in policies.patterns:
        both = policies.having(pattern, REPLAYS) & policies.swapped(pattern)
        if both or policies.swapped(pattern) & full:
            policies.problems.append(f"{pattern}: recomputed and swapped; in graph mode recompute wins over swap")
    if policies.ahead:
        policies.problems.append("prefetch: in graph mode MindFormers loads operators ahead, not layers")


def _swap(policies: LayerPolicies, whole: set[int], parts: dict[str, set[int]], prefetch: int) -> dict[str, Any]:
    block: dict[str, Any] = {"swap": True}
    if whole:
        block["layer_swap"] = [{"backward_prefetch": prefetch, "layers": sorted(whole)}]
    if any(parts.values()):
        block["op_swap"] = [
            {"op_name": _as_names(policies, pattern), "backward_prefetch": prefetch, "layers": sorted(layers)}
            for pattern, layers in parts.items()
            if layers
        ]
    return block


def _counts(policies: LayerPolicies, pipeline: Pipeline, layers: set[int], full: set[int], pattern: str) -> Any:
    """Write layers as counts of the first ones of each stage; layers that are recomputed as a whole count, too."""
    what = pattern or "recomputed layers"
    mtp = set(range(pipeline.layers, pipeline.total))
    follows = mtp if not pattern and pipeline.layers - 1 in layers else set()
    if layers & mtp != follows:
        policies.problems.append(
            f"{what}: in graph mode layers for multi-token prediction get what the last layer gets, as a whole"
        )
    if layers | full >= set(range(pipeline.layers)):
        return True
    table = []
    for chunk in pipeline.chunks:
        row = []
        for part in chunk:
            named = layers & set(part)
            count = max(named) - part.start + 1 if named else 0
            row.append(count)
            if set(part[:count]) - full != named:
                policies.problems.append(
                    f"{what}: {in_ranges(named)} of {part.start}-{part.stop - 1}; in graph mode MindFormers counts the "
                    f"first layers of each stage, without gaps"
                )
        table.append(row)
    return table if pipeline.interleave > 1 else table[0]


def _as_names(policies: LayerPolicies, pattern: str) -> str:
    """Write a dotted pattern as MindFormers' expressions for single names."""
    segments = pattern.split(".")
    if "**" in segments or not all(_NAME.fullmatch(segment) for segment in segments):
        policies.problems.append(f"{pattern!r}: in graph mode MindFormers' patterns have one name, or .*, per level")
    return r"\.".join(segment.replace("*", ".*") for segment in segments)
