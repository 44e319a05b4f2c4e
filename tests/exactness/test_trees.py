"""Arguments and results of any shape go through a region unchanged, with plain's gradients."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.helpers import RECOMPUTE, SWAP, assert_same, flat, numbers, on, settled

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class State:
    hidden: Tensor
    step: int = 0
    more: Any = None


KINDS: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
    "inside recompute": lambda cell: on(Around(on(cell, SWAP)), RECOMPUTE),
}
A, B = numbers(3, 4, seed=1), numbers(3, 4, seed=2)
INDEX, FLAGS = Tensor([2, 0, 1], ms.int32), Tensor(np.array([True, False, True]))


class Around(nn.Cell):
    """Hands everything on."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.cell(*args, **kwargs)


def leaves(tree: Any) -> list:
    """Everything that is no container, dictionaries by key."""
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item)]
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in (key, *leaves(tree[key]))]
    if isinstance(tree, State):
        return [*leaves(tree.hidden), tree.step, *leaves(tree.more)]
    return [tree]


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
    "tuple": lambda a, b: (((a, b),), {}),
    "list": lambda a, b: (([a, None, b],), {}),
    "nested tuples": lambda a, b: (((a, (b, (INDEX, a))), ()), {}),
    "dict": lambda a, b: (({"a": a, "b": b},), {}),
    "dict in a keyword": lambda a, b: ((a,), {"more": {"b": b, "n": 2}}),
    "named tuple": lambda a, b: ((Pair(a, b),), {}),
    "dataclass": lambda a, b: ((State(a, 3, (b, None)),), {}),
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
    "named tuple": Pair,
    "dataclass": lambda p, q: State(p, 4, q),
    "nested": lambda p, q: ([p, (q,)], {"p": p}),
    "None and others between": lambda p, q: (None, p, "name", 2, q),
    "integer tensor between": lambda p, q: (p, INDEX, q),
    "the same twice": lambda p, q: (p, p, q),
    "one that has no gradient": lambda p, q: (p, ops.stop_gradient(q)),
    "empty": lambda p, q: (p, (), [], q),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ARGUMENTS)
def test_arguments_arrive_and_give_plains_gradients(shape: str, kind: str) -> None:
    def run(cell: nn.Cell) -> Any:
        def function(a: Tensor, b: Tensor) -> Tensor:
            args, kwargs = ARGUMENTS[shape](a * 1, b * 1)
            return settled((cell(*args, **kwargs) ** 2).sum())

        return flat(ms.value_and_grad(function, (0, 1))(A, B), shape)

    assert_same(run(KINDS[kind](Folds())), run(Folds()))


def types(tree: Any) -> Any:
    """The tree with types in place of leaves."""
    if isinstance(tree, (tuple, list)):
        return type(tree), [types(item) for item in tree]
    if isinstance(tree, dict):
        return type(tree), {key: types(value) for key, value in tree.items()}
    if isinstance(tree, State):
        return type(tree), types(tree.hidden), tree.step, types(tree.more)
    return type(tree) if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", RESULTS)
def test_results_keep_their_type_and_give_plains_gradients(shape: str, kind: str) -> None:
    def run(cell: nn.Cell) -> Any:
        seen: list[Any] = []

        def function(a: Tensor, b: Tensor) -> Tensor:
            result = cell(a, b)
            seen.append(types(result))
            floats = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor) and leaf.dtype == ms.float32]
            return settled(sum((leaf**2 * (i + 1)).sum() for i, leaf in enumerate(floats)))

        return flat(ms.value_and_grad(function, (0, 1))(A, B), shape), seen

    (found, seen), (want, plain) = run(KINDS[kind](Gives(RESULTS[shape]))), run(Gives(RESULTS[shape]))
    assert_same(found, want)
    assert seen == plain


def test_a_list_that_grows_after_the_call_is_replayed_as_it_was() -> None:
    def run(cell: nn.Cell) -> Any:
        def function(a: Tensor, b: Tensor) -> Tensor:
            parts = [a * 1, b * 1]
            result = cell(parts)
            parts.append(a * b)
            return (result**2).sum()

        return flat(ms.value_and_grad(function, (0, 1))(A, B), "gradients")

    assert_same(run(on(Folds(), RECOMPUTE)), run(Folds()))


def test_an_ordered_dict_stays_one() -> None:
    cell = on(Gives(lambda p, q: OrderedDict(p=p, q=q)), SWAP)
    assert type(cell(A, B)) is OrderedDict
