"""`PolicyFile`: the native policy file as typed models, what may stand in it and what each key means."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictStr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.rule import Model, PatternText, Policy, Rule, one_or_more, several

VERSION = 1
RULE_TAG, USE_TAG = "<rule>", "<use>"
"""How errors tell the two kinds of entries of `rules` apart."""


def _version(value: Any) -> int:
    # Neither `true` nor `1.0` is the version, though both equal 1 in Python.
    if type(value) is not int or value != VERSION:
        raise ValueError(f"expected {VERSION}, the version that this release reads")
    return value


class Use(Model):
    """An entry of `rules` that stands for a set of rules."""

    use: StrictStr
    """Name of the set, one of `rule_sets`. Its rules count as if they stood here."""


def _kind(value: Any) -> str:
    return USE_TAG if isinstance(value, Use) or (isinstance(value, dict) and "use" in value) else RULE_TAG


Entry = Annotated[Annotated[Rule, Tag(RULE_TAG)] | Annotated[Use, Tag(USE_TAG)], Discriminator(_kind)]


class Stage(Model):
    """What holds for one stage of a pipeline alone."""

    rules: tuple[Entry, ...] = ()
    """Rules that are added after the common ones."""


class Prefetch(Model):
    """Two layers of which the first is loaded when backward reaches the second."""

    load: PatternText
    """Dotted path of the layer whose swapped tensors are loaded."""
    at: PatternText
    """Dotted path of the later layer that backward has reached by then."""

    @model_validator(mode="after")
    def _is_a_pair(self) -> "Prefetch":
        if self.load == self.at:
            raise ValueError("expected an earlier and a later layer, but both are the same")
        return self


class PolicyFile(Model):
    """A whole policy file in the native format."""

    version: Annotated[int, BeforeValidator(_version), WithJsonSchema({"const": VERSION})]
    """Version of the format: 1. Required, so that a file written for a later format is never read as this one."""
    mode: Literal["auto", "pynative", "graph"] = "auto"
    """How the net runs: pynative; graph, compiled in GRAPH_MODE or by `ms.jit`; or auto, which is graph if MindSpore is
    in graph mode when the file is applied, else pynative. `apply_policy(net, source, mode="graph")` says it, too."""
    include: Annotated[
        tuple[StrictStr, ...], BeforeValidator(several), one_or_more({"type": "string", "minLength": 1})
    ] = Field(default=(), min_length=1, validate_default=False)
    """Other policy files, by paths relative to this one's folder. They count as if they stood before this file: of what
    contradicts, the later wins. Each is read once."""
    rule_sets: dict[StrictStr, tuple[Entry, ...]] = Field(default_factory=dict)
    """Rules by a name, for `use` in any list of rules."""
    default: Policy = CheckpointPolicy.PREFER_SAVE
    """What happens to cells that neither a rule nor a decorator names.

    prefer_save (the default) and must_save attach nothing: a cell outside a region keeps everything anyway. Another
    policy goes to the outermost cells below the net that hold no cell with a policy, are in none, and aren't the net
    itself. To find them, cells that hold one with a policy are looked into, and so are those without a construct of
    their own (CellList, CellDict)."""
    rules: tuple[Entry, ...] = ()
    """Who gets which policy. Of the rules that match a cell, the last one wins."""
    stages: tuple[Stage, ...] = Field(default=(), min_length=1, validate_default=False)
    """One entry per stage of the pipeline, in their order: what is added for that stage. A file with stages is applied
    to one of them: `apply_policy(net, "policy.yaml", stage=0)`."""
    prefetch: tuple[Prefetch, ...] = ()
    """What is loaded ahead of backward, besides what `swap.window` has loaded anyway; see
    `SwapManager.set_forward_prefetch_layer`."""
    swap: SwapSettings = Field(default_factory=SwapSettings)
    """Knobs of the swap manager, while the plan is applied. Only the keys that are given are set; one that contradicts
    what `SwapManager().configure()` was told is an error."""

    def as_plain_values(self) -> dict[str, Any]:
        """What YAML and JSON can write: the keys that were given."""
        return self.model_dump(mode="json", exclude_unset=True, by_alias=True)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the native format, generated from the models that validate it; editors use it.

    Returns:
        The schema.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.schema import json_schema
        >>> json_schema()["required"]
        ['version']
    """
    schema = PolicyFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
