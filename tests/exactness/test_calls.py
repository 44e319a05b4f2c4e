"""Functions, methods and Primitives as regions, policies stacked on one cell, and how often a region runs."""

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from hyper_parallel import SwapManager, checkpoint, checkpoint_wrapper, is_recomputing, swap, swap_wrapper
from tests.exactness.programs.calls import (
    a_call_whose_output_is_not_used,
    a_cell_called_twice,
    a_frozen_cell_in_the_middle,
    four_micro_batches_in_one_loss,
    tied_weights,
    two_forwards_before_two_backwards,
)
from tests.exactness.programs.program import Program, Put, X, record_of, step
from tests.exactness.programs.randomness import DRAWS, Random
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_same,
    flat,
    gradients,
    on,
    seeded,
)

KINDS: dict[str, Put] = {
    "save": lambda cell: on(cell, SAVE),
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "prefer recompute": lambda cell: on(cell, PREFER_RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
    "swap, then recompute": lambda cell: on(on(cell, SWAP), RECOMPUTE),
    "recompute, then swap": lambda cell: on(on(cell, RECOMPUTE), SWAP),
}


@pytest.mark.parametrize("kind", ["save", "swap, then recompute", "recompute, then swap"])
def test_policies_that_keep_or_are_stacked_give_plains_gradients(kind: str) -> None:
    program = two_forwards_before_two_backwards
    assert_same(record_of(program, KINDS[kind]), record_of(program, lambda cell: cell))


@pytest.mark.parametrize(
    "program",
    [a_cell_called_twice, a_call_whose_output_is_not_used, tied_weights, a_frozen_cell_in_the_middle],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("kind", ["recompute", "swap", "swapped inputs"])
def test_a_region_whose_input_an_enclosing_one_computes_gives_plains_gradients(program: Program, kind: str) -> None:
    def around(put: Put) -> Put:
        return lambda cell: Stack([Layer(seed=71), put(cell)])

    found = record_of(program, lambda cell: on(around(KINDS[kind])(cell), RECOMPUTE))
    assert_same(found, record_of(program, around(lambda cell: cell)))


CALLS: dict[str, Callable[[Layer], Callable[[Tensor], Tensor]]] = {
    "checkpoint of a cell": lambda layer: lambda x: checkpoint(layer, x),
    "checkpoint of a bound method": lambda layer: lambda x: checkpoint(layer.construct, x),
    "checkpoint of a lambda": lambda layer: lambda x: checkpoint(lambda z: layer(z), x),
    "checkpoint with swapped inputs": lambda layer: lambda x: checkpoint(layer, x, swap_inputs=True),
    "checkpoint of a partial": lambda layer: lambda x: checkpoint(functools.partial(layer.construct, x=x)),
    "checkpoint_wrapper of a function": lambda layer: checkpoint_wrapper(lambda z: layer(z)),
    "checkpoint_wrapper of a bound method": lambda layer: checkpoint_wrapper(layer.construct, swap_inputs=True),
    "swap of a cell": lambda layer: lambda x: swap(layer, x),
    "swap_wrapper of a function": lambda layer: swap_wrapper(lambda z: layer(z)),
    "checkpoint in a swap": lambda layer: lambda x: swap(lambda z: checkpoint(layer, z), x),
    "swap in a checkpoint": lambda layer: lambda x: checkpoint(lambda z: swap(layer, z), x),
}


class Counts(nn.Cell):
    """Nothing of it is saved; says when it ran."""

    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self.note = lambda: ran.append("replay" if is_recomputing() else "forward")

    def construct(self, x: Tensor) -> Tensor:
        self.note()
        return x + 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_changes_no_number(early_stop: bool) -> None:
    """The last cells save several tensors, or only what nothing needs: what an unwound forward would break."""
    ran: list[str] = []

    def program(call: Callable) -> Any:
        drops = Random(DRAWS["ops.dropout"])
        net = Stack([Layer(seed=1), drops, seeded(nn.BatchNorm1d(4)), nn.LayerNorm((4,)), nn.ReLU(), Counts(ran)])
        net.set_train()
        net.layers[3].gamma.requires_grad = False
        return step(lambda x, y: (call(net, x) * y).sum(), net, times=2)

    found = record_of(program, functools.partial(checkpoint, early_stop=early_stop))
    assert ran == ["forward", "replay"] * 2, "code runs again to its end; what is left out is operators"
    assert_same(found, record_of(program, lambda net, x: net(x)))


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs"])
def test_a_region_that_nothing_needs_the_gradient_of_runs_once(kind: str) -> None:
    frozen, layer = Layer(seed=1), Layer(seed=2)
    for parameter in frozen.get_parameters():
        parameter.requires_grad = False
    region = KINDS[kind](frozen)
    ms.grad(lambda x: (layer(x) * region(ops.stop_gradient(x))).sum())(X)
    assert frozen.calls == 1


def test_a_policy_goes_on_a_cell_whose_parameters_have_no_values_yet() -> None:
    with no_init_parameters():
        layer = nn.Dense(4, 4)
    assert on(layer, RECOMPUTE) is layer
    layer.init_parameters_data()
    plain = nn.Dense(4, 4)
    assert_same(gradients(seeded(layer), X), gradients(seeded(plain), X))


@pytest.mark.parametrize("way", CALLS)
def test_a_wrapped_call_gives_plains_gradients(way: str) -> None:
    def program(wrap: Callable) -> Any:
        a, b = Layer(seed=1), Layer(seed=2)
        f, g = wrap(a), wrap(b)
        return step(lambda x, y: (g(f(x)) * y).sum(), a, b)

    assert_same(record_of(program, CALLS[way]), record_of(program, lambda layer: layer))


def test_a_construct_that_is_a_function_on_the_instance() -> None:
    """A cell like that takes no policy, but its call does."""

    def program(call: Callable) -> Any:
        cell = nn.Cell()
        cell.construct = lambda x: ops.tanh(x) * x
        return step(lambda x, y: (call(cell, x) * y).sum())

    for call in (checkpoint, swap):
        assert_same(record_of(program, call), record_of(program, lambda cell, x: cell(x)))


def test_a_wrapped_primitive_gives_plains_gradients() -> None:
    tanh = checkpoint_wrapper(ops.Tanh())
    assert_same(
        flat(ms.value_and_grad(lambda x: (tanh(x) ** 2).sum(), 0)(X), "g"),
        flat(ms.value_and_grad(lambda x: (ops.Tanh()(x) ** 2).sum(), 0)(X), "g"),
    )


@pytest.mark.parametrize("kind", ["swap", "swapped inputs"])
def test_swapping_really_moves(kind: str) -> None:
    four_micro_batches_in_one_loss(KINDS[kind])  # whose inputs nobody else holds
    stats = SwapManager().stats()
    assert stats.offloaded_bytes == stats.loaded_bytes > 0


@pytest.mark.parametrize(
    ("kind", "calls"),
    [("save", 1), ("swap", 1), ("recompute", 2), ("prefer recompute", 2), ("swap, then recompute", 2)],
)
def test_a_region_runs_as_often_as_its_policy_says(kind: str, calls: int) -> None:
    layer = KINDS[kind](Layer())
    gradients(layer, X)
    assert layer.calls == calls
