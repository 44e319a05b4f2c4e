"""`not_replayed`: a hook that runs in the forward only."""

import copy
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager, checkpoint, is_recomputing, not_replayed
from tests.helpers import RECOMPUTE, Layer, Stack, assert_same, gradients, numbers, on

X = numbers(2, 4)


class Calls:
    """A hook that writes down whether it runs in a replay."""

    def __init__(self, result: Callable[..., Any] = lambda *args: None) -> None:
        self.replays: list[bool] = []
        self.result = result

    def __call__(self, *args: Any) -> Any:
        self.replays.append(is_recomputing())
        return self.result(*args)


Register = Callable[[nn.Cell, Any], Any]
REGISTER: dict[str, Register] = {
    "forward hook": lambda cell, hook: cell.register_forward_hook(hook),
    "forward pre-hook": lambda cell, hook: cell.register_forward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_runs_in_the_replay_too(kind: str) -> None:
    hook, inner = Calls(), Layer()
    REGISTER[kind](inner, hook)
    gradients(on(Stack([inner]), RECOMPUTE), X)
    assert hook.replays == [False, True]


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_that_is_not_replayed_runs_once(kind: str) -> None:
    hook, inner = Calls(), Layer()
    REGISTER[kind](inner, not_replayed(hook))
    gradients(on(Stack([inner]), RECOMPUTE), X)
    assert hook.replays == [False]


def test_it_runs_once_however_many_regions_enclose_it() -> None:
    hook, inner = Calls(), Layer()
    inner.register_forward_hook(not_replayed(hook))
    gradients(on(Stack([on(Stack([on(inner, RECOMPUTE)]), RECOMPUTE)]), RECOMPUTE), X)
    assert hook.replays == [False]


def test_a_cell_that_is_called_twice_runs_its_hook_in_each_forward() -> None:
    hook, inner = Calls(), Layer()
    inner.register_forward_hook(not_replayed(hook))
    gradients(on(Stack([inner, inner]), RECOMPUTE), X)
    assert hook.replays == [False, False]


RESULTS: dict[str, tuple[Register, Callable[..., Any]]] = {
    "another output": (REGISTER["forward hook"], lambda cell, inputs, output: ops.sin(output) * 2),
    "another input": (REGISTER["forward pre-hook"], lambda cell, inputs: (ops.sin(inputs[0]),)),
    "another shape": (
        REGISTER["forward pre-hook"],
        lambda cell, inputs: (ops.concat((inputs[0], ops.tanh(inputs[0]))),),
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_what_it_gave_in_the_forward_is_what_the_replay_reads(kind: str) -> None:
    register, result = RESULTS[kind]

    def net(wrap: Callable[[Any], Any], policy: Any) -> nn.Cell:
        inner = Layer()
        register(inner, wrap(result))
        return on(Stack([inner, Layer(seed=1)]), policy)

    assert_same(gradients(net(not_replayed, RECOMPUTE), X), gradients(net(lambda hook: hook, None), X))


def test_a_hook_whose_result_differs_each_time_gives_the_replay_what_it_gave_before() -> None:
    scales = iter([2.0, 3.0])
    inner = Layer()
    inner.register_forward_hook(not_replayed(lambda cell, inputs, output: output * next(scales)))
    plain = Layer()
    plain.register_forward_hook(lambda cell, inputs, output: output * 2.0)
    assert_same(gradients(on(Stack([inner, Layer()]), RECOMPUTE), X), gradients(Stack([plain, Layer()]), X))


def test_its_result_stays_on_the_device(manager: SwapManager) -> None:
    inner = Layer()
    inner.register_forward_hook(not_replayed(lambda cell, inputs, output: ops.sin(output)))
    gradients(on(Stack([inner]), RECOMPUTE), X)
    assert manager.stats().offloaded_bytes == 0


def test_any_function_that_a_region_calls_may_be_wrapped() -> None:
    calls = Calls(ops.sin)
    once = not_replayed(calls)

    def body(x: Tensor) -> Tensor:
        return ops.tanh(once(ops.exp(x))) * x

    got = ms.grad(lambda x: checkpoint(body, x).sum())(X).asnumpy()
    want = ms.grad(lambda x: (ops.tanh(ops.sin(ops.exp(x))) * x).sum())(X).asnumpy()
    assert calls.replays == [False]
    assert np.array_equal(got, want)


def test_outside_of_a_region_it_is_the_hook() -> None:
    calls = Calls(lambda *args: 3)
    assert not_replayed(calls)(1, 2) == 3
    ms.grad(lambda x: not_replayed(ops.tanh)(x))(X)
    assert calls.replays == [False]


def test_it_knows_the_hook_and_copies_with_it() -> None:
    calls = Calls()
    wrapped = not_replayed(calls)
    assert wrapped.unwrap_cell is calls
    copy.deepcopy(wrapped)()
    assert calls.replays == []


@pytest.mark.parametrize("hook", [None, 3, "hook"])
def test_what_can_not_be_called_is_refused(hook: Any) -> None:
    with pytest.raises(TypeError, match="not_replayed takes a function, but got"):
        not_replayed(hook)
