"""What the scopes of a replayed region do with operators and saved tensors, one kind at a time."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import ReplayMismatchError, checkpoint, is_recomputing
from hyper_parallel.core.activation_memory.operator_log import LogReader
from ms_ops import dispatch
from ms_ops.dispatch import Kind
from tests.helpers import RECOMPUTE, numbers, on

X = numbers(2, 4)


def gradient(function: Callable[[Tensor], Tensor]) -> np.ndarray:
    return ms.grad(lambda x: function(x).sum())(X).asnumpy()


def same_as_plain(body: Callable[[Tensor], Tensor]) -> bool:
    return np.array_equal(gradient(lambda x: checkpoint(body, x)), gradient(body))


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that replays leave out."""
    found: list[str] = []
    compare = LogReader.left_out

    def seen(reader: LogReader, name: str, args: tuple) -> None:
        found.append(name)
        compare(reader, name, args)

    monkeypatch.setattr(LogReader, "left_out", seen)
    return found


def test_an_old_primitive_whose_result_nobody_needs_is_left_out(left_out: list[str]) -> None:
    assert same_as_plain(lambda x: ops.tanh(x) + ops.Softsign()(ops.stop_gradient(x)))
    assert left_out == ["Softsign", "AddExt"]


def test_an_old_primitive_that_saves_is_not_left_out(left_out: list[str]) -> None:
    assert same_as_plain(lambda x: ops.Softsign()(ops.tanh(x)))
    assert left_out == []


def test_an_operator_that_runs_once_is_read_in_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every random operator of the CPU backend is an old primitive; this is what happens to the others."""
    monkeypatch.setitem(dispatch._kinds, "Sin", Kind.ONCE)
    seen: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        y = ops.sin(ops.tanh(x))
        seen.append(ops.stop_gradient(y))
        return ops.exp(y)

    assert same_as_plain(body)
    assert np.array_equal(seen[0].asnumpy(), seen[1].asnumpy())
    assert seen[0].data_ptr() == seen[1].data_ptr()


def test_what_is_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    show = ops.Print()

    def body(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        show("seen:", y.sum())
        return ops.exp(y)

    gradient(lambda x: checkpoint(body, x))
    assert capfd.readouterr().out.count("seen:") == 1


def test_batch_norm_with_statistics_that_are_no_parameters_is_plains() -> None:
    def body(x: Tensor) -> Tensor:
        mean, variance = ops.zeros(4, ms.float32), ops.ones(4, ms.float32)
        weight, bias = ops.ones(4, ms.float32), ops.zeros(4, ms.float32)
        y, *_ = ops.BatchNorm(is_training=True)(ops.tanh(x), weight, bias, mean, variance)
        return ops.exp(y)

    assert same_as_plain(body)


def test_a_saved_tensor_of_another_shape_is_named() -> None:
    wide, narrow = numbers(2, 4, seed=1), numbers(1, 4, seed=1)

    def body(x: Tensor) -> Tensor:
        return ops.mul(ops.tanh(x), narrow if is_recomputing() else wide)

    with pytest.raises(ReplayMismatchError) as caught:
        gradient(lambda x: checkpoint(body, x))
    assert "has shape (1, 4) and dtype Float32 in the replay, but shape (2, 4)" in str(caught.value)


def test_a_saved_tensor_that_nobody_waits_for_any_more_is_not_kept() -> None:
    def body(x: Tensor) -> Tensor:
        ops.sin(x)  # its node is gone before the replay
        return ops.exp(ops.tanh(x))

    assert same_as_plain(body)


@pytest.mark.parametrize("way", ["x[0] = v", "copy_"])
def test_an_argument_that_the_region_itself_writes_waits_as_it_was(way: str) -> None:
    def body(x: Tensor, h: Tensor) -> Tensor:
        y = ops.tanh(x + h)  # saves no h: MindSpore refuses to write what it has saved
        if way == "copy_":
            h.copy_(ops.full_like(h, 3.0))
        else:
            h[0] = 7.0
        return ops.exp(y) * ops.sin(x * h)

    def untracked() -> Tensor:
        return ops.exp(numbers(2, 4, seed=1))

    got = gradient(lambda x: checkpoint(body, x, untracked()))
    assert np.array_equal(got, gradient(lambda x: body(x, untracked())))


def test_a_parameter_that_the_region_overwrites_begins_the_replay_as_it_began_the_forward() -> None:
    began: list[np.ndarray] = []

    class Overwrites(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.state = Parameter(numbers(2, 4, seed=1), name="state", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            began.append(self.state.asnumpy().copy())
            y = ops.tanh(x * self.state)
            self.state.set_data(ops.stop_gradient(y))
            return ops.exp(y)

    cell = on(Overwrites(), RECOMPUTE)
    gradient(cell)
    ended = cell.state.asnumpy().copy()
    assert np.array_equal(*began)
    assert not np.array_equal(began[0], ended)


def test_a_cell_with_a_parameter_that_is_none_is_a_region() -> None:
    class Without(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.insert_param_to_cell("bias", None)

        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(ops.tanh(x))

    assert np.array_equal(gradient(on(Without(), RECOMPUTE)), gradient(Without()))


def test_a_region_in_a_gradient_that_a_region_takes_runs_as_plain() -> None:
    regions: list[int] = []

    def inner(x: Tensor) -> Tensor:
        regions.append(1)
        return ops.exp(ops.tanh(x))

    def body(x: Tensor, wrap: Any = checkpoint) -> Tensor:
        return ops.sin(ms.grad(lambda x: wrap(inner, x).sum())(x)) * x

    got = gradient(lambda x: checkpoint(body, x))
    assert len(regions) == 2  # forward and replay of the outer one; none of its own
    assert np.array_equal(got, gradient(lambda x: body(x, lambda function, x: function(x))))
