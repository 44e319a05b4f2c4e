"""`keep_on_device` leaves tensors alone, `swap_tensor_wrapper` has a swapped region take them in any case."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    CheckpointPolicy,
    PolicyError,
    SwapManager,
    activation_policy,
    keep_on_device,
    swap_tensor_wrapper,
    swap_wrapper,
)
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
        self.table = weakref.ref(table)  # what the cell holds stays anyway

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x) * self.table()


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


def test_a_mark_inside_a_replayed_region_holds_for_operators_that_are_swapped() -> None:
    class Makes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(keep_on_device(ops.exp(x))) * ops.sin(x)

    net = Stack([activation_policy(ops={"Exp": SWAP, "Sin": SWAP})(Makes()), on(Layer(), RECOMPUTE)])
    assert_same(gradients(net, X, wait=True), gradients(Stack([Makes(), Layer()]), X))
    stats = SwapManager().stats()
    assert (stats.kept_bytes, stats.offloaded_bytes) == (X.nbytes, X.nbytes)
    assert len(marks._marked) == 0


def test_an_error_of_a_tensor_policy_names_region_and_tensor() -> None:
    def policy(tensor: Tensor) -> Any:
        raise LookupError("mine")

    with pytest.raises(
        PolicyError, match=r"Layer: the tensor policy raised LookupError: mine, .* shape \(2, 4\)"
    ) as caught:
        gradients(swap_wrapper(Layer(), policy_fn=policy), X)
    assert isinstance(caught.value.__cause__, LookupError)


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


# ---- swap_tensor_wrapper


def keeps(tensor: Tensor) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class Registers(nn.Cell):
    """Registers one of its results."""

    def __init__(self, what: Any = swap_tensor_wrapper) -> None:
        super().__init__()
        self.what = what

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.what(ops.exp(x))) * ops.sin(x)


def sent(cell: nn.Cell) -> int:
    got = gradients(Stack([cell, on(Layer(), RECOMPUTE)]), X)
    assert_same(got, gradients(Stack([Registers(lambda y: y), Layer()]), X))
    return SwapManager().stats().offloaded_bytes


def test_a_registered_tensor_goes_to_host_though_the_policy_keeps_all() -> None:
    assert sent(swap_wrapper(Registers(), policy_fn=keeps)) == X.nbytes


def test_a_structure_is_registered_and_comes_back() -> None:
    def registers(y: Tensor) -> Tensor:
        structure = {"a": (y, 3)}
        assert swap_tensor_wrapper(structure, tag="both", group_swap=True) is structure
        return y

    assert sent(swap_wrapper(Registers(registers), policy_fn=keeps)) == X.nbytes


def test_what_is_kept_on_the_device_by_name_stays() -> None:
    cell = swap_wrapper(Registers(lambda y: swap_tensor_wrapper(keep_on_device(y))), policy_fn=keeps)
    assert sent(cell) == 0


def test_without_a_gradient_nothing_happens() -> None:
    assert swap_tensor_wrapper(X) is X


@pytest.mark.parametrize(("policy", "inside"), [(None, "no swapped region"), (RECOMPUTE, "a replayed region")])
def test_without_a_swapped_region_it_says_so(policy: Any, inside: str) -> None:
    with pytest.raises(PolicyError, match=f"the code here runs in {inside}"):
        gradients(on(Registers(), policy), X)


def test_in_a_replay_around_the_swapped_region_it_is_registered_once() -> None:
    inner = swap_wrapper(Registers(), policy_fn=keeps)
    got = gradients(Stack([on(Stack([Layer(seed=1), inner]), RECOMPUTE), on(Layer(), RECOMPUTE)]), X)
    assert_same(got, gradients(Stack([Stack([Layer(seed=1), Registers(lambda y: y)]), Layer()]), X))


@pytest.mark.parametrize(("target", "tag"), [(3, None), ([], None), (X, 3)])
def test_bad_arguments_are_refused(target: Any, tag: Any) -> None:
    with pytest.raises(TypeError, match="swap_tensor_wrapper"):
        swap_tensor_wrapper(target, tag)
