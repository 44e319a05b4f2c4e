"""What pydantic finds wrong, in the words of a policy file: where, what stands there, and what was expected."""

from collections.abc import Iterator
from reprlib import Repr
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.names import did_you_mean
from hyper_parallel.policy_file.rule import NO_SELECTOR, NO_VALUE, POLICY_NAMES, PRESET_NAMES, Graph, Rule, Tensors
from hyper_parallel.policy_file.schema import RULE_TAG, USE_TAG, PolicyFile, Prefetch, Stage
from hyper_parallel.policy_file.tensors import DTYPE_NAMES

Loc = tuple[int | str, ...]

_A_RULE = "a mapping with cells, class or layers, and policy, ops or preset; or with use"
_PATTERN = "a dotted path such as 'layers.*.mlp', in quotes"
_EXPECTED = {
    "version": "version: 1",
    "mode": "auto, pynative or graph",
    "include": "the path of a policy file, or a list of them",
    "rule_sets": "a mapping from names to lists of rules",
    "default": f"one of {', '.join(POLICY_NAMES)}",
    "rules": f"a list of rules, each {_A_RULE}",
    "stages": "a list with one mapping per stage, each with rules",
    "prefetch": "a list of pairs, each with load and at",
    "load": _PATTERN,
    "at": _PATTERN,
    "use": "the name of a set, one of rule_sets",
    "cells": _PATTERN,
    "class": "the name of a Cell class, such as 'Attention'",
    "layers": "layer numbers such as 3, '0-5, 8' or [0-5, 8]",
    "container": "the dotted path of a CellList or SequentialCell, such as 'decoder.layers'",
    "policy": f"one of {', '.join(POLICY_NAMES)}",
    "swap_inputs": "true or false",
    "determinism_check": "operators or values",
    "ops": "a mapping from operators to policies, or a list of operators that are kept",
    "preset": f"one of {', '.join(PRESET_NAMES)}, or a list of them",
    "graph": f"a mapping with any of {', '.join(Graph.model_fields)}",
    "backward_prefetch": "a whole number of operators, 0 or more",
    **dict.fromkeys(("mp_comm_recompute", "recompute_comm_op", "recompute_slice_activation"), "true or false"),
    "tensors": "a mapping with min_bytes, dtype or both",
    "dtype": f"one of {', '.join(DTYPE_NAMES)}, or a list of them",
    "exclude": "dotted paths below the cells, such as 'router' or ['router', '*.norm']",
    "allow_cache_entry_mutation": "true or false",
    "keep_collectives": "true or false",
    "swap": f"a mapping with any of {', '.join(SwapSettings.model_fields)}",
    "size": "a whole number of bytes or a string like '32MiB'",
    "folder": "the path of a folder",
    "when_exhausted": "a list of recompute and keep",
}
_LISTS = {"rules": "rule", "stages": "stage", "prefetch": "pair"}
"""What an item of a list is called. Stages are counted from 0, as ranks are; the rest from 1."""

_brief = Repr()
_brief.maxstring = _brief.maxother = 60


def brief(value: Any) -> str:
    """A value as a message shows it, cut short if it is long."""
    return _brief.repr(value)


def plain_loc(loc: Loc) -> Loc:
    """A place in a file, without what pydantic adds to it."""
    return tuple(part for part in loc if part not in (RULE_TAG, USE_TAG))


def place_of(detail: ErrorDetails) -> tuple[Loc, bool]:
    """Where an error is.

    Args:
        detail: The error.

    Returns:
        The place, and whether the key is wrong, not its value.
    """
    loc, kind = plain_loc(detail["loc"]), detail["type"]
    return (loc[:-1] if kind == NO_SELECTOR else loc), kind in ("extra_forbidden", "missing")


def is_consequence(detail: ErrorDetails) -> bool:
    """Whether an error only follows from another one: a list is too short once its wrong items are left out."""
    return detail["type"] == "too_short" and bool(detail["input"])


