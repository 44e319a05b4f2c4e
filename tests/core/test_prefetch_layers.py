"""`SwapManager().set_forward_prefetch_layer(first, second)`: what is loaded when backward reaches `second`."""

from collections.abc import Iterator
from typing import Any

import pytest
from mindspore import nn

from hyper_parallel import SwapManager, swap_wrapper
from hyper_parallel.core.activation_memory import prefetch_layers
from hyper_parallel.core.activation_memory.swap_in import Loads
from ms_ops.cpu import CpuBackEnd
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

X = numbers(2, 4)


@pytest.fixture(autouse=True)
def every_tensor() -> Iterator[None]:
    prefetch_layers._first_of.clear()
    prefetch_layers._named.clear()
    SwapManager().configure(min_bytes=0, tier="host")
    yield
    SwapManager().configure()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For every group that backward reaches: the indices of the groups to load, counted from the first."""
    found: list[list[int]] = []
    ahead = Loads._ahead

    def looks_ahead(loads: Loads, group: Any) -> Any:
        to_load = ahead(loads, group)
        first = min((*loads._groups, group.index))
        found.append(list(dict.fromkeys(entry.group.index - first for entry in to_load)))
        return to_load

    monkeypatch.setattr(Loads, "_ahead", looks_ahead)
    monkeypatch.setattr(CpuBackEnd, "soon", lambda back_end, function: function())  # else perhaps a group later
    return found


def layers(count: int = 4) -> list[nn.Cell]:
    return [on(Layer(seed=seed), SWAP) for seed in range(count)]


def test_groups_are_loaded_in_the_order_of_backward_without_pairs(order: list[list[int]]) -> None:
    gradients(Stack(layers()), X)
    assert order[0][:2] == [3, 2]


def test_the_first_of_a_pair_is_next_when_backward_reaches_the_second(order: list[list[int]]) -> None:
    cells = layers()
    SwapManager().set_forward_prefetch_layer(cells[0], cells[3])
    got = gradients(Stack(cells), X)
    assert order[0][:2] == [3, 0]
    assert order[1][:2] == [2, 1]
    assert_same(got, gradients(Stack([Layer(seed=seed) for seed in range(4)]), X))


def test_operators_inside_a_layer_count_as_the_layer(order: list[list[int]]) -> None:
    plain = [Stack([Layer(seed=seed)]) for seed in range(4)]
    for stack in plain:
        stack.layers[0] = swap_wrapper(stack.layers[0])
    SwapManager().set_forward_prefetch_layer(plain[1], plain[3])
    gradients(Stack(plain), X)
    assert order[0][:2] == [3, 1]


def test_layers_without_anything_swapped_are_taken_and_change_nothing() -> None:
    cells = [Layer(), on(Layer(seed=1), RECOMPUTE)]
    SwapManager().set_forward_prefetch_layer(*cells)
    assert_same(gradients(Stack(cells), X), gradients(Stack([Layer(), Layer(seed=1)]), X))


def test_pairs_do_not_keep_layers_alive() -> None:
    cells = layers(2)
    SwapManager().set_forward_prefetch_layer(*cells)
    del cells
    assert len(prefetch_layers._named) == 0


@pytest.mark.parametrize("pair", [(3, Layer()), (Layer(), None), (Layer, Layer())])
def test_what_is_no_cell_is_refused(pair: Any) -> None:
    with pytest.raises(TypeError, match="set_forward_prefetch_layer takes two Cells, but got"):
        SwapManager().set_forward_prefetch_layer(*pair)


def test_the_same_layer_twice_is_refused() -> None:
    layer = Layer()
    with pytest.raises(ValueError, match="takes two layers, but got one twice: Layer"):
        SwapManager().set_forward_prefetch_layer(layer, layer)
