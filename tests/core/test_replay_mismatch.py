"""A replay that does something else than its forward raises, names both sides, and what to do."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, ReplayMismatchError, activation_policy, checkpoint, is_recomputing
from hyper_parallel.core.activation_memory.operator_choice import OperatorChoice
from hyper_parallel.core.activation_memory.replay import Invocation
from hyper_parallel.core.activation_memory.scopes import Kept
from hyper_parallel.core.activation_memory.tape import Tape
from ms_ops.autograd import recording
from tests.helpers import Layer, numbers, seeded

P = CheckpointPolicy
REMEDY = "the region must do the same each time it runs with the same inputs; give the cell"


def grad_of(body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ms.grad(lambda x: checkpoint(body, x) * 1.0)(x)


def mismatch(body: Callable[[Tensor], Tensor], name: str = "body") -> str:
    """The message of the mismatch; afterwards MindSpore must still give the right numbers."""
    x = numbers(2, 4)
    with pytest.raises(ReplayMismatchError) as caught:
        grad_of(body, x)
    message = str(caught.value)
    assert name in message
    assert REMEDY in message
    assert np.array_equal(grad_of(ops.tanh, x).asnumpy(), ms.grad(lambda x: ops.tanh(x) * 1.0)(x).asnumpy())
    return message


def test_an_operator_that_only_the_replay_runs_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        return ops.exp(y) if is_recomputing() else y

    message = mismatch(body)
    assert "the replay runs Exp as operator 2" in message
    assert "but the forward ran only 1 operators" in message


def test_an_operator_that_only_the_forward_runs_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        return y if is_recomputing() else ops.exp(y)

    message = mismatch(body)
    assert "the replay ended after 1 operators, but the forward ran 2" in message
    assert "the first one missing is Exp -> Float32 (2, 4)" in message


def test_another_operator_is_named_with_the_line_that_runs_it() -> None:
    def body(x: Tensor) -> Tensor:
        return ops.exp(x) if is_recomputing() else ops.tanh(x)

    message = mismatch(body)
    assert "operator 1 of 1 is Exp in the replay" in message
    assert "but Tanh -> Float32 (2, 4) in the forward" in message
    assert "test_replay_mismatch.py:" in message
    assert ", body)" in message


def test_another_order_of_operators_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        first, second = (ops.exp, ops.tanh) if is_recomputing() else (ops.tanh, ops.exp)
        return first(x) * second(x)

    assert "operator 1 of 3 is Exp in the replay" in mismatch(body)


def test_another_shape_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        return ops.tanh(x.reshape(4, 2) if is_recomputing() else x.reshape(8, 1)).sum() * x

    message = mismatch(body)
    assert "is Reshape((4, 2),) -> Float32 (4, 2) in the replay" in message
    assert "but Reshape((8, 1),) -> Float32 (8, 1) in the forward" in message


def test_another_dtype_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.astype(ms.float16 if is_recomputing() else ms.float64)
        return ops.tanh(y).astype(ms.float32)

    message = mismatch(body)
    assert "-> Float16 (2, 4) in the replay" in message
    assert "-> Float64 (2, 4) in the forward" in message


def test_a_python_number_that_differs_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        return ops.tanh(x) * (3.0 if is_recomputing() else 2.0)

    message = mismatch(body)
    assert "Muls(3.0,)" in message
    assert "Muls(2.0,)" in message


def test_a_number_that_is_nan_equals_itself() -> None:
    x = numbers(2, 4)
    got = grad_of(lambda x: ops.tanh(x) + ops.stop_gradient(x) * float("nan"), x)
    assert np.array_equal(got.asnumpy(), ms.grad(lambda x: ops.tanh(x) * 1.0)(x).asnumpy())


def test_saved_tensors_that_differ_though_operators_agree_are_counted() -> None:
    def body(x: Tensor) -> Tensor:
        y = ops.stop_gradient(x) if is_recomputing() else x
        return ops.tanh(y)

    assert "the replay saved 0 tensors, but the forward saved 1" in mismatch(body)


def test_saved_tensors_that_only_the_replay_has_are_named_with_shape_and_dtype() -> None:
    def body(x: Tensor) -> Tensor:
        y = x if is_recomputing() else ops.stop_gradient(x)
        return ops.tanh(y) + ops.sin(x)

    message = mismatch(body)
    assert "the replay saves more than the 1 tensors that the forward saved" in message
    assert "shape (2, 4) and dtype Float32" in message


class TestValues:
    """`determinism_check="values"`."""

    @staticmethod
    def body(x: Tensor) -> Tensor:
        return ops.tanh(x + Tensor(np.float32(1.0 if is_recomputing() else 2.0)))

    def test_other_values_of_the_same_operators_are_named(self) -> None:
        with pytest.raises(ReplayMismatchError) as caught:
            ms.grad(lambda x: checkpoint(self.body, x, determinism_check="values"))(numbers(2, 4))
        assert "operator 1 of 2 is Add" in str(caught.value)
        assert "with checksum" in str(caught.value)

    @staticmethod
    def picks(x: Tensor) -> Tensor:
        return ops.tanh(ops.exp(x).chunk(2, 1)[is_recomputing()])

    def test_they_are_not_looked_at_by_default(self) -> None:
        grad_of(self.picks, numbers(2, 4))

    def test_another_item_of_what_an_operator_gives_is_noticed(self) -> None:
        with pytest.raises(ReplayMismatchError, match=r"operator 3 of 3 is Tanh.*with checksum"):
            ms.grad(lambda x: checkpoint(self.picks, x, determinism_check="values"))(numbers(2, 4))

    def test_equal_values_pass(self) -> None:
        x = numbers(2, 4)
        got = ms.grad(lambda x: checkpoint(ops.tanh, x, determinism_check="values"))(x)
        assert np.array_equal(got.asnumpy(), ms.grad(ops.tanh)(x).asnumpy())


class Two(nn.Cell):
    """Two kept cells in an order that the replay changes."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        super().__init__()
        self.first = activation_policy(policy)(seeded(nn.Dense(4, 4)))
        self.second = activation_policy(policy)(Layer())

    def construct(self, x: Tensor) -> Tensor:
        order = (self.second, self.first) if is_recomputing() else (self.first, self.second)
        return ops.sin(order[1](order[0](x)))


