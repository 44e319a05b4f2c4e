"""A forward that is recorded again: what hooks see, and which of MindSpore's flags stay."""

import mindspore as ms
import pytest
from mindspore import Tensor, ops
from mindspore.graph.api import _pynative_executor

from ms_ops import autograd
from ms_ops.autograd import (
    alias,
    record_again,
    recording,
    saved_tensors_hooks,
)
from tests.helpers import numbers
from tests.ms_ops.nets import Net


@pytest.fixture(autouse=True)
def empty_graphs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have recorded on this thread."""
    monkeypatch.setattr(autograd._depth, "makes_empty_graphs", True)


def test_after_a_forward_that_takes_gradients_no_empty_graphs_are_made() -> None:
    record_again(lambda: None, takes_gradients=True)
    assert not autograd._depth.makes_empty_graphs


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_a_repeated_forward_is_recorded_and_flags_are_as_before(takes_gradients: bool) -> None:
    seen = []
    record_again(lambda: seen.append(recording()), takes_gradients)
    assert seen == [True]
    assert not recording()


@pytest.mark.parametrize("takes_gradients", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_flags_are_as_before_after_a_repeated_forward_fails(flag: bool, takes_gradients: bool) -> None:
    def fails() -> None:
        Net(lambda: (_ for _ in ()).throw(LookupError("mine")))(numbers(2))

    _pynative_executor.set_grad_flag(flag)
    try:
        with pytest.raises(LookupError, match="mine"):
            record_again(fails, takes_gradients)
        assert _pynative_executor.grad_flag() is flag
    finally:
        _pynative_executor.set_grad_flag(False)
        _pynative_executor.clear_res()


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_hooks_see_what_a_repeated_forward_saves(takes_gradients: bool) -> None:
    x, seen = numbers(3), []

    def again() -> None:
        with saved_tensors_hooks(lambda t: seen.append(t.shape), lambda t: t):
            ops.exp(alias(x, tracked=True))

    def forward(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        record_again(again, takes_gradients)
        return y

    ms.grad(forward)(x)
    assert seen == [(3,)]


def test_an_empty_graph_still_cannot_begin_a_second_gradient() -> None:
    """When this passes, `takes_gradients` has become unnecessary."""

    def takes_a_gradient() -> None:
        ms.grad(lambda z: ops.tanh(z).sum())(numbers(2))

    def unpack(tensor: Tensor) -> Tensor:
        record_again(takes_a_gradient, takes_gradients=False)
        return tensor

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: alias(t, tracked=False), unpack):
            return ops.tanh(ops.tanh(x))

    with pytest.raises(RuntimeError, match="top_cell_"):
        ms.grad(forward)(numbers(2))
