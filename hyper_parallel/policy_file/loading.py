"""From a path or a dict to a validated `PolicyFile`, or one `PolicyError` that names every mistake."""

import os
from collections.abc import Iterator
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.schema import POLICY_NAMES, PolicyFile, Rule, did_you_mean

DICT_SOURCE = "dict"

_MOST_LEVELS = 50

_EXPECTED = {
    "version": "version: 1",
    "default": f"one of {', '.join(POLICY_NAMES)}",
    "rules": "a list of rules, each with cells, and policy or ops",
    "rule": "a mapping with cells, and policy or ops",
    "cells": "a dotted path such as 'layers.*.mlp', in quotes",
    "policy": f"one of {', '.join(POLICY_NAMES)}",
    "swap_inputs": "true or false",
    "determinism_check": "operators or values",
    "ops": "a mapping from operators to policies",
    "allow_cache_entry_mutation": "true or false",
    "keep_collectives": "true or false",
    "swap": f"a mapping with any of {', '.join(SwapSettings.model_fields)}",
    "size": "a whole number of bytes or a string like '32MiB'",
    "folder": "the path of a folder",
    "when_exhausted": "a list of recompute and keep",
}

_brief = Repr()
_brief.maxstring = _brief.maxother = 60
_path = Repr()
_path.maxstring = 400


class Source(NamedTuple):
    """A validated file and where it came from."""

    file: PolicyFile
    name: str
    """Short name for messages: the file's name, or `dict`."""
    origin: str
    """The path as it was given, or `dict`."""


def read_policy_file(source: str | os.PathLike[str] | dict[str, Any]) -> Source:
    """Read and validate a policy file.

    Args:
        source: Path of a YAML file, or the same content as a dict (its policies may be CheckpointPolicy members).

    Returns:
        The validated file.

    Raises:
        TypeError: The source is neither a path nor a dict.
        PolicyError: The file can't be read, or has mistakes: one line for each, with its place, the value and what
            was expected.
    """
    if isinstance(source, dict):
        return Source(_validated(source, DICT_SOURCE, None), DICT_SOURCE, DICT_SOURCE)
    if not isinstance(source, (str, os.PathLike)) or not isinstance(os.fspath(source), str):
        raise TypeError(f"a policy file is given as a path or a dict, but got {type(source).__name__}")
    path = Path(source)
    content, root = _parsed(_text_of(path), path.name)
    if not isinstance(content, dict):
        what = "it is empty" if content is None else f"it holds {_brief.repr(content)}"
        raise PolicyError(f"{path.name} must be a mapping that begins with `version: 1`, but {what}")
    return Source(_validated(content, path.name, root), path.name, os.fspath(source))


def _text_of(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise PolicyError(f"policy file {_path.repr(str(path))} doesn't exist (a str is a path, not YAML)") from None
    except IsADirectoryError:
        raise PolicyError(f"policy file {_path.repr(str(path))} is a folder; give the path of a YAML file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PolicyError(f"policy file {_path.repr(str(path))} can't be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{path.name}, line {line}: not UTF-8 (byte {data[error.start]:#04x})") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is given twice is an error, not a silent overwrite."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # PyYAML recurses per level; a hostile file must not exhaust the stack.
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, "it is nested too deeply", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key, line = (key_node.tag, key_node.value), key_node.start_mark.line + 1
                if key in first_lines:
                    problem = f"the key {key_node.value!r} is given twice (first in line {first_lines[key]})"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                first_lines[key] = line
        return node


def _parsed(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return (None if root is None else loader.construct_document(root)), root
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        hint = "; a pattern that begins with * must be in quotes" if "alias" in what else ""
        raise PolicyError(f"{name}{where}: malformed YAML: {what}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PolicyError(
            f"{name}, line {line}: malformed YAML: the character {error.character!r} isn't allowed"
        ) from None
    except ValueError as error:
        # A scalar that looks like a date or a number and is none, such as 2026-99-99.
        raise PolicyError(f"{name}: malformed YAML: {error}") from None


def _validated(content: dict[Any, Any], name: str, root: yaml.Node | None) -> PolicyFile:
    try:
        return PolicyFile.model_validate(content)
    except ValidationError as failure:
        details = failure.errors(include_url=False)
    found = sorted(((_line_of(root, detail["loc"]), _sentence(detail)) for detail in details), key=lambda e: e[0] or 0)
    problems = [f"line {line}: {text}" if line else text for line, text in found]
    raise policy_error(name, problems)


def policy_error(name: str, problems: list[str]) -> PolicyError:
    """Make one error out of all that is wrong with a file.

    Args:
        name: The file.
        problems: One line each.

    Returns:
        The error, to be raised.
    """
    if len(problems) == 1:
        separator = ", " if problems[0].startswith("line ") else ": "
        return PolicyError(name + separator + problems[0])
    return PolicyError("\n  ".join([f"{name} has {len(problems)} errors:", *problems]))


def _sentence(detail: ErrorDetails) -> str:
    loc, kind, value = detail["loc"], detail["type"], _brief.repr(detail["input"])
    where = ", ".join(_place(loc))
    if kind == "invalid_key":
        return ", ".join([*_place(loc[:-1]), f"key {value}: a key must be a string"])
    if kind == "extra_forbidden":
        model = _model_at(loc[:-1])
        known = model.model_fields
        offer = did_you_mean(str(loc[-1]), known) or f"; known are {', '.join(known)}"
        return f"{where}: unknown key (its value: {value}){offer}"
    if kind == "missing":
        return f"{where} is missing, expected {_expected(loc)}"
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
        return f"{where}: {reason if value in reason else f'got {value}, {reason}'}"
    if kind == "literal_error":
        return f"{where}: got {value}, expected {detail['ctx']['expected']}"
    if kind == "byte_size_unit":
        return f"{where}: got {value}, unknown unit {detail['ctx']['unit']!r}, expected {_EXPECTED['size']}"
    if kind == "byte_size":
        return f"{where}: got {value}, expected {_EXPECTED['size']}"
    expected = _expected(loc)
    return f"{where}: got {value}, {f'expected {expected}' if expected else detail['msg'].replace('Input', 'it')}"


def _place(loc: tuple[int | str, ...]) -> Iterator[str]:
    if len(loc) > 1 and loc[0] == "rules":
        yield f"rule {int(loc[1]) + 1}"
        loc = loc[2:]
    for part in loc:
        yield f"item {part + 1}" if isinstance(part, int) else part


def _expected(loc: tuple[int | str, ...]) -> str:
    return _EXPECTED["rule"] if isinstance(loc[-1], int) else _EXPECTED.get(loc[-1], "")


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    if not loc:
        return PolicyFile
    return Rule if loc[0] == "rules" else SwapSettings


def _line_of(root: yaml.Node | None, loc: tuple[int | str, ...]) -> int | None:
    """Give the line of the deepest part of a place that is in the file (a missing key's mapping, for one)."""
    if root is None:
        return None
    node, line = root, root.start_mark.line
    for part in loc:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                if key_node.value == str(part):
                    node, line = value_node, key_node.start_mark.line
                    break
    return line + 1
