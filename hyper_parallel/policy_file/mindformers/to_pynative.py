"""From what a policy file says about layers to `recompute` and `swap` for PyNative mode."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hyper_parallel.policy_file.mindformers.layer_policies import REPLAYS, SAVES, LayerPolicies
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges, runs


def pynative_blocks(policies: LayerPolicies, prefetch: int) -> dict[str, Any]:
    """Write `recompute` and `swap`.

    Args:
        policies: What the file says; gets a problem for what can't be said.
        prefetch: How many layers ahead MindFormers loads, where the file has no pairs.

    Returns:
        The blocks, those that say something.
    """
    full = policies.having("", REPLAYS)
    selected = {pattern: policies.having(pattern, REPLAYS) for pattern in policies.patterns}
    excluded = {pattern: policies.having(pattern, SAVES) for pattern in policies.patterns}
    refuse_regions_in_regions(policies, full, selected)
    replayed = full.union(*selected.values())
    for pattern, layers in excluded.items():
        if outside := layers - replayed:
            policies.problems.append(
                f"{policies.who(pattern, outside)}: {pattern} is kept in layers {in_ranges(outside)}, in which nothing "
                f"is recomputed; MindFormers excludes only from recomputing"
            )
    blocks: dict[str, Any] = {}
    if replayed:
        blocks["recompute"] = _recompute(full, selected, excluded)
    if swap := _swap(policies, prefetch):
        blocks["swap"] = swap
    return blocks


def refuse_regions_in_regions(policies: LayerPolicies, full: set[int], selected: Mapping[str, set[int]]) -> None:
    """Say where a part of a recomputed layer has a region of its own: MindFormers has only the outer one.

    Args:
        policies: Gets the problems.
        full: Layers that are recomputed as a whole.
        selected: Layers in which a part is recomputed, by its pattern.
    """
    for pattern, layers in selected.items():
        if twice := layers & full:
            policies.problems.append(
                f"{policies.who(pattern, twice)}: {pattern} is a region of its own in layers {in_ranges(twice)}, which "
                f"are recomputed as a whole; MindFormers has only the outer one"
            )


def _recompute(full: set[int], selected: Mapping[str, set[int]], excluded: Mapping[str, set[int]]) -> dict[str, Any]:
    block: dict[str, Any] = {"mode": "select" if any(selected.values()) else "full"}
    if full:
        block["full_recompute_layer"] = _specs(full)
    for key, of_pattern in (("select_module", selected), ("exclude_op", excluded)):
        if any(of_pattern.values()):
            block[key] = {_as_regex(pattern): _specs(layers) for pattern, layers in of_pattern.items() if layers}
    return block


def _swap(policies: LayerPolicies, prefetch: int) -> dict[str, Any]:
    whole = policies.swapped("")
    parts = {pattern: policies.swapped(pattern) - whole for pattern in policies.patterns}
    every = whole.union(*parts.values())
    if not every:
        return {}
    ahead = policies.ahead
    if ahead and (len(ahead) != len(every) or len(set(ahead)) > 1 or ahead[0] < 1):
        policies.problems.append("prefetch: MindFormers loads every swapped layer the same number of layers ahead")
    elif ahead:
        prefetch = ahead[0]
    if policies.has_stages:
        policies.problems.append("stages: MindFormers refuses swap with pipeline stages")
    if max(every) + prefetch >= policies.total:
        policies.problems.append(
            f"layer {max(every)} is swapped, but with a prefetch of {prefetch} MindFormers swaps layers up to "
            f"{policies.total - prefetch - 1} only"
        )
    block: dict[str, Any] = {"enable": True, "default_prefetch": prefetch}
    if whole:
        block["layer_swap"] = [{"layers": _specs(whole)}]
    if any(parts.values()):
        block["op_swap"] = [
            {"op_name": _as_regex(pattern), "layers": _specs(layers)} for pattern, layers in parts.items() if layers
        ]
    return block


def _specs(layers: Iterable[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(layers)]


def _as_regex(pattern: str) -> str:
    """Write a dotted pattern as MindFormers' regular expression for a whole path."""
    text = ""
    for segment in pattern.split("."):
        if segment == "**":
            text += r"(?:[^.]+\.)*"
            continue
        name = "[^.]+" if segment == "*" else segment.replace("*", "[^.]*")
        text += re.sub(r"\[([0-9]+)-([0-9]+)\]", _alternatives, name) + r"\."
    return text.removesuffix(r"\.")


def _alternatives(found: re.Match[str]) -> str:
    return "(?:" + "|".join(map(str, range(int(found[1]), int(found[2]) + 1))) + ")"
