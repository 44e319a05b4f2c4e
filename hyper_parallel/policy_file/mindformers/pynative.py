"""The dialect of PyNative mode: `recompute`, `recompute_comm` and `swap`."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges
from hyper_parallel.policy_file.mindformers.names import CELLS, Names
from hyper_parallel.policy_file.mindformers.settings import Settings
from hyper_parallel.policy_file.mindformers.targets import Action, Reading
from hyper_parallel.policy_file.mindformers.validation import as_list, checked, whole_number

_SPEC = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_EXPECTED = "expected a layer such as 5, or a range such as '0-19'"

Patterns = dict[StrictStr, list[Any]]


def _mode(value: Any) -> Any:
    return "None" if value is None else value


class _Recompute(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mode: Annotated[Literal["None", "full", "select"], BeforeValidator(_mode)] = "None"
    full_recompute_layer: list[Any] | None = None
    select_module: Patterns | None = None
    exclude_op: Patterns | list[StrictStr] | None = None


class _RecomputeComm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enable: StrictBool = False
    select_module: Patterns | None = None


class _LayerSwap(BaseModel):
    model_config = ConfigDict(extra="forbid")

    layers: list[Any]


class _OpSwap(_LayerSwap):
    op_name: StrictStr


class _Swap(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enable: StrictBool = False
    default_prefetch: Annotated[int, BeforeValidator(whole_number), Field(ge=1)] = 1
    layer_swap: Annotated[list[_LayerSwap], BeforeValidator(as_list)] | None = None
    op_swap: Annotated[list[_OpSwap], BeforeValidator(as_list)] | None = None


def read_pynative(settings: Settings, reading: Reading, names: Names) -> None:
    """Work out `recompute`, `recompute_comm` and `swap`.

    Args:
        settings: The blocks.
        reading: Gets targets, notes and problems.
        names: Reads patterns.
    """
    recompute = checked(_Recompute, settings.blocks.get("recompute"), "recompute", reading)
    communication = checked(_RecomputeComm, settings.blocks.get("recompute_comm"), "recompute_comm", reading)
    swap = checked(_Swap, settings.blocks.get("swap"), "swap", reading)
    reader = _Reader(reading, names)
    reader.recompute(recompute)
    reader.communication(communication)
    if swap.enable:
        reader.swap(swap)
    elif swap.layer_swap or swap.op_swap:
        reading.note("inert", "swap", "enable is false")


class _Reader:
    def __init__(self, reading: Reading, names: Names) -> None:
        self.reading = reading
        self.names = names

    def recompute(self, given: _Recompute) -> None:
        reading = self.reading
        if given.mode == "None":
            for key in ("full_recompute_layer", "select_module", "exclude_op"):
                if getattr(given, key):
                    reading.note("inert", f"recompute, {key}", "mode is None")
            return
        wanted = "full_recompute_layer" if given.mode == "full" else "select_module"
        if not getattr(given, wanted):
            reading.problem("recompute", f"mode is {given.mode}, but {wanted} is missing or empty")
        full = self.layers(given.full_recompute_layer or (), "recompute, full_recompute_layer")
        if full and given.mode == "select":
            text = "MindFormers recomputes these layers as a whole in mode select, too"
            reading.note("meaning", "recompute, full_recompute_layer", text)
        reading.add(Action.RECOMPUTE, None, full, "recompute, full_recompute_layer")
        if given.mode == "full" and given.select_module:
            reading.note("inert", "recompute, select_module", "mode is full")
        elif given.mode == "select":
            self.patterns(Action.RECOMPUTE, given.select_module or {}, "recompute, select_module", full)
        if isinstance(given.exclude_op, list):
            reading.kept_substrings = tuple(given.exclude_op)
            for text in given.exclude_op:
                if not text.strip():
                    reading.problem("recompute, exclude_op", f"got {text!r}, expected a part of an operator's name")
        elif given.exclude_op:
            self.patterns(Action.EXCLUDE, given.exclude_op, "recompute, exclude_op", frozenset())

    def communication(self, given: _RecomputeComm) -> None:
        key = "recompute_comm, select_module"
        if not given.enable:
            if given.select_module:
                self.reading.note("inert", key, "enable is false")
            return
        if not given.select_module:
            self.reading.problem("recompute_comm", "enable is true, but select_module is missing or empty")
        full = self.reading.layers_of(Action.RECOMPUTE, pattern=None)
        for pattern, specs in (given.select_module or {}).items():
            layers = self.layers(specs, f"{key}, '{pattern}'")
            if not self.understood(pattern, key) or not layers:
                continue
            if is_slot(pattern) or pattern.split(".")[-1] in CELLS:
                self.unapplied(pattern, layers, key)
            else:
                self.add(Action.RECOMPUTE_COMMUNICATION, pattern, layers, key, full)

    def unapplied(self, pattern: str, layers: frozenset[int], key: str) -> None:
        self.reading.note(
            "unapplied",
            key,
            f"'{pattern}' of layers {in_ranges(layers)}: MindFormers finds slots of communication, or cells, by it, "
            f"and recomputes neither; no rule is made. To compute what the collectives of a cell give again, write "
            f"`ops: {{Collective: must_recompute, '*': prefer_save}}` for it",
        )

    def swap(self, given: _Swap) -> None:
        reading, prefetch = self.reading, given.default_prefetch
        total = reading.pipeline.total
        if prefetch >= total:
            reading.problem("swap, default_prefetch", f"got {prefetch}, but there are {total} layers")
            prefetch = 0
        if reading.pipeline.stages > 1:
            text = "MindFormers refuses swap with pipeline stages; here each stage swaps its own layers"
            reading.note("different", "swap", text)
        entries = given.layer_swap or []
        for number, entry in enumerate(entries):
            layers = self.layers(entry.layers, f"swap, layer_swap, entry {number}, layers", prefetch)
            if number == 0:
                reading.add(Action.SWAP, None, layers, "swap, layer_swap")
            elif layers:
                text = f"entry {number} (layers {in_ranges(layers)}): MindFormers uses the first entry only"
                reading.note("inert", "swap, layer_swap", text)
        whole = reading.layers_of(Action.SWAP)
        by_pattern: dict[str, frozenset[int]] = {}
        for number, entry in enumerate(given.op_swap or ()):
            key = f"swap, op_swap, entry {number}"
            layers = self.layers(entry.layers, f"{key}, layers", prefetch)
            if entry.op_name in by_pattern:
                text = f"'{entry.op_name}' is named twice; MindFormers 2.1 uses the last entry only, 2.0 all of them"
                reading.problem(key, f"{text}; write one entry with all layers")
            by_pattern[entry.op_name] = layers
            if self.understood(entry.op_name, f"{key}, op_name"):
                self.add(Action.SWAP, entry.op_name, layers, "swap, op_swap", whole)
        if reading.pipeline.stages == 1:
            reading.prefetch = [(layer, layer + prefetch) for layer in sorted(reading.layers_of(Action.SWAP))]
        else:
            text = (
                "layers of other stages can't be loaded ahead; loading ahead is bounded in bytes, by `swap: {window}`"
            )
            reading.note("different", "swap, default_prefetch", text)

    def patterns(self, action: Action, patterns: Patterns, key: str, whole: frozenset[int]) -> None:
        for pattern, specs in patterns.items():
            layers = self.layers(specs, f"{key}, '{pattern}'")
            if not self.understood(pattern, key):
                continue
            if not is_slot(pattern):
                self.add(action, pattern, layers, key, whole)
            elif action is Action.EXCLUDE:
                self.add(Action.EXCLUDE_COMMUNICATION, pattern, layers, key, whole)
            else:
                self.unapplied(pattern, layers, key)

    def add(self, action: Action, pattern: str, layers: frozenset[int], key: str, whole: frozenset[int]) -> None:
        inside, within = _without_container(pattern)
        if within:
            text = (
                f"'{pattern}' is matched inside a layer, where no path begins with `layers`: in MindFormers it does "
                f"nothing. Read as '{inside}'"
            )
            self.reading.note("different", key, text)
        if layers and layers <= whole:
            self.reading.note("inert", key, f"'{pattern}': its layers are named as a whole")
        elif layers & whole:
            self.reading.note("meaning", key, f"'{pattern}': not in layers that are named as a whole")
        self.reading.add(action, inside, layers - whole, key)

    def understood(self, pattern: str, key: str) -> bool:
        try:
            self.names.places(_without_container(pattern)[0])
        except ValueError as error:
            self.reading.problem(f"{key}, '{pattern}'", str(error))
            return False
        if re.search(r"(?<!\\)\.(?![*+?{])", pattern):
            text = "a dot without a backslash is read as the one between two names"
            self.reading.note("assumed", key, text)
        return True

    def layers(self, specs: Iterable[Any], key: str, prefetch: int = 0) -> frozenset[int]:
        """Read layers and ranges, which must rise."""
        found: set[int] = set()
        total, last = self.reading.pipeline.total, -1
        for spec in specs:
            ends = _SPEC.fullmatch(str(spec).strip())
            if isinstance(spec, bool) or ends is None:
                self.reading.problem(key, f"got {spec!r}, {_EXPECTED}")
                return frozenset()
            low, high = int(ends[1]), int(ends[2] or ends[1])
            problem = ""
            if low > high:
                problem = f"the range {spec!r} is empty; write '{high}-{low}'"
            elif high >= total:
                problem = f"layer {high} isn't there: the net has {total} layers, 0 to {total - 1}"
            elif low <= last:
                problem = f"{spec!r} begins at {low}, but the one before ends at {last}; layers must rise"
            elif prefetch and high + prefetch >= total:
                problem = f"layer {high} loads layer {high + prefetch} ahead, but the last one is {total - 1}"
            if problem:
                self.reading.problem(key, problem)
                return frozenset()
            found.update(range(low, high + 1))
            last = high
        return frozenset(found)


_SLOT = re.compile(r"(?:.*[.])?(?:allgather|reducescatter|alltoall|alltoallsingle|allreduce)(?:\\?\.\*)?")


def is_slot(pattern: str) -> bool:
    """Whether a pattern names a slot of communication, which MindFormers calls `input.allgather` and the like."""
    return _SLOT.fullmatch(pattern) is not None


_CONTAINER = re.compile(r"layers(?:\\?\.\*|\\?\.\[0-9\]\+|\\?\.\\d\+)?\\?\.(?=[A-Za-z_(.])")


def _without_container(pattern: str) -> tuple[str, bool]:
    """Take `layers.*.` off the front of a pattern, which can only mean the layers themselves."""
    found = _CONTAINER.match(pattern)
    return (pattern[found.end() :], True) if found else (pattern, False)
