"""`Rule`: which cells, and what happens to their activations; as typed models."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hyper_parallel import presets
from hyper_parallel.core.activation_memory.operator_policy import REST, Table
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.swap_settings import Bytes
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.layers import layers_as_text
from hyper_parallel.policy_file.names import did_you_mean
from hyper_parallel.policy_file.patterns import parse_pattern
from hyper_parallel.policy_file.tensors import DtypeName
from ms_ops.catalogue import dispatch_names

POLICY_NAMES = tuple(policy.name.lower() for policy in CheckpointPolicy)
PresetName = Literal["full", "selective", "every_other_matmul", "attention_only", "inputs_on_host"]
PRESET_NAMES: tuple[str, ...] = get_args(PresetName)
NO_SELECTOR, NO_VALUE = "no_selector", "no_value"
"""Types of the errors of a rule that names no cells, and of a key without a value."""


OFFERS = "offers"
"""In the context of a validation: for how many unknown operators the closest names may still be looked up."""


class Model(BaseModel):
    """A part of a policy file: unknown keys are errors, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_a_value(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not cls.model_fields[info.field_name or ""].validate_default:
            raise PydanticCustomError(NO_VALUE, "expected a value; leave the key out where it has none")
        return value


def _policy(value: Any) -> CheckpointPolicy:
    if isinstance(value, CheckpointPolicy):
        return value
    expected = f"expected one of {', '.join(POLICY_NAMES)}"
    if not isinstance(value, str):
        raise ValueError(expected)
    name = value.lower()
    if name not in POLICY_NAMES:
        raise ValueError(expected + did_you_mean(name, POLICY_NAMES))
    return CheckpointPolicy[name.upper()]


def _pattern(value: str) -> str:
    try:
        parse_pattern(value)
    except PolicyError as error:
        raise ValueError(str(error)) from None
    return value


def _class_pattern(value: str) -> str:
    if not value.startswith("re:") and "." in value:
        raise ValueError("expected the name of a Cell class, such as 'Attention', without its module")
    return _pattern(value)


def several(value: Any) -> Any:
    """One text stands for a list of it."""
    return (value,) if isinstance(value, str) else value


def _kept(value: Any) -> Any:
    """A list of operators names those that are kept."""
    if not isinstance(value, (list, tuple)):
        return value
    unnamed = next((item for item in value if not isinstance(item, str)), None)
    if unnamed is not None:
        raise ValueError(f"expected the name of an operator, but the list has {unnamed!r}")
    return dict.fromkeys(value, CheckpointPolicy.MUST_SAVE)


Policy = Annotated[
    CheckpointPolicy,
    BeforeValidator(_policy),
    PlainSerializer(lambda policy: policy.name.lower(), return_type=str),
    WithJsonSchema({"enum": list(POLICY_NAMES)}),
]
_OPERATORS = {"type": "object", "additionalProperties": {"enum": list(POLICY_NAMES)}, "minProperties": 1}
PatternText = Annotated[StrictStr, AfterValidator(_pattern)]
ClassText = Annotated[StrictStr, AfterValidator(_class_pattern)]
_NUMBERS = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9 ,-]+$"}]}
LayersText = Annotated[
    str,
    BeforeValidator(layers_as_text),
    WithJsonSchema({"anyOf": [*_NUMBERS["anyOf"], {"type": "array", "items": _NUMBERS, "minItems": 1}]}),
]


def one_or_more(items: dict[str, Any]) -> WithJsonSchema:
    """The JSON Schema of what `several` takes."""
    return WithJsonSchema({"anyOf": [items, {"type": "array", "items": items, "minItems": 1}]})


class Tensors(Model):
    """Which tensors of a swapped region go to host; the others stay on the device."""

    min_bytes: Annotated[Bytes, Field(ge=1)] | None = None
    """Smaller tensors stay. `swap.min_bytes` holds for all regions, and besides."""
    dtype: Annotated[
        tuple[DtypeName, ...], BeforeValidator(several), one_or_more({"enum": list(get_args(DtypeName))})
    ] = Field(default=(), min_length=1, validate_default=False)
    """Tensors of another dtype stay: one name, or a list, such as float16 or [float16, bfloat16]."""

    @model_validator(mode="after")
    def _says_something(self) -> "Tensors":
        if not self.model_fields_set:
            raise ValueError("expected min_bytes, dtype or both")
        return self


class Graph(Model):
    """What only a compiled graph reads, by MindSpore's own names."""

    mp_comm_recompute: StrictBool | None = None
    """Whether communication that model parallelism needs is recomputed with the region."""
    recompute_comm_op: StrictBool | None = None
    """The same for operators that the cell itself holds, without those of cells inside."""
    recompute_slice_activation: StrictBool | None = None
    """Whether what the region keeps is sliced over the ranks of model parallelism."""
    backward_prefetch: Annotated[int, Field(ge=0, strict=True)] | None = None
    """With must_swap: how many operators ahead of backward tensors are loaded; MindSpore chooses by default."""

    @model_validator(mode="after")
    def _says_something(self) -> "Graph":
        if not self.model_fields_set:
            raise ValueError(f"expected one or more of {', '.join(type(self).model_fields)}")
        return self


