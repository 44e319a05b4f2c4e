"""The native policy file as typed models: what may stand in it, and what each key means."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

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
    field_validator,
    model_validator,
)

from hyper_parallel.core.activation_memory.operator_policy import Table
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.patterns import parse_pattern

POLICY_NAMES = tuple(policy.name.lower() for policy in CheckpointPolicy)


def did_you_mean(value: str, known: Iterable[str], count: int = 3) -> str:
    """Offer the known names that are closest to a wrong one.

    Args:
        value: What was written.
        known: What could have been meant.
        count: Most names to offer.

    Returns:
        ``"; did you mean 'a' or 'b'?"``, or an empty string if nothing is close.
    """
    close = difflib.get_close_matches(value, list(known), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _version(value: Any) -> int:
    # Neither `true` nor `1.0` is the version, though both equal 1 in Python.
    if type(value) is not int or value != 1:
        raise ValueError("expected 1, the version that this release reads")
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


def _needs_a_replay(info: ValidationInfo, why_not: str) -> None:
    policy = info.data.get("policy")
    if policy is not None and not policy.replays:
        raise ValueError(
            f"expected a policy that replays (must_recompute or prefer_recompute), but {policy.name.lower()} "
            f"replays nothing, so {why_not}"
        )


Policy = Annotated[
    CheckpointPolicy, BeforeValidator(_policy), PlainSerializer(lambda policy: policy.name.lower(), return_type=str)
]
PatternText = Annotated[StrictStr, AfterValidator(_pattern)]


class Rule(BaseModel):
    """One entry of `rules`: which cells, and what happens to their activations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cells: PatternText
    """Dotted path of the cells, below the net: `*` is one segment or part of one, `**` any depth, `[a-b]` a range of
    indices (both ends included), `[a]` one index. Only cells that run are named: CellList and CellDict hold cells, and
    nothing of theirs is kept. A pattern that matches no cell is an error."""
    policy: Policy
    """What happens to the activations of these cells, in lower case: must_save, prefer_save, must_recompute,
    prefer_recompute or must_swap; see `CheckpointPolicy`. A saving policy matters inside a replayed region: the cell
    runs once there, which trades its memory for time."""
    swap_inputs: StrictBool = False
    """Keep the inputs of a replayed region on host. What stays on the device then no longer grows with the number of
    regions, at the cost of the traffic. Only with must_recompute or prefer_recompute."""

    determinism_check: Literal["operators", "values"] = "operators"
    """What a replay compares with its forward: operators (names, order, plain arguments, shapes, dtypes), or the values
    of their results, too, at the cost of waiting for each. Only with must_recompute or prefer_recompute."""

    ops: dict[StrictStr, Policy] | None = None
    """Policies of the operators inside, by the name in the catalogue (`MatMul` is every matrix product) or MindSpore's;
    `*` is the rest, which is replayed by default. Without `policy` the rule means must_recompute."""

    allow_cache_entry_mutation: StrictBool = False
    """Let results that are kept be written before the replay reads them. Only with must_recompute or
    prefer_recompute."""

    keep_collectives: StrictBool = False
    """Keep what collectives give, so that the replay communicates nothing. Only with must_recompute or
    prefer_recompute."""

    @model_validator(mode="before")
    @classmethod
    def _operators_are_for_a_replay(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("ops") is not None and "policy" not in value:
            return {**value, "policy": CheckpointPolicy.MUST_RECOMPUTE}
        return value

    @field_validator("ops")
    @classmethod
    def _can_be_honoured(
        cls, value: dict[str, CheckpointPolicy] | None, info: ValidationInfo
    ) -> dict[str, CheckpointPolicy] | None:
        if value is None:
            return None
        _needs_a_replay(info, "operators have no policies of their own; leave one of the two out")
        try:
            Table(value, "")
        except PolicyError as error:
            raise ValueError(str(error).removeprefix(": ")) from None
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

    @field_validator("swap_inputs")
    @classmethod
    def _has_inputs_to_swap(cls, value: bool, info: ValidationInfo) -> bool:
        if value:
            _needs_a_replay(info, "there are no inputs to keep on host")
        return value


class PolicyFile(BaseModel):
    """A whole policy file in the native format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[int, BeforeValidator(_version)]
    """Version of the format: 1. Required, so that a file written for a later format is never read as this one."""
    default: Policy = CheckpointPolicy.PREFER_SAVE
    """What happens to cells that neither a rule nor a decorator names.

    prefer_save (the default) and must_save attach nothing: a cell outside a region keeps everything anyway. Another
    policy goes to the outermost cells below the net that hold no cell with a policy, are in none, and aren't the net
    itself. To find them, cells that hold one with a policy are looked into, and so are those without a construct of
    their own (CellList, CellDict)."""
    rules: tuple[Rule, ...] = ()
    """Who gets which policy. Of the rules that match a cell, the last one wins."""
    swap: SwapSettings = Field(default_factory=SwapSettings)
    """Knobs of the swap manager, while the plan is applied. Only the keys that are given are set; one that contradicts
    what `SwapManager().configure()` was told is an error."""
