"""`LayerPolicies`: what a policy file says about layers by number, in the way in which MindFormers' settings think."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.policy_file.layers import layer_numbers
from hyper_parallel.policy_file.loading import PlacedPair, Source
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges
from hyper_parallel.policy_file.patterns import parse_pattern
from hyper_parallel.policy_file.rule import Rule

SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
REPLAYS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

_INDEX = re.compile(r"\*|[0-9]+|\[([0-9]+)(?:-([0-9]+))?\]")
_SAYABLE = {"cells", "layers", "container", "policy", "swap_inputs", "preset", "exclude"}
_PRESETS = {"full", "inputs_on_host"}
_FILE_KEYS = {"version", "mode", "include", "rule_sets", "default", "rules", "stages", "prefetch"}
_NOTHING = {"determinism_check": "operators", "allow_cache_entry_mutation": False, "keep_collectives": False}
"""Keys that say nothing with these values."""


class What(NamedTuple):
    """What a rule says about a layer, or about a part of it."""

    policy: CheckpointPolicy
    swap_inputs: bool
    number: str
    """The rule, for messages."""


class LayerPolicies:
    """What each layer gets, and each pattern in it; what can't be told by layers is a problem.

    Args:
        read: The policy file.
        layers: Layers of the decoder.
        mtp: Layers for multi-token prediction, which are numbered after the decoder's.
        container: Name of the cell that holds the layers.
    """

    def __init__(self, read: Source, layers: int, mtp: int, container: str) -> None:
        self._decoder, self._container = layers, container
        self.total = layers + mtp
        self.problems: list[str] = []
        self.found: dict[str, dict[int, What]] = {}
        """What each layer gets, by pattern in it (empty: the layer itself) and by layer, by the last rule for it."""
        self.has_stages = len(read.staged) > 1
        self.ahead: list[int] = []
        """How many layers ahead each of the file's pairs loads."""
        self._file(read)
        self._compare()

    @property
    def patterns(self) -> list[str]:
        """The patterns for parts of layers."""
        return [pattern for pattern in self.found if pattern]

    def having(self, pattern: str, policies: tuple[CheckpointPolicy, ...]) -> set[int]:
        """Give the layers in which a pattern has one of these policies."""
        return {layer for layer, what in self.found.get(pattern, {}).items() if what.policy in policies}

    def swapped(self, pattern: str) -> set[int]:
        """Give the layers in which something of a pattern goes to host."""
        given = self.found.get(pattern, {})
        return {n for n, what in given.items() if what.swap_inputs or what.policy is CheckpointPolicy.MUST_SWAP}

    def who(self, pattern: str, layers: Iterable[int]) -> str:
        """Name the rules that decided about a pattern in these layers."""
        given = self.found.get(pattern, {})
        numbers = dict.fromkeys(given[layer].number for layer in sorted(layers) if layer in given)
        return ", ".join(numbers) + (": " if not pattern and numbers else "")

    def _file(self, read: Source) -> None:
        if not read.file.default.saves:
            default = read.file.default.name.lower()
            self.problems.append(f"default: MindFormers has none but keeping, so {default} can't be said")
        for key in read.file.model_fields_set - _FILE_KEYS:
            self.problems.append(f"{key}: MindFormers' settings have nothing for it; take it out of the file")
        for placed in (*read.common, *(placed for stage in read.staged for placed in stage)):
            self._rule(placed.rule, placed.label)
        self.ahead = [self._pair(pair) for pair in read.pairs]

    def _rule(self, read: Rule, number: str) -> None:
        rule = read.model_dump(exclude_unset=True)
        unsayable = [key for key, value in rule.items() if key not in _SAYABLE and value != _NOTHING.get(key, ...)]
        unsayable += [name for name in rule.get("preset", ()) if name not in _PRESETS]
        for key in unsayable:
            self.problems.append(f"{number}: MindFormers' settings have nothing for {key.removesuffix('_name')}")
        cells = rule.get("cells") or ""
        if (given := rule.get("layers")) is not None:
            place = self._numbered(layer_numbers(given), "mtp" in (rule.get("container") or ""), given, number)
            inside = cells
        else:
            place, inside = self._place(cells, number)
        policy = read.policy
        swap_inputs = rule.get("swap_inputs", False) or "inputs_on_host" in rule.get("preset", ())
        excluded = [f"{inside}.{path}" if inside else path for path in rule.get("exclude", ())]
        for pattern, what in (
            (inside, What(policy, swap_inputs, number)),
            *((path, What(CheckpointPolicy.MUST_SAVE, False, number)) for path in excluded),
        ):
            of_pattern = self.found.setdefault(pattern, {})
            of_pattern.update(dict.fromkeys(place, what))

    def _pair(self, pair: PlacedPair) -> int:
        """Give how many layers ahead a pair loads."""
        load, at = (self._place(cells, pair.label) for cells in (pair.load, pair.at))
        if any(inside or len(layers) != 1 for layers, inside in (load, at)):
            self.problems.append(f"{pair.label}: MindFormers loads whole layers ahead, each for one other layer")
            return 0
        return at[0][0] - load[0][0]

    def _place(self, cells: str, number: str) -> tuple[list[int], str]:
        """Split a pattern into layers and what it names inside them."""
        segments = cells.split(".")
        at = next((i for i, segment in enumerate(segments[:-1]) if segment == self._container), None)
        index = None if at is None else _INDEX.fullmatch(segments[at + 1])
        if at is None or index is None or cells.startswith("re:"):
            self.problems.append(
                f"{number}: {cells!r} must name layers by number, such as '{self._container}.[0-5]': MindFormers' "
                f"settings are about layers"
            )
            return [], ""
        is_mtp = any("mtp" in segment for segment in segments[:at])
        count = self.total - self._decoder if is_mtp else self._decoder
        low = 0 if index[0] == "*" else int(index[1] or index[0])
        high = count - 1 if index[0] == "*" else int(index[2] or low)
        return self._numbered(list(range(low, high + 1)), is_mtp, cells, number), ".".join(segments[at + 2 :])

    def _numbered(self, layers: list[int], is_mtp: bool, given: str, number: str) -> list[int]:
        """Give layers as MindFormers numbers them."""
        first, count = (self._decoder, self.total - self._decoder) if is_mtp else (0, self._decoder)
        if layers and max(layers) >= count:
            last = (
                f"there are {count} layers, 0 to {count - 1}" if count else "there are none for multi-token prediction"
            )
            self.problems.append(f"{number}: {given!r} names layer {max(layers)}, but {last}")
            return []
        return [first + layer for layer in layers]

    def _compare(self) -> None:
        """Refuse patterns that overlap with another policy: the last one wins here, and both count there."""
        for number, pattern in enumerate(self.patterns):
            for later in self.patterns[number + 1 :]:
                if not _overlap(pattern, later):
                    continue
                one, other = self.found[pattern], self.found[later]
                both = {layer for layer in one.keys() & other.keys() if one[layer][:2] != other[layer][:2]}
                if both:
                    self.problems.append(
                        f"{self.who(later, both)}: {later} overrules {pattern} in layers {in_ranges(both)}; in "
                        f"MindFormers both would count, so write patterns that don't overlap"
                    )


def _overlap(one: str, other: str) -> bool:
    return ("*" not in other and parse_pattern(one).matches(other)) or (
        "*" not in one and parse_pattern(other).matches(one)
    )