def _complete_schema(schema: dict[str, Any]) -> None:
    """Say what no single key says: a rule names cells, and what happens to them."""
    schema["required"] = [key for key in schema.get("required", []) if key != "policy"]
    for needed in (("cells", "class", "layers"), ("policy", "ops", "preset")):
        schema.setdefault("allOf", []).append({"anyOf": [{"required": [key]} for key in needed]})


class Rule(Model):
    """One entry of `rules`: which cells, and what happens to their activations."""

    model_config = ConfigDict(json_schema_extra=_complete_schema)

    cells: PatternText | None = None
    """Dotted path of the cells, below the net (with `layers`, below each of the layers): `*` is one segment or part of
    one, `**` any depth, `[a-b]` a range of indices (both ends included), `[a]` one index, `{a,b}` alternatives; or
    `re:` and a regular expression for the whole path. Only cells that run are named: CellList and CellDict hold cells,
    and nothing of theirs is kept. A pattern that matches no cell is an error."""
    class_name: ClassText | None = Field(default=None, alias="class")
    """Name of the cells' class, or of a class that it derives from; `*`, `{a,b}` and `re:` as in `cells`. With `cells`:
    of the cells that it names, those of the class. With `layers` alone: of the layers and all cells in them."""
    layers: LayersText | None = None
    """Numbers of layers, from 0: 3, "0-5, 8", or a list of both."""
    container: StrictStr | None = Field(default=None, validate_default=True)
    """Dotted path of the list whose cells `layers` counts; needed where a net has several."""
    policy: Policy
    """What happens to the activations of these cells: must_save, prefer_save, must_recompute, prefer_recompute or
    must_swap; see `CheckpointPolicy`. A saving policy matters inside a replayed region: the cell runs once there, which
    trades its memory for time. With `ops` or `preset` it may be left out, and is must_recompute."""
    swap_inputs: StrictBool = False
    """Keep the inputs of a replayed region on host. What stays on the device then no longer grows with the number of
    regions, at the cost of the traffic. Only with must_recompute or prefer_recompute."""
    determinism_check: Literal["operators", "values"] = "operators"
    """What a replay compares with its forward: operators (names, order, plain arguments, shapes, dtypes), or the values
    of their results, too, at the cost of waiting for each. Only with must_recompute or prefer_recompute."""
    ops: Annotated[
        dict[StrictStr, Policy] | None,
        BeforeValidator(_kept),
        WithJsonSchema({"anyOf": [_OPERATORS, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
    ] = None
    """Policies of the operators inside, by the name in the catalogue (`MatMul` is every matrix product) or MindSpore's;
    `*` is the rest, which is replayed by default. A list names those that are must_save. Without `policy` the rule
    means must_recompute."""
    preset: Annotated[tuple[PresetName, ...], BeforeValidator(several), one_or_more({"enum": list(PRESET_NAMES)})] = (
        Field(default=(), min_length=1, validate_default=False)
    )
    """A policy that has a name, or a list of those that go together, such as [selective, inputs_on_host]; see
    `hyper_parallel.presets`."""
    tensors: Tensors | None = None
    """Which tensors go to host. Only where some do: with must_swap, swapped inputs, or operators that are swapped."""
    exclude: Annotated[
        tuple[PatternText, ...], BeforeValidator(several), one_or_more({"type": "string", "minLength": 1})
    ] = Field(default=(), min_length=1, validate_default=False)
    """Dotted paths, below each of the cells, of cells that run once: the replay reads their output, which is kept. Only
    with must_recompute or prefer_recompute. A later rule for such a cell decides instead."""
    allow_cache_entry_mutation: StrictBool = False
    """Let results that are kept be written before the replay reads them. Only with must_recompute or
    prefer_recompute."""
    keep_collectives: StrictBool = False
    """Keep what collectives give, so that the replay communicates nothing. Only with must_recompute or
    prefer_recompute."""

    graph: Graph | None = None
    """Flags for a compiled net. Communication flags only with must_recompute or prefer_recompute, backward_prefetch
    only with must_swap."""

    @model_validator(mode="before")
    @classmethod
    def _replays_by_default(cls, value: Any) -> Any:
        says_how = isinstance(value, dict) and (value.get("ops") is not None or value.get("preset") is not None)
        return {**value, "policy": CheckpointPolicy.MUST_RECOMPUTE} if says_how and "policy" not in value else value

    @field_validator("container")
    @classmethod
    def _names_cells(cls, value: str | None, info: ValidationInfo) -> str | None:
        selectors = ("cells", "class_name", "layers")
        if all(name in info.data and info.data[name] is None for name in selectors):
            raise PydanticCustomError(NO_SELECTOR, "expected cells, class or layers, to say which cells it is about")
        if value is not None and info.data.get("layers", "") is None:
            raise ValueError("it says where `layers` counts, but the rule has no layers; give them, or leave it out")
        return value

    @field_validator("ops")
    @classmethod
    def _can_be_honoured(
        cls, value: dict[str, CheckpointPolicy] | None, info: ValidationInfo
    ) -> dict[str, CheckpointPolicy] | None:
        if value is None:
            return None
        _needs_a_replay(info, "operators have no policies of their own; leave one of the two out")
        unknown = next((name for name in value if name != REST and not dispatch_names(name)), None)
        if unknown is not None and info.context is not None:
            if not info.context[OFFERS]:
                raise ValueError(f"operator {unknown!r}: MindSpore dispatches no such operator")
            info.context[OFFERS] -= 1
        try:
            Table(value, "")
        except PolicyError as error:
            raise ValueError(str(error).removeprefix(": ")) from None
        return value

    @field_validator("preset")
    @classmethod
    def _fits_together(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        _needs_a_replay(info, "a preset has nothing to act on; leave one of the two out")
        if len(set(value)) < len(value):
            raise ValueError("a preset is named twice")
        options = [(name, preset_options([name])) for name in value]
        about_operators = [name for name, given in options if not given.keys().isdisjoint(("ops", "policy_fn"))]
        if len(about_operators) > 1 or (about_operators and info.data.get("ops") is not None):
            others = about_operators[1] if len(about_operators) > 1 else "`ops`"
            raise ValueError(f"{about_operators[0]} and {others} both say what happens to operators; leave one out")
        policy = info.data.get("policy", CheckpointPolicy.MUST_RECOMPUTE)
        for name, given in options:
            if given.get("policy", policy) is not policy:
                raise ValueError(f"{name} means {given['policy'].name.lower()}, but policy is {policy.name.lower()}")
        return value

    @field_validator("tensors")
    @classmethod
    def _has_tensors_to_swap(cls, value: Tensors, info: ValidationInfo) -> Tensors:
        data = info.data
        policy = data.get("policy")
        swaps = (
            policy is None
            or policy.swaps
            or data.get("swap_inputs", True)
            or "swap_inputs" in preset_options(data.get("preset", ()))
            or any(each.swaps for each in (data.get("ops") or {}).values())
        )
        if policy is not None and not swaps:
            raise ValueError(
                f"expected a rule that swaps (must_swap, swap_inputs, or an operator with must_swap), but "
                f"{policy.name.lower()} moves nothing to host"
            )
        return value

    @field_validator("exclude")
    @classmethod
    def _has_a_replay_to_leave_out(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        _needs_a_replay(info, "every cell runs once anyway")
        return value

    @field_validator("allow_cache_entry_mutation", "keep_collectives")
    @classmethod
    def _has_a_cache(cls, value: bool, info: ValidationInfo) -> bool:
        if value:
            _needs_a_replay(info, "nothing is kept for a replay")
        return value

    @field_validator("determinism_check")
    @classmethod
    def _has_a_replay_to_check(cls, value: str, info: ValidationInfo) -> str:
        if value == "values":
            _needs_a_replay(info, "there is nothing to compare")
        return value

    @field_validator("graph")
    @classmethod
    def _has_a_region(cls, value: Graph, info: ValidationInfo) -> Graph:
        policy = info.data.get("policy")
        if value.model_fields_set - {"backward_prefetch"}:
            _needs_a_replay(info, "there is no communication to recompute")
        if "backward_prefetch" in value.model_fields_set and policy is not None and not policy.swaps:
            raise ValueError(f"backward_prefetch is for must_swap, but the policy is {policy.name.lower()}")
        return value

    @field_validator("swap_inputs")
    @classmethod
    def _has_inputs_to_swap(cls, value: bool, info: ValidationInfo) -> bool:
        if value:
            _needs_a_replay(info, "there are no inputs to keep on host")
        return value

    @property
    def selector(self) -> str:
        """Which cells, in short: ``layers 0-5: attention``."""
        layers = f"layers {self.layers}" + (f" of {self.container}" if self.container is not None else "")
        parts = [layers] if self.layers is not None else []
        parts += [self.cells] if self.cells is not None else []
        parts += [f"class {self.class_name}"] if self.class_name is not None else []
        return ": ".join(parts)


def preset_options(names: Any) -> dict[str, Any]:
    """What presets together give to `activation_policy`."""
    found: Mapping[str, Any] = {}
    for name in names:
        found = {**found, **getattr(presets, name)()}
    return dict(found)


def _needs_a_replay(info: ValidationInfo, why_not: str) -> None:
    policy = info.data.get("policy")
    if policy is not None and not policy.replays:
        raise ValueError(
            f"expected a policy that replays (must_recompute or prefer_recompute), but {policy.name.lower()} "
            f"replays nothing, so {why_not}"
        )
