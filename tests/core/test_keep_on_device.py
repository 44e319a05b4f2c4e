"""`keep_on_device`: marked tensors, and what lies in their storage, are never swapped."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager, keep_on_device
from hyper_parallel.core.activation_memory import marks
from ms_ops.tensors import storage_of
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

X = numbers(2, 4)


@pytest.fixture(autouse=True)
def every_tensor() -> Iterator[None]:
    marks._marked.clear()
    SwapManager().configure(min_bytes=0, tier="host")
    SwapManager().reset()
    yield
    marks._marked.clear()
    SwapManager().configure()


class Reads(nn.Cell):
    """Multiplies by a table that it shares with others."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x) * self.table


def offloaded(table: Tensor, policy: Any = SWAP, **options: Any) -> int:
    """Bytes that a region sends to host, which has computation after it."""
    cells = [on(Reads(table), policy, **options), on(Layer(), RECOMPUTE)]
    got = gradients(Stack(cells), X)
    assert_same(got, gradients(Stack([Reads(table), Layer()]), X))
    return SwapManager().stats().offloaded_bytes


def test_a_marked_tensor_stays_and_the_rest_goes() -> None:
    table = numbers(2, 4, seed=1)
    sent = offloaded(table)
    SwapManager().reset()
    assert sent - offloaded(keep_on_device(table)) == table.nbytes
    assert SwapManager().stats().kept_bytes == table.nbytes


def test_a_view_of_a_marked_tensor_lies_in_its_storage() -> None:
    """Not through a net: MindSpore's CPU operators take a contiguous copy of a view."""
    base = keep_on_device(ops.exp(numbers(1, 2, 4, seed=1)))
    assert marks.storages([]) == {storage_of(base[0])} == {storage_of(base)}


def test_a_marked_input_of_a_replayed_region_stays() -> None:
    x = keep_on_device(ops.exp(X))
    net = Stack([on(Layer(), RECOMPUTE, swap_inputs=True), on(Layer(seed=1), RECOMPUTE)])
    assert_same(gradients(net, x), gradients(Stack([Layer(), Layer(seed=1)]), x))
    assert SwapManager().stats().offloaded_bytes == 0


def test_a_tensor_that_is_made_and_marked_inside_a_region_stays_for_that_call() -> None:
    class Makes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(keep_on_device(ops.exp(x))) * 2

    net = Stack([on(Makes(), SWAP), on(Layer(), RECOMPUTE)])
    assert_same(gradients(net, X), gradients(Stack([Makes(), Layer()]), X))
    assert SwapManager().stats().kept_bytes == X.nbytes
    assert len(marks._marked) == 0


def test_a_mark_ends_with_its_tensor() -> None:
    keep_on_device(numbers(2))
    assert marks.storages([]) == set()


@pytest.mark.parametrize("target", [{"a": [numbers(2)]}, (numbers(2), 3)], ids=["nested", "tuple"])
def test_a_structure_is_marked_and_comes_back(target: Any) -> None:
    assert keep_on_device(target) is target
    assert len(marks._marked) == 1


@pytest.mark.parametrize("target", [3, None, [], np.zeros(2)])
def test_what_holds_no_tensor_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="keep_on_device takes a tensor, or a structure with tensors in it"):
        keep_on_device(target)
