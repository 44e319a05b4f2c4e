"""The other way: from a policy file to MindFormers' settings for PyNative mode, where they can say the same."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.policy_file.layers import layer_numbers
from hyper_parallel.policy_file.loading import PlacedPair, Source, read_policy_file
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges, runs
from hyper_parallel.policy_file.patterns import parse_pattern
from hyper_parallel.policy_file.problems import Problem, policy_error
from hyper_parallel.policy_file.rule import Rule

_INDEX = re.compile(r"\*|[0-9]+|\[([0-9]+)(?:-([0-9]+))?\]")
_SAYABLE = {"cells", "layers", "container", "policy", "swap_inputs", "preset", "exclude"}
_PRESETS = {"full", "inputs_on_host"}
_FILE_KEYS = {"version", "mode", "include", "rule_sets", "default", "rules", "stages", "prefetch"}
_NOTHING = {"determinism_check": "operators", "allow_cache_entry_mutation": False, "keep_collectives": False}
"""Keys that say nothing with these values."""


class _What(NamedTuple):
    policy: CheckpointPolicy
    swap_inputs: bool
    number: str
    """The rule, for messages."""


_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_REPLAYS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def mindformers_of_policy(
    source: str | os.PathLike[str] | dict[str, Any],
    *,
    layers: int,
    mtp: int = 0,
    prefetch: int = 1,
    container: str = "layers",
) -> dict[str, Any]:
    """Write a policy file as MindFormers' `recompute` and `swap` for PyNative mode.

    Args:
        source: Path of a policy file in the native format, or its content.
        layers: Layers of the decoder.
        mtp: Layers for multi-token prediction, which MindFormers numbers after the decoder's.
        prefetch: How many layers ahead MindFormers loads, where the file has no pairs of its own.
        container: Name of the cell that holds the layers.

    Returns:
        The blocks `recompute` and `swap`, as a MindFormers configuration has them.

    Raises:
        TypeError: The source is neither a path nor a dict.
        PolicyError: The file has mistakes, or says what MindFormers' settings can't; one line for each.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.mindformers import mindformers_of_policy
        >>> rule = {"cells": "layers.[0-2].mlp", "policy": "must_recompute"}
        >>> mindformers_of_policy({"version": 1, "rules": [rule]}, layers=4)
        {'recompute': {'mode': 'select', 'select_module': {'mlp': ['0-2']}}}
    """
    read = read_policy_file(source)
    writer = _Writer(layers, mtp, prefetch, container)
    writer.file(read)
    blocks = writer.blocks()
    if writer.problems:
        raise policy_error(read.name, map(Problem, writer.problems))
    return blocks


class _Writer:
    def __init__(self, layers: int, mtp: int, prefetch: int, container: str) -> None:
        self.decoder, self.total, self.prefetch, self.container = layers, layers + mtp, prefetch, container
        self.problems: list[str] = []
        self.found: dict[str, dict[int, _What]] = {}
        """What each layer gets, by pattern in it and by layer; of several rules by the last."""
        self.has_stages = False
        self.ahead: list[int] = []
        """How many layers ahead the pairs of the file load."""

    def file(self, read: Source) -> None:
        if not read.file.default.saves:
            default = read.file.default.name.lower()
            self.problems.append(f"default: MindFormers has none but keeping, so {default} can't be said")
        for key in read.file.model_fields_set - _FILE_KEYS:
            self.problems.append(f"{key}: MindFormers' settings have nothing for it; take it out of the file")
        self.has_stages = len(read.staged) > 1
        for placed in (*read.common, *(placed for stage in read.staged for placed in stage)):
            self.rule(placed.rule, placed.label)
        self.ahead = [self.pair(pair) for pair in read.pairs]

    def rule(self, read: Rule, number: str) -> None:
        rule = read.model_dump(exclude_unset=True)
        unsayable = [key for key, value in rule.items() if key not in _SAYABLE and value != _NOTHING.get(key, ...)]
        unsayable += [name for name in rule.get("preset", ()) if name not in _PRESETS]
        for key in unsayable:
            self.problems.append(f"{number}: MindFormers' settings have nothing for {key.removesuffix('_name')}")
        cells = rule.get("cells") or ""
        if (given := rule.get("layers")) is not None:
            place = self.numbered(layer_numbers(given), "mtp" in (rule.get("container") or ""), given, number)
            inside = cells
        else:
            place, inside = self.place(cells, number)
        policy = read.policy
        swap_inputs = rule.get("swap_inputs", False) or "inputs_on_host" in rule.get("preset", ())
        excluded = [f"{inside}.{path}" if inside else path for path in rule.get("exclude", ())]
        for pattern, what in (
            (inside, _What(policy, swap_inputs, number)),
            *((path, _What(CheckpointPolicy.MUST_SAVE, False, number)) for path in excluded),
        ):
            of_pattern = self.found.setdefault(pattern, {})
            of_pattern.update(dict.fromkeys(place, what))

    def pair(self, pair: PlacedPair) -> int:
        """Give how many layers ahead a pair loads."""
        load, at = (self.place(cells, pair.label) for cells in (pair.load, pair.at))
        if any(inside or len(layers) != 1 for layers, inside in (load, at)):
            self.problems.append(f"{pair.label}: MindFormers loads whole layers ahead, each for one other layer")
            return self.prefetch
        return at[0][0] - load[0][0]

    def place(self, cells: str, number: str) -> tuple[list[int], str]:
        """Split a pattern into layers and what it names inside them."""
        segments = cells.split(".")
        at = next((i for i, segment in enumerate(segments[:-1]) if segment == self.container), None)
        index = None if at is None else _INDEX.fullmatch(segments[at + 1])
        if at is None or index is None or cells.startswith("re:"):
            self.problems.append(
                f"{number}: {cells!r} must name layers by number, such as '{self.container}.[0-5]': MindFormers' "
                f"settings are about layers"
            )
            return [], ""
        is_mtp = any("mtp" in segment for segment in segments[:at])
        count = self.total - self.decoder if is_mtp else self.decoder
        low = 0 if index[0] == "*" else int(index[1] or index[0])
        high = count - 1 if index[0] == "*" else int(index[2] or low)
        return self.numbered(list(range(low, high + 1)), is_mtp, cells, number), ".".join(segments[at + 2 :])

    def numbered(self, layers: list[int], is_mtp: bool, given: str, number: str) -> list[int]:
        """Give layers as MindFormers numbers them."""
        first, count = (self.decoder, self.total - self.decoder) if is_mtp else (0, self.decoder)
        if layers and max(layers) >= count:
            last = (
                f"there are {count} layers, 0 to {count - 1}" if count else "there are none for multi-token prediction"
            )
            self.problems.append(f"{number}: {given!r} names layer {max(layers)}, but {last}")
            return []
        return [first + layer for layer in layers]

    def blocks(self) -> dict[str, Any]:
        patterns = [pattern for pattern in self.found if pattern]
        self.compare(patterns)
        full = self.having("", _REPLAYS)
        selected = {pattern: self.having(pattern, _REPLAYS) for pattern in patterns}
        excluded = {pattern: self.having(pattern, _SAVES) for pattern in patterns}
        for pattern, layers in selected.items():
            if twice := layers & full:
                self.problems.append(
                    f"{self.who(pattern, twice)}: {pattern} is a region of its own in layers {in_ranges(twice)}, which "
                    f"are recomputed as a whole; MindFormers has only the outer one"
                )
        replayed = full.union(*selected.values())
        for pattern, layers in excluded.items():
            if outside := layers - replayed:
                self.problems.append(
                    f"{self.who(pattern, outside)}: {pattern} is kept in layers {in_ranges(outside)}, in which nothing "
                    f"is recomputed; MindFormers excludes only from recomputing"
                )
        blocks: dict[str, Any] = {}
        if replayed:
            blocks["recompute"] = self.recompute(full, selected, excluded)
        if swap := self.swap(patterns):
            blocks["swap"] = swap
        return blocks

    def recompute(
        self, full: set[int], selected: Mapping[str, set[int]], excluded: Mapping[str, set[int]]
    ) -> dict[str, Any]:
        block: dict[str, Any] = {"mode": "select" if any(selected.values()) else "full"}
        if full:
            block["full_recompute_layer"] = _specs(full)
        for key, of_pattern in (("select_module", selected), ("exclude_op", excluded)):
            if any(of_pattern.values()):
                block[key] = {_as_regex(pattern): _specs(layers) for pattern, layers in of_pattern.items() if layers}
        return block

    def swap(self, patterns: list[str]) -> dict[str, Any]:
        whole = self.swapped("")
        parts = {pattern: self.swapped(pattern) - whole for pattern in patterns}
        every = whole.union(*parts.values())
        if not every:
            return {}
        if self.ahead and (len(self.ahead) != len(every) or len(set(self.ahead)) > 1 or self.ahead[0] < 1):
            self.problems.append("prefetch: MindFormers loads every swapped layer the same number of layers ahead")
        elif self.ahead:
            self.prefetch = self.ahead[0]
        if self.has_stages:
            self.problems.append("stages: MindFormers refuses swap with pipeline stages")
        if max(every) + self.prefetch >= self.total:
            last = self.total - self.prefetch - 1
            self.problems.append(
                f"{self.who('', {max(every)})}layer {max(every)} is swapped, but with a prefetch of {self.prefetch} "
                f"MindFormers swaps layers up to {last} only"
            )
        block: dict[str, Any] = {"enable": True, "default_prefetch": self.prefetch}
        if whole:
            block["layer_swap"] = [{"layers": _specs(whole)}]
        if any(parts.values()):
            block["op_swap"] = [
                {"op_name": _as_regex(pattern), "layers": _specs(layers)} for pattern, layers in parts.items() if layers
            ]
        return block

    def having(self, pattern: str, policies: tuple[CheckpointPolicy, ...]) -> set[int]:
        return {layer for layer, what in self.found.get(pattern, {}).items() if what.policy in policies}

    def swapped(self, pattern: str) -> set[int]:
        given = self.found.get(pattern, {})
        return {n for n, what in given.items() if what.swap_inputs or what.policy is CheckpointPolicy.MUST_SWAP}

    def compare(self, patterns: list[str]) -> None:
        """Refuse patterns that overlap with another policy: the last one wins here, and both count there."""
        for number, pattern in enumerate(patterns):
            for later in patterns[number + 1 :]:
                if not _overlap(pattern, later):
                    continue
                one, other = self.found[pattern], self.found[later]
                both = {layer for layer in one.keys() & other.keys() if one[layer][:2] != other[layer][:2]}
                if both:
                    self.problems.append(
                        f"{self.who(later, both)}: {later} overrules {pattern} in layers {in_ranges(both)}; in "
                        f"MindFormers both would count, so write patterns that don't overlap"
                    )

    def who(self, pattern: str, layers: Iterable[int]) -> str:
        given = self.found.get(pattern, {})
        numbers = dict.fromkeys(given[layer].number for layer in sorted(layers) if layer in given)
        return ", ".join(numbers) + (": " if not pattern and numbers else "")


def _overlap(one: str, other: str) -> bool:
    return ("*" not in other and parse_pattern(one).matches(other)) or (
        "*" not in one and parse_pattern(other).matches(one)
    )


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