def sentence(detail: ErrorDetails) -> str:
    """Say what is wrong.

    Args:
        detail: One error of a `PolicyFile`.

    Returns:
        One line: the place, what stands there, what was expected.
    """
    kind, value = detail["type"], brief(detail["input"])
    loc, _ = place_of(detail)
    where = in_words(loc)
    if kind == "invalid_key" or (loc and loc[-1] == "[key]"):
        return ", ".join([*_parts(loc[: -2 if loc[-1] == "[key]" else -1]), f"key {value}: a key must be a string"])
    if kind == "extra_forbidden" and USE_TAG in detail["loc"]:
        return f"{where}: unknown key (its value: {value}); an entry with `use` stands for a set and has no other key"
    if kind == "extra_forbidden":
        known = _keys(_model_at(loc[:-1]))
        offer = did_you_mean(str(loc[-1]), known) or f"; known are {', '.join(known)}"
        return f"{where}: unknown key (its value: {value}){offer}"
    if kind == "missing":
        return f"{where} is missing, expected {_expected(loc)}"
    if kind == NO_SELECTOR:
        return f"{where}: {detail['msg']}"
    if kind == NO_VALUE:
        return f"{where}: got {value}, expected {_expected(loc) or 'a value; leave the key out where it has none'}"
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
        return f"{where}: {reason if value in reason else f'got {value}, {reason}'}"
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]
        offer = did_you_mean(
            str(detail["input"]), [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
        )
        return f"{where}: got {value}, expected {expected}{offer}"
    if kind == "byte_size_unit":
        return f"{where}: got {value}, unknown unit {detail['ctx']['unit']!r}, expected {_EXPECTED['size']}"
    if kind == "byte_size":
        return f"{where}: got {value}, expected {_EXPECTED['size']}"
    expected = _expected(loc)
    return f"{where}: got {value}, {f'expected {expected}' if expected else detail['msg'].replace('Input', 'it')}"


def in_words(loc: Loc) -> str:
    """Name a place in a file: ``rule 2, policy``; ``stage 0, rule 1``; ``rule set attention, rule 1``."""
    return ", ".join(_parts(loc))


def _parts(loc: Loc) -> Iterator[str]:
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        if part == "rule_sets" and rest:
            yield f"rule set {rest.pop(0)}"
            if rest:
                rest.insert(0, "rules")
        elif part in _LISTS and rest and isinstance(rest[0], int):
            number = int(rest.pop(0))
            yield f"{_LISTS[str(part)]} {number if part == 'stages' else number + 1}"
        elif isinstance(part, int):
            yield f"item {part + 1}"
        elif part != "rules" or not rest:
            yield str(part)


def _expected(loc: Loc) -> str:
    if loc and isinstance(loc[-1], int):
        if len(loc) > 1 and (loc[-2] == "rules" or loc[0] == "rule_sets"):
            return _A_RULE
        return {"stages": "a mapping with rules", "prefetch": "a mapping with load and at"}.get(
            str(loc[-2]), _EXPECTED.get(str(loc[-2]), "")
        )
    if len(loc) == 2 and loc[0] == "rule_sets":
        return _EXPECTED["rules"]
    return _EXPECTED.get(str(loc[-1]), "") if loc else ""


def _model_at(loc: Loc) -> type[BaseModel]:
    if not loc:
        return PolicyFile
    if loc[-1] in _PARTS:
        return _PARTS[str(loc[-1])]
    if isinstance(loc[-1], int) and len(loc) > 1 and loc[-2] in ("stages", "prefetch"):
        return Stage if loc[-2] == "stages" else Prefetch
    return Rule


_PARTS: dict[Any, type[BaseModel]] = {"swap": SwapSettings, "tensors": Tensors, "graph": Graph}


def _keys(model: type[BaseModel]) -> list[str]:
    also = ["use"] if model is Rule else []
    return [field.alias or name for name, field in model.model_fields.items()] + also
