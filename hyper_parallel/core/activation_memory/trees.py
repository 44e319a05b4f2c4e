"""Nested arguments and results: tuples, lists, dicts, named tuples, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from mindspore import Tensor


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of `tree` with `function` applied to everything that is no container, in a fixed order.

    Containers come back as their own type: a named tuple as that named tuple, a dataclass as that dataclass.
    """
    if isinstance(tree, tuple):
        items = [map_leaves(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if type(tree) is list:
        return [map_leaves(function, item) for item in tree]
    if type(tree) is dict:
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)  # not dataclasses.replace: that runs the constructor and __post_init__ again
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(result, field.name, map_leaves(function, getattr(tree, field.name)))
        return result
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    """Everything in `tree` that is no container, in the same order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