@pytest.mark.parametrize("policy", [P.MUST_SAVE, P.MUST_SWAP])
def test_another_order_of_kept_cells_is_named(policy: CheckpointPolicy) -> None:
    cell = activation_policy(P.MUST_RECOMPUTE)(Two(policy))
    with pytest.raises(ReplayMismatchError) as caught:
        ms.grad(cell)(numbers(2, 4))
    assert "Two: the replay runs cell Layer where the forward ran cell Dense" in str(caught.value)
    assert REMEDY in str(caught.value)


def test_another_order_of_nested_regions_is_named() -> None:
    cell = activation_policy(P.MUST_RECOMPUTE)(Two(P.MUST_RECOMPUTE))
    with pytest.raises(ReplayMismatchError, match="where the forward ran region Dense"):
        ms.grad(cell)(numbers(2, 4))


def test_a_kept_cell_that_the_replay_leaves_out_is_named() -> None:
    inner = activation_policy(P.MUST_SAVE)(Layer())

    class Outer(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(x)
            return y if is_recomputing() else inner(y)

    with pytest.raises(ReplayMismatchError, match="Outer: the replay ended before cell Layer"):
        ms.grad(activation_policy(P.MUST_RECOMPUTE)(Outer()))(numbers(2, 4))


def test_a_random_operator_that_only_the_replay_runs_is_named() -> None:
    dropout = nn.Dropout(p=0.5).set_train()

    def body(x: Tensor) -> Tensor:
        return ops.tanh(dropout(x) if is_recomputing() else x)

    assert "operator 1 of 1 is Dropout in the replay" in mismatch(body)


def test_a_name_that_is_a_path_is_used_in_the_message() -> None:
    from hyper_parallel.core.activation_memory.attach import attach
    from hyper_parallel.core.activation_memory.spec import RegionSpec

    cell = Two(P.MUST_SAVE)
    attach(cell, RegionSpec(P.MUST_RECOMPUTE, path="layers.3"))
    with pytest.raises(ReplayMismatchError, match=r"^layers\.3: "):
        ms.grad(cell)(numbers(2, 4))


class Flaky:
    """A body whose replay fails the first time."""

    def __init__(self, failure: Callable[[Tensor], Tensor]) -> None:
        self.failure = failure
        self.replays = iter((1, 2))  # a number would be put back for every replay

    def __call__(self, x: Tensor) -> Tensor:
        if is_recomputing() and next(self.replays) == 1:
            return self.failure(x)
        return ops.exp(ops.tanh(x))


def raises(x: Tensor) -> Tensor:
    raise LookupError("once")


FAILURES: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception]]] = {
    "raises": (raises, LookupError),
    "saves less": (ops.tanh, ReplayMismatchError),
    "saves more": (lambda x: ops.sin(ops.exp(ops.tanh(x))), ReplayMismatchError),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_step_after_a_failed_replay_is_right(kind: str) -> None:
    failure, error = FAILURES[kind]
    body, x = Flaky(failure), numbers(2, 4)
    with pytest.raises(error):
        grad_of(body, x)
    assert np.array_equal(grad_of(body, x).asnumpy(), ms.grad(lambda x: ops.exp(ops.tanh(x)) * 1.0)(x).asnumpy())


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_replay_can_be_tried_again(kind: str) -> None:
    failure, error = FAILURES[kind]
    body, x = Flaky(failure), numbers(2, 4)
    kept: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        assert recording()
        invocation = Invocation(body, body, "body", Tape(), (_Reusable(), _Reusable()), OperatorChoice(None, Kept))
        y = invocation.forward((x,), {}, None)
        held = [placeholder for ref in invocation.placeholders if (placeholder := ref()) is not None]
        with pytest.raises(error):
            held[-1].get()
        kept.extend(placeholder.get().asnumpy().copy() for placeholder in held)
        return y

    got = ms.grad(forward)(x)
    assert np.array_equal(got.asnumpy(), ms.grad(lambda x: ops.exp(ops.tanh(x)))(x).asnumpy())
    assert len(kept) == 2
    assert not list(body.replays)


class _Reusable:
    """A context that may be entered again."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


def test_a_saved_tensor_that_no_replay_produces_is_never_silently_missing() -> None:
    invocation = Invocation(ops.tanh, ops.tanh, "body", Tape(), (_Reusable(), _Reusable()), OperatorChoice(None, Kept))

    def forward(x: Tensor) -> Tensor:
        y = invocation.forward((x,), {}, None)
        (held,) = [placeholder for ref in invocation.placeholders if (placeholder := ref()) is not None]
        held.get()
        held.value = None
        with pytest.raises(ReplayMismatchError, match="backward reads a saved tensor that the replay did not produce"):
            held.get()
        held.value = y
        return y

    ms.grad(forward)(numbers(2, 4))
