"""The dialect of graph mode: `recompute_config` and `swap_config`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

from hyper_parallel.policy_file.mindformers.counts import counted_layers, listed_layers
from hyper_parallel.policy_file.mindformers.names import Names
from hyper_parallel.policy_file.mindformers.settings import Settings
from hyper_parallel.policy_file.mindformers.targets import Action, Reading
from hyper_parallel.policy_file.mindformers.validation import as_list, checked, unknown_key, whole_number
from hyper_parallel.policy_file.patterns import parse_pattern

RECOMPUTE = "recompute_config"
SWAP = "swap_config"

LEGACY_PATTERNS = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
MCORE_PATTERNS = (
    r"mlp\.mul",
    r"mlp\.activation_func\.silu",
    r"mlp\.shared_experts\.mul",
    r"mlp\.shared_experts\.activation_func\.silu",
)
COMMUNICATION_PATTERNS = (r".*\.norm",)
SWAPPED_PATTERN = r".*\.flash_attention"

_SELECTING = ("select_recompute", "select_comm_recompute")
_EXCLUDING = {"select_recompute_exclude": "select_recompute", "select_comm_recompute_exclude": "select_comm_recompute"}
_INERT = ("mp_comm_recompute", "parallel_optimizer_comm_recompute")
_ACTIONS = {
    "select_recompute": Action.RECOMPUTE,
    "select_comm_recompute": Action.RECOMPUTE_COMMUNICATION,
    "select_recompute_exclude": Action.EXCLUDE,
    "select_comm_recompute_exclude": Action.EXCLUDE_COMMUNICATION,
}
RECOMPUTE_KEYS = ("recompute", *_SELECTING, *_EXCLUDING, "recompute_slice_activation", *_INERT)
SWAP_KEYS = ("swap", "cpu_offloading", "default_prefetch", "layer_swap", "cpu_offloading_num_layers", "op_swap")

Layers = frozenset[int]


_Prefetch = Annotated[int, BeforeValidator(whole_number), Field(ge=1)]


class _LayerSwap(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backward_prefetch: _Prefetch
    layers: Any


class _OpSwap(_LayerSwap):
    op_name: Annotated[list[StrictStr], BeforeValidator(as_list)]


class _SwapConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    swap: StrictBool = False
    default_prefetch: _Prefetch = 1
    layer_swap: Annotated[list[_LayerSwap], BeforeValidator(as_list)] | None = None
    op_swap: Annotated[list[_OpSwap], BeforeValidator(as_list)] | None = None


def read_graph(settings: Settings, reading: Reading, names: Names) -> None:
    """Work out `recompute_config` and `swap_config`.

    Args:
        settings: The blocks.
        reading: Gets targets, notes and problems.
        names: Reads patterns.
    """
    swap = _swap_config(settings, reading)
    recompute = dict(settings.blocks.get(RECOMPUTE) or {})
    _unknown(reading, RECOMPUTE, recompute, RECOMPUTE_KEYS)
    for key in _INERT:
        if key in recompute:
            reading.note("inert", f"{RECOMPUTE}, {key}", "MindFormers reads it nowhere when it sets up layers")
    if swap.swap and recompute:
        reading.note(
            "meaning", RECOMPUTE, "with swap on, lists are layer numbers of the whole net, not counts of each stage"
        )
    layers_of: _LayersOf = (
        partial(listed_layers, reading)
        if swap.swap
        else partial(counted_layers, reading, zero_bubble_v=settings.zero_bubble_v)
    )
    full = layers_of(recompute.get("recompute", False), f"{RECOMPUTE}, recompute")
    reading.add(Action.RECOMPUTE, None, full, f"{RECOMPUTE}, recompute")
    _slicing(settings, reading, recompute)
    counted = partial(counted_layers, reading)
    patterns_of = partial(_patterns, settings, reading, recompute, names)
    selected = {key: patterns_of(key, layers_of, listed=swap.swap) for key in _SELECTING}
    excluded = {key: patterns_of(key, counted, listed=False) for key in _EXCLUDING}
    for key, patterns in excluded.items():
        _without_repeats(reading, selected[_EXCLUDING[key]], patterns, key)
    for key in _SELECTING:
        _add_selected(reading, key, selected[key], full)
    for key, patterns in excluded.items():
        _add_excluded(reading, key, patterns, swapping=swap.swap)
    if swap.swap:
        _add_swap(settings, reading, swap, names)


_LayersOf = Callable[[Any, str], Layers]


def _swap_config(settings: Settings, reading: Reading) -> _SwapConfig:
    given = dict(settings.blocks.get(SWAP) or {})
    for name, other in (("swap", "cpu_offloading"), ("layer_swap", "cpu_offloading_num_layers")):
        if other in given:
            if name in given:
                reading.problem(SWAP, f"has {name} and {other}, which are one setting; leave one of them out")
            given[name] = given.pop(other)
    _unknown(reading, SWAP, given, SWAP_KEYS)
    known = {key: value for key, value in given.items() if key in SWAP_KEYS}
    swap: _SwapConfig = checked(_SwapConfig, known, SWAP, reading)
    if not swap.swap and (swap.layer_swap or swap.op_swap):
        reading.note("inert", SWAP, "swap is false, so that layer_swap and op_swap do nothing")
    return swap


def _slicing(settings: Settings, reading: Reading, recompute: Mapping[str, Any]) -> None:
    key = f"{RECOMPUTE}, recompute_slice_activation"
    if not recompute.get("recompute_slice_activation"):
        return
    if not settings.legacy:
        settings.refuse(reading, "recompute_slice_activation", key, "MindFormers refuses it for mcore models")
    elif recompute.get("recompute") is not True:
        reading.note("inert", key, "MindFormers reads it only beside `recompute: True`")
    elif not settings.trains:
        reading.note("inert", key, "run_mode is predict, and nothing is kept for backward")
    else:
        settings.refuse(
            reading, "recompute_slice_activation", key, "what a layer keeps can't be sliced over the ranks here"
        )


def _patterns(
    settings: Settings,
    reading: Reading,
    recompute: Mapping[str, Any],
    names: Names,
    name: str,
    layers_of: _LayersOf,
    *,
    listed: bool,
) -> dict[str, Layers]:
    """Give the layers of every pattern of a selective key."""
    value, key = recompute.get(name, False), f"{RECOMPUTE}, {name}"
    if isinstance(value, dict):
        found = {}
        for pattern, layers in value.items():
            if isinstance(pattern, str):
                found[pattern] = layers_of(layers, f"{key}, '{pattern}'")
            else:
                reading.problem(key, f"'{pattern}' must be a pattern, a string")
    elif isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        if listed:
            reading.problem(
                key, f"{list(value)}: with swap on, MindFormers wants the layers of each pattern: a mapping"
            )
            return {}
        found = {pattern: layers_of(True, key) for pattern in value}
    else:
        layers = layers_of(value, key)
        defaults = _defaults(settings, name)
        if layers and not defaults:
            reading.note("inert", key, "it names no operator; MindFormers has no patterns of its own for it")
        elif layers:
            reading.note("assumed", key, f"no patterns are given, so these are meant: {', '.join(defaults)}")
        found = dict.fromkeys(defaults, layers)
    for pattern in list(found):
        try:
            names.places(pattern)
        except ValueError as error:
            reading.problem(f"{key}, '{pattern}'", str(error))
            del found[pattern]
    return found


def _defaults(settings: Settings, name: str) -> tuple[str, ...]:
    if name == "select_recompute":
        return LEGACY_PATTERNS if settings.legacy else MCORE_PATTERNS
    return COMMUNICATION_PATTERNS if name == "select_comm_recompute" else ()


def _without_repeats(reading: Reading, selected: dict[str, Layers], excluded: Mapping[str, Layers], key: str) -> None:
    """Take selected patterns away that an excluded one matches: MindFormers does so, in all layers."""
    for exclude in excluded:
        same = next((pattern for pattern in selected if _same(exclude, pattern)), None)
        if same is None:
            continue
        if selected[same]:
            text = f"'{exclude}' takes '{same}' away from {_EXCLUDING[key]}, in all layers"
            reading.note("meaning", f"{RECOMPUTE}, {key}", text)
        del selected[same]


def _same(one: str, other: str) -> bool:
    first, second = one.split(r"\."), other.split(r"\.")
    return len(first) == len(second) and all(
        a == b or _matches(a, b) or _matches(b, a) for a, b in zip(first, second, strict=True)
    )


def _matches(pattern: str, name: str) -> bool:
    star = pattern.replace(".*", "*")
    if not star or not set(star) <= _GLOB or "**" in star:
        return False
    return parse_pattern(star).matches(name)


_GLOB = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_*")


def _add_selected(reading: Reading, name: str, patterns: Mapping[str, Layers], full: Layers) -> None:
    for pattern, layers in patterns.items():
        key = f"{RECOMPUTE}, {name}"
        if layers and layers <= full:
            reading.note("inert", key, f"'{pattern}': its layers are recomputed as a whole")
        elif layers & full:
            reading.note("meaning", key, f"'{pattern}': not in layers that are recomputed as a whole")
        reading.add(_ACTIONS[name], pattern, layers - full, key)


def _add_excluded(reading: Reading, name: str, patterns: Mapping[str, Layers], *, swapping: bool) -> None:
    key = f"{RECOMPUTE}, {name}"
    for pattern, layers in patterns.items():
        if layers and swapping:
            reading.note("inert", key, f"'{pattern}': with swap on, MindFormers doesn't apply it")
        elif layers:
            reading.add(_ACTIONS[name], pattern, layers, key)


def _add_swap(settings: Settings, reading: Reading, swap: _SwapConfig, names: Names) -> None:
    if swap.layer_swap is None and swap.op_swap is None:
        if not settings.legacy and swap.default_prefetch != 1:
            reading.note("inert", f"{SWAP}, default_prefetch", "MindFormers doesn't pass it on for mcore models")
        text = f"neither layer_swap nor op_swap is given, so {SWAPPED_PATTERN} of all layers is meant"
        reading.note("assumed", SWAP, text)
        reading.add(Action.SWAP, SWAPPED_PATTERN, range(reading.pipeline.layers), f"{SWAP}, swap")
    elif "default_prefetch" in swap.model_fields_set:
        text = "it counts only where neither layer_swap nor op_swap is given"
        reading.note("inert", f"{SWAP}, default_prefetch", text)
    for number, entry in enumerate(swap.layer_swap or ()):
        key = f"{SWAP}, layer_swap, entry {number}"
        reading.add(Action.SWAP, None, listed_layers(reading, entry.layers, f"{key}, layers"), f"{SWAP}, layer_swap")
    _prefetches(reading, "layer_swap", {None: list(swap.layer_swap or ())})
    by_pattern: dict[Any, list[_LayerSwap]] = {}
    for number, operation in enumerate(swap.op_swap or ()):
        key = f"{SWAP}, op_swap, entry {number}"
        layers = listed_layers(reading, operation.layers, f"{key}, layers")
        for pattern in operation.op_name:
            by_pattern.setdefault(pattern, []).append(operation)
            try:
                names.places(pattern)
            except ValueError as error:
                reading.problem(f"{key}, op_name '{pattern}'", str(error))
                continue
            reading.add(Action.SWAP, pattern, layers, f"{SWAP}, op_swap")
    _prefetches(reading, "op_swap", by_pattern)
    reading.note(
        "different",
        SWAP,
        "MindFormers' prefetch counts operators or layers; here loading ahead is bounded in bytes, by `swap: {window}`",
    )


def _prefetches(reading: Reading, name: str, by_pattern: Mapping[Any, list[_LayerSwap]]) -> None:
    for pattern, entries in by_pattern.items():
        different = {entry.backward_prefetch for entry in entries}
        if len(different) > 1 and any(entry.layers is True for entry in entries):
            what = f"{SWAP}, {name}" + (f", '{pattern}'" if pattern else "")
            reading.problem(what, f"`layers: True` beside entries with other prefetches ({sorted(different)})")


def _unknown(reading: Reading, block: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            unknown_key(reading, f"{block}, {key}", str(key), known)
