"""Arguments and results of any shape."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tests.exactness.programs.program import Program, Put, X, Y, step

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class State:
    hidden: Tensor
    step: int = 0
    more: Any = None


INDEX, FLAGS = Tensor([2, 0, 1], ms.int32), Tensor(np.array([True, False, True]))


def leaves(tree: Any) -> list:
    """Everything that is no container, dictionaries by key."""
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in (key, *leaves(tree[key]))]
    if isinstance(tree, State):
        return [*leaves(tree.hidden), tree.step, *leaves(tree.more)]
    if isinstance(tree, SimpleNamespace):
        return leaves(vars(tree))
    return [tree]


def types(tree: Any) -> Any:
    """The tree with types in place of tensors."""
    if isinstance(tree, (tuple, list)):
        return type(tree), [types(item) for item in tree]
    if isinstance(tree, dict):
        return type(tree), {key: types(value) for key, value in tree.items()}
    if isinstance(tree, State):
        return type(tree), types(tree.hidden), tree.step, types(tree.more)
    return type(tree) if isinstance(tree, Tensor) else tree


class Folds(nn.Cell):
    """Folds all leaves of all arguments, whatever they are, into one tensor."""

    def construct(self, *args: Any, **kwargs: Any) -> Tensor:
        result = ops.ones((3, 4), ms.float32)
        for position, leaf in enumerate(leaves(args) + leaves(kwargs), 1):
            if leaf is None:
                result = result * 1.25
            elif isinstance(leaf, str):
                result = result + len(leaf)
            elif isinstance(leaf, Tensor) and leaf.dtype != ms.float32:
                result = result * (leaf.astype(ms.float32) + position).reshape(3, 1)
            elif isinstance(leaf, Tensor):
                result = ops.tanh(result * leaf) * leaf
            else:
                result = result * (leaf + 0.5)
        return result


ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[tuple, dict]]] = {
    "positional": lambda a, b: ((a, b), {}),
    "keywords": lambda a, b: ((), {"x": a, "y": b}),
    "positional and keyword": lambda a, b: ((a,), {"y": b}),
    "None, str, bool and numbers between": lambda a, b: (
        (None, a, "name", 3, True, b, 0.5),
        {"mode": "full", "z": None},
    ),
    "integer and bool tensors between": lambda a, b: ((INDEX, a, FLAGS, b, INDEX), {}),
    "bool first": lambda a, b: ((True, a), {"y": b}),
    "None first": lambda a, b: ((None, a), {"y": b}),
    "tuple": lambda a, b: (((a, b),), {}),
    "list": lambda a, b: (([a, None, b],), {}),
    "nested tuples": lambda a, b: (((a, (b, (INDEX, a))), ()), {}),
    "dict": lambda a, b: (({"a": a, "b": b},), {}),
    "ordered dict": lambda a, b: ((OrderedDict(b=b, a=a),), {}),
    "dict in a keyword": lambda a, b: ((a,), {"more": {"b": b, "n": 2}}),
    "named tuple": lambda a, b: ((Pair(a, b),), {}),
    "dataclass": lambda a, b: ((State(a, 3, (b, None)),), {}),
    "object": lambda a, b: ((SimpleNamespace(a=a, b=[b], n=2),), {}),
    "everything in everything": lambda a, b: (
        ([Pair({"k": (a, [b])}, State(b, 1, [a])), None],),
        {"x": ({"s": "text"}, FLAGS)},
    ),
    "the same tensor twice": lambda a, b: ((a, a, b), {"z": a}),
}


class Gives(nn.Cell):
    """Gives a tree of results."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.build = build

    def construct(self, a: Tensor, b: Tensor) -> Any:
        return self.build(ops.tanh(a) * b, ops.exp(b) * a)


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda p, q: (p, q),
    "list": lambda p, q: [p, q],
    "dict": lambda p, q: {"p": p, "q": q},
    "ordered dict": lambda p, q: OrderedDict(q=q, p=p),
    "named tuple": Pair,
    "dataclass": lambda p, q: State(p, 4, q),
    "nested": lambda p, q: ([p, (q,)], {"p": p}),
    "None and others between": lambda p, q: (None, p, "name", 2, q),
    "integer tensor between": lambda p, q: (p, INDEX, q),
    "the same twice": lambda p, q: (p, p, q),
    "one that has no gradient": lambda p, q: (p, ops.stop_gradient(q)),
    "empty": lambda p, q: (p, (), [], q),
}


def _takes(put: Put, shape: str) -> Any:
    cell = put(Folds())

    def function(a: Tensor, b: Tensor) -> Tensor:
        args, kwargs = ARGUMENTS[shape](a * 1, b * 1)
        return (cell(*args, **kwargs) ** 2).sum()

    return step(function)


def _gives(put: Put, shape: str) -> Any:
    cell, build = put(Gives(RESULTS[shape])), RESULTS[shape]

    def function(a: Tensor, b: Tensor) -> Tensor:
        result = cell(a, b)
        assert types(result) == types(build(a, b))
        floats = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor) and leaf.dtype == ms.float32]
        return sum((leaf**2 * (i + 1)).sum() for i, leaf in enumerate(floats))

    return step(function)


def arguments_of_every_kind_in_every_order(put: Put) -> Any:
    """Seven kinds; each rotation puts every kind at every position once."""
    cell = put(Folds())

    def function(a: Tensor, b: Tensor) -> Tensor:
        arguments = [a * 1, None, INDEX, FLAGS, b * 1, "text", [a * b]]
        turned = (arguments[first:] + arguments[:first] for first in range(len(arguments)))
        return sum((cell(*args) ** 2).sum() for args in turned)

    return step(function)


def a_list_that_grows_after_the_call(put: Put) -> Any:
    cell = put(Folds())

    def function(a: Tensor, b: Tensor) -> Tensor:
        parts = [a * 1, b * 1]
        result = cell(parts)
        parts.append(a * b)
        return (result**2).sum()

    return step(function)


def a_dict_that_changes_after_the_call(put: Put) -> Any:
    cell = put(Folds())

    def function(a: Tensor, b: Tensor) -> Tensor:
        parts = {"a": a * 1, "more": [b * 1]}
        result = cell(x=parts)
        parts["a"] = a * b
        parts["more"].clear()
        return (result**2).sum()

    return step(function)


def arguments_from_outside_the_step(put: Put) -> Any:
    """No argument is computed in the step: nothing but the cell's own weights could be differentiated."""
    cell = put(Folds())
    return step(lambda a, b: (cell([X, Y], INDEX) * a * b).sum())


PROGRAMS: dict[str, Program] = {
    **{f"arguments: {shape}": partial(_takes, shape=shape) for shape in ARGUMENTS},
    **{f"results: {shape}": partial(_gives, shape=shape) for shape in RESULTS},
    "arguments_of_every_kind_in_every_order": arguments_of_every_kind_in_every_order,
    "a_list_that_grows_after_the_call": a_list_that_grows_after_the_call,
    "a_dict_that_changes_after_the_call": a_dict_that_changes_after_the_call,
    "arguments_from_outside_the_step": arguments_from_outside_the_step,
}
