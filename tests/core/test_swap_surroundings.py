"""What other code holds isn't moved, wherever it is held: tables, masks, the net's own inputs."""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager
from tests.core import swap_nets
from tests.core.swap_nets import Sent, assert_exact_and_swapped
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

X = numbers(8, 8)

TABLE = numbers(8, 8, seed=70)
MASK = Tensor(np.triu(np.ones((8, 8), bool), 1))
STORES: dict[str, Any] = {"rope": numbers(8, 8, seed=71), "masks": [Tensor(np.tril(np.ones((8, 8), bool), -1))]}


class Reads(nn.Cell):
    """Reads tables and masks from an attribute, from its module, from a structure there, and from its arguments."""

    def __init__(self, table: Tensor, seed: int) -> None:
        super().__init__()
        self.layer, self.table = Layer(8, seed=seed), table

    def construct(self, x: Tensor, mask: Tensor, rope: Tensor) -> Tensor:
        y = ops.masked_fill(self.layer(x) * self.table, MASK, 0.1) * TABLE
        y = ops.masked_fill(y * STORES["rope"], STORES["masks"][0], -0.1)
        return ops.masked_fill(y * rope, mask, 0.2)


class ReadsAll(nn.Cell):
    def __init__(self, put: Callable[[nn.Cell], nn.Cell]) -> None:
        super().__init__()
        self.table, self.mask, self.rope = ATTRIBUTE * 1, ARGUMENTS[0], ARGUMENTS[1]
        self.layers = nn.CellList([put(Reads(self.table, seed)) for seed in range(3)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.mask, self.rope)
        return x


ATTRIBUTE = numbers(8, 8, seed=72)
ARGUMENTS = (Tensor(np.eye(8) > 0), numbers(8, 8, seed=73))


def test_tables_and_masks_are_left_alone_wherever_they_are_held(sent: Sent, manager: SwapManager) -> None:
    assert_exact_and_swapped(ReadsAll, X)
    for tensor in (TABLE, MASK, STORES["rope"], STORES["masks"][0], ATTRIBUTE, *ARGUMENTS):
        assert not sent.has(tensor)
    held = manager.stats().cells["Reads"].held_bytes
    assert held >= 3 * (4 * X.nbytes + 3 * MASK.nbytes) or held >= 3 * 4 * X.nbytes


@functools.lru_cache
def cached_table(seed: int) -> Tensor:
    return numbers(8, 8, seed=seed)


class Rope:
    """No cell, as models often have it: its table is in an attribute, in a slot, in its class."""

    __slots__ = ("__dict__", "slot")
    of_class = numbers(8, 8, seed=81)

    def __init__(self) -> None:
        self.table, self.slot = numbers(8, 8, seed=82), numbers(8, 8, seed=83)


DEFAULT = numbers(8, 8, seed=84)


def by_default(table: Tensor = DEFAULT) -> Tensor:
    return table


def closing_over(table: Tensor) -> Callable[[], Tensor]:
    return lambda: table


ROPE, NAMED = Rope(), collections.namedtuple("Named", "table")(numbers(8, 8, seed=85))
QUEUE, PARENT, CLOSED = collections.deque([numbers(8, 8, seed=86)]), [nn.Cell()], closing_over(numbers(8, 8, seed=87))
PARENT[0].table = numbers(8, 8, seed=88)

PLACES: dict[str, Callable[[], Tensor]] = {
    "a cache": lambda: cached_table(80),
    "a plain object": lambda: ROPE.table,
    "a slot": lambda: ROPE.slot,
    "a class": lambda: Rope.of_class,
    "a default": lambda: by_default(),
    "a named tuple": lambda: NAMED.table,
    "a queue": lambda: QUEUE[0],
    "a cell in a list": lambda: PARENT[0].table,
    "a closure": lambda: CLOSED(),
    "another module": lambda: swap_nets.X,
}


class ReadsFrom(nn.Cell):
    def __init__(self, read: Callable[[], Tensor], seed: int) -> None:
        super().__init__()
        self.layer, self.read = Layer(8, seed=seed), read

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.layer(x) * self.read())


@pytest.mark.parametrize("place", PLACES)
def test_a_table_is_left_alone_whatever_holds_it(place: str, sent: Sent) -> None:
    read = PLACES[place]
    read()
    assert_exact_and_swapped(lambda put: Stack([put(ReadsFrom(read, seed)) for seed in range(3)]), X)
    assert not sent.has(read())


class HoldsUnder(nn.Cell):
    """Holds a table, under a name that only this cell has."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.layer, self.name = Layer(8, seed=seed), name
        setattr(self, name, numbers(8, 8, seed=90 + seed))

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.layer(x) * getattr(self, self.name))


def test_a_table_is_left_alone_under_whatever_name_cells_of_one_class_have_it(sent: Sent) -> None:
    made: list[nn.Cell] = []

    def make(put: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
        made[:] = [HoldsUnder(name, seed) for seed, name in enumerate(("one", "other", "third"))]
        return Stack([put(cell) for cell in made])

    assert_exact_and_swapped(make, X)
    for cell in made:
        assert not sent.has(getattr(cell, cell.name))


class Calls(nn.Cell):
    """Calls its layers with an object that holds a table."""

    def __init__(self, put: Callable[[nn.Cell], nn.Cell]) -> None:
        super().__init__()
        self.batch = [Rope()]
        self.layers = nn.CellList([put(Called(seed)) for seed in range(3)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rope=self.batch[0])
        return x


class Called(nn.Cell):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = Layer(8, seed=seed)

    def construct(self, x: Tensor, rope: Rope) -> Tensor:
        return ops.tanh(self.layer(x) * rope.table)


def test_a_table_in_an_object_that_a_region_is_called_with_is_left_alone(sent: Sent) -> None:
    assert_exact_and_swapped(Calls, X)
    assert not sent.has(numbers(8, 8, seed=82))


def test_a_group_holds_no_table_after_its_region_has_ended(manager: SwapManager) -> None:
    """Who has gathered a weight may let go of it before backward."""
    gone: list[weakref.ref[Tensor]] = []

    class Gathers(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x * self.gathered)

    def drop(cell: nn.Cell, inputs: Any, output: Any) -> None:
        gone.append(weakref.ref(cell.gathered))
        cell.gathered = None

    layer = on(Gathers(), SWAP)
    layer.gathered = ops.stop_gradient(X * 2)
    layer.register_forward_hook(drop)
    out, backward = ms.vjp(layer, ops.sin(X))
    assert gone[0]() is None
    manager.abort_step()  # MindSpore holds the graph of a vjp whose backward isn't called
    del out, backward


def test_what_the_model_is_called_with_is_left_alone(sent: Sent) -> None:
    x = ops.sin(X)
    assert_exact_and_swapped(lambda put: Stack([put(Layer(8, seed=seed)) for seed in range(3)]), x)
    assert not sent.has(x)


def test_swapped_inputs_that_other_code_holds_are_left_alone(sent: Sent, manager: SwapManager) -> None:
    x = ops.sin(X)
    net = Stack([on(Layer(8, seed=seed), RECOMPUTE, swap_inputs=True) for seed in range(3)])
    assert_same(gradients(net, x, wait=True), gradients(Stack([Layer(8, seed=seed) for seed in range(3)]), x))
    assert not sent.has(x)
    assert manager.stats().offloaded_bytes > 0
    assert manager.stats().cells["Layer"].held_bytes >= x.nbytes
