"""Facts about MindSpore's gradients that the library relies on: a test that fails here says that MindSpore changed."""

import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph.api import _pynative_executor

from ms_ops.autograd import (
    _GRADIENT_ENTRIES,
    alias,
    backward_is_recorded,
    data_of,
    from_parameters,
    gradient_depth,
    guard_gradient_calls,
    is_parameter,
    recording,
    requires_grad,
    saved_tensors_hooks,
    wait_for_operators,
)
from ms_ops.catalogue import VIEWS
from ms_ops.dispatch import Interception
from tests.helpers import numbers
from tests.ms_ops.nets import Net


class Held:
    """What a hook returns instead of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# ---- saved-tensor hooks


def left_after_a_dropped_graph(kept: Callable[[Tensor], Tensor]) -> int:
    """How many objects that a hook returned live on when a forward is dropped; they hold `kept(tensor)`."""
    alive: list[weakref.ref] = []

    def pack(tensor: Tensor) -> Held:
        held = Held(kept(tensor))
        alive.append(weakref.ref(held))
        return held

    def forward() -> None:
        x = numbers(4, 4)
        x.requires_grad_()
        with saved_tensors_hooks(pack, lambda held: held.tensor):
            ops.tanh(x)

    _pynative_executor.set_grad_flag(True)
    try:
        forward()
    finally:
        _pynative_executor.set_grad_flag(False)
    wait_for_operators()
    gc.collect()
    assert len(alive) == 1
    return sum(reference() is not None for reference in alive)


def test_a_hook_that_returns_what_it_was_given_leaks_when_the_graph_is_dropped() -> None:
    """Why `Kept` holds an alias; when this fails, it need not any more."""
    assert left_after_a_dropped_graph(lambda tensor: tensor) == 1


def test_a_hook_that_returns_an_alias_leaks_nothing() -> None:
    assert left_after_a_dropped_graph(lambda tensor: alias(tensor, tracked=False)) == 0


def test_what_is_saved_dies_while_backward_runs() -> None:
    alive: list[weakref.ref] = []
    left: list[int] = []

    def pack(tensor: Tensor) -> Held:
        held = Held(alias(tensor, tracked=False))
        alive.append(weakref.ref(held))
        return held

    def unpack(held: Held) -> Tensor:
        wait_for_operators()
        left.append(sum(reference() is not None for reference in alive))
        return held.tensor

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, unpack):
            for _ in range(6):
                x = ops.tanh(x)
        return x

    ms.grad(forward)(numbers(4, 4))
    assert len(left) == 6
    assert left[-1] < left[0]
    wait_for_operators()
    assert [reference() for reference in alive] == [None] * 6


def test_of_nested_hooks_the_inner_pair_alone_is_called() -> None:
    seen: list[str] = []

    def hooks(name: str) -> Any:
        return saved_tensors_hooks(lambda tensor: seen.append(name) or alias(tensor, False), lambda tensor: tensor)

    def forward(x: Tensor) -> Tensor:
        with hooks("outer"):
            y = ops.tanh(x)
            with hooks("inner"):
                return ops.exp(y)

    ms.grad(forward)(numbers(2))
    assert seen == ["outer", "inner"]


def test_x_times_x_is_saved_twice() -> None:
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or alias(t, False), lambda t: t):
            return x * x

    ms.grad(forward)(numbers(2))
    assert len(seen) == 2


def test_a_saved_parameter_is_known_by_its_info() -> None:
    weight, x = Parameter(numbers(3, 3), name="w"), numbers(3, 3)
    seen: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: seen.append(is_parameter(t)) or alias(t, False), lambda t: t):
            return ops.matmul(ops.tanh(x), weight)

    ms.grad(forward, 0, [weight])(x)
    assert sorted(seen) == [False, False, True]


# ---- flags


def test_views_and_casts_of_weights_are_told_from_results_that_only_have_read_them() -> None:
    weight = Parameter(Tensor(np.ones((4, 4), np.float32)), name="Tanh")  # named as an operator is
    saved: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        cast, turned = ops.cast(weight, ms.float16), weight.T
        product, result = ops.matmul(x, turned), ops.tanh(ops.cast(x, ms.float16))
        saved.extend([result, cast, product, turned, ops.cast(turned, ms.float16), ops.cast(product, ms.float16)])
        for _ in range(2):  # also when the names are known
            assert from_parameters(saved, VIEWS | {"Cast"}) == {1, 3, 4}
        return product.sum() + (result + cast).sum()

    ms.grad(forward, 0, [weight])(Tensor(np.ones((4, 4), np.float32)))
    assert len(saved) == 6


def test_nothing_is_recorded_outside_of_a_gradient() -> None:
    assert not recording()


def test_a_forward_that_is_differentiated_is_recorded() -> None:
    seen: list[bool] = []
    ms.grad(lambda x: seen.append(recording()) or ops.tanh(x))(numbers(2))
    assert seen == [True]


def backward_flags(grad: Callable[[Any], Any]) -> list[bool]:
    seen: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(
            lambda tensor: alias(tensor, False), lambda tensor: seen.append(backward_is_recorded()) or tensor
        ):
            return ops.tanh(x).sum()

    grad(forward)(numbers(3))
    return seen


def test_the_flag_is_off_in_a_plain_backward() -> None:
    assert backward_flags(ms.grad) == [False]


def test_the_flag_is_on_in_a_backward_that_is_recorded() -> None:
    def twice(forward: Callable) -> Callable:
        inner = ms.grad(forward)
        return ms.grad(lambda x: inner(x).sum())

    assert backward_flags(twice)[0] is True


def test_results_and_leaves_are_tracked_and_an_untracked_alias_is_not() -> None:
    seen: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        seen.extend(map(requires_grad, (y, alias(y, tracked=False), alias(y, tracked=True))))
        return y

    ms.grad(forward)(numbers(2))
    assert seen == [True, False, True]


@pytest.mark.parametrize("of", [data_of, lambda tensor: alias(tensor, tracked=False)])
def test_an_alias_shares_the_storage(of: Callable[[Tensor], Tensor]) -> None:
    x = numbers(4)
    twin = of(x)
    assert twin is not x
    assert twin.data_ptr() == x.data_ptr()


def test_the_data_of_a_tensor_runs_no_operator() -> None:
    seen: list[str] = []

    def note(name: str, run: Callable[..., Any], args: tuple) -> Any:
        seen.append(name)
        return run(*args)

    with Interception(note):
        ops.tanh(data_of(numbers(2)))
    assert seen == ["Tanh"]


@pytest.mark.parametrize("of", [data_of, lambda tensor: alias(tensor, tracked=False)])
def test_an_alias_of_a_parameter_is_not_the_parameter(of: Callable[[Tensor], Tensor]) -> None:
    weight = Parameter(numbers(2), name="weight")
    twin = of(weight)
    weight.set_data(numbers(2) + 1)
    assert not isinstance(twin, Parameter) and not is_parameter(twin)
    assert (twin.asnumpy() == numbers(2).asnumpy()).all()


# ---- the guard on gradient calls


def test_the_names_of_the_gradient_entries_exist_and_are_guarded() -> None:
    guard_gradient_calls()
    for module_name, name in _GRADIENT_ENTRIES:
        assert hasattr(getattr(importlib.import_module(module_name), name), "_hp_guarded"), (module_name, name)


def test_guarding_again_changes_nothing() -> None:
    def entries() -> list[Any]:
        return [getattr(importlib.import_module(module), name) for module, name in _GRADIENT_ENTRIES]

    before = entries()
    guard_gradient_calls()
    assert entries() == before


WAYS: dict[str, Callable[[nn.Cell], Any]] = {
    "grad": lambda net: ms.grad(net)(numbers(2)),
    "value_and_grad": lambda net: ms.value_and_grad(net)(numbers(2)),
    "GradOperation": lambda net: ops.GradOperation()(net)(numbers(2)),
    "vjp": lambda net: ms.vjp(net, numbers(2))[1](numbers(2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_take_a_gradient_counts_its_depth(way: str) -> None:
    seen: list[int] = []
    WAYS[way](Net(lambda: seen.append(gradient_depth())))
    assert set(seen) == {1}
    assert gradient_depth() == 0


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failed_forward_the_flag_is_off_and_the_next_gradient_right(way: str) -> None:
    def fail() -> None:
        raise LookupError("in forward")

    with pytest.raises(LookupError, match="in forward"):
        WAYS[way](Net(fail))
    assert not recording()
    assert gradient_depth() == 0
    x = numbers(2)
    y = np.tanh(x.asnumpy())
    np.testing.assert_allclose(ms.grad(Net(lambda: None))(x).asnumpy(), 1 - y * y, rtol=1e-5)


def test_a_flag_that_was_on_before_a_failure_stays_on() -> None:
    _pynative_executor.set_grad_flag(True)
    try:
        with pytest.raises(LookupError):
            ms.grad(Net(lambda: (_ for _ in ()).throw(LookupError())))(numbers(2))
        assert _pynative_executor.grad_flag()
    finally:
        _pynative_executor.set_grad_flag(False)
        _pynative_executor.clear_res()


def test_the_depth_belongs_to_its_thread() -> None:
    seen: list[int] = []

    def look() -> None:
        other = threading.Thread(target=lambda: seen.append(gradient_depth()))
        other.start()
        other.join()

    ms.grad(Net(look))(numbers(2))
    assert seen == [0]
