"""`checkpoint`, `checkpoint_wrapper`, `swap`, `swap_wrapper`: arguments, and what is wrapped."""

import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    CheckpointPolicy,
    PolicyError,
    PolicyOverruledWarning,
    SwapManager,
    activation_policy,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)
from hyper_parallel.core.activation_memory.spec import spec_of
from tests.helpers import Layer, assert_same, gradients, numbers, settled

P = CheckpointPolicy


def tanh(x: Tensor) -> Tensor:
    return ops.tanh(x) * x


class Holder:
    """An object with a method, and callable itself."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def method(self, x: Tensor) -> Tensor:
        return ops.tanh(x) * self.scale

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)


@dataclasses.dataclass
class Unhashable:
    """A callable that can't be a dictionary's key."""

    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.tanh(x) * self.scale


CALLABLES: dict[str, Callable[..., Any]] = {
    "function": tanh,
    "lambda": lambda x: ops.exp(ops.sin(x)),
    "bound method": Holder(3.0).method,
    "callable object": Holder(3.0),
    "unhashable object": Unhashable(2.0),
    "partial": functools.partial(lambda scale, x: ops.tanh(x) * scale, 2.0),
    "Primitive": ops.operations.Tanh(),
    "built in": ops.tanh,
    "Cell": Layer(),
}


def grad_of(function: Callable[..., Any], x: Tensor) -> np.ndarray:
    return ms.grad(lambda x: ops.sin(function(x)))(x).asnumpy()


@pytest.mark.parametrize("kind", CALLABLES)
@pytest.mark.parametrize("call", [checkpoint, swap])
def test_a_call_gives_the_numbers_of_the_plain_call(call: Callable[..., Any], kind: str) -> None:
    function, x = CALLABLES[kind], numbers(2, 4)
    assert np.array_equal(grad_of(lambda x: call(function, x), x), grad_of(function, x))


@pytest.mark.parametrize("kind", [kind for kind in CALLABLES if kind != "Cell"])
@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, swap_wrapper])
def test_a_wrapped_callable_gives_the_plain_numbers_and_knows_what_it_wraps(wrapper: Callable, kind: str) -> None:
    function, x = CALLABLES[kind], numbers(2, 4)
    wrapped = wrapper(function)
    assert np.array_equal(grad_of(wrapped, x), grad_of(function, x))
    assert wrapped.unwrap_cell == function
    assert not isinstance(wrapped, nn.Cell)
    assert repr(function) in repr(wrapped)


def test_a_checkpointed_function_runs_again_and_a_swapped_one_does_not() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return ops.tanh(x)

    grad_of(checkpoint_wrapper(counted), numbers(2, 4))
    assert len(calls) == 2
    grad_of(swap_wrapper(counted), numbers(2, 4))
    assert len(calls) == 3


def test_a_deep_copy_of_a_wrapped_bound_method_is_bound_to_the_copy() -> None:
    holder = Holder(3.0)
    wrapped = checkpoint_wrapper(holder.method)
    twin = copy.deepcopy(wrapped)
    twin.unwrap_cell.__self__.scale = 5.0
    x = numbers(2, 4)
    assert np.array_equal(grad_of(wrapped, x), grad_of(Holder(3.0).method, x))
    assert np.array_equal(grad_of(twin, x), grad_of(Holder(5.0).method, x))


def test_a_wrapped_cell_is_the_cell() -> None:
    layer = Layer()
    assert checkpoint_wrapper(layer, swap_inputs=True) is layer
    spec = spec_of(layer)
    assert spec is not None
    assert (spec.policy, spec.swap_inputs, spec.source) == (P.MUST_RECOMPUTE, True, "checkpoint_wrapper")


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, swap_wrapper])
@pytest.mark.parametrize("target", [3, "layer", None, nn.Dense, int])
def test_what_can_not_be_wrapped_is_refused(wrapper: Callable, target: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"{wrapper.__name__} takes a Cell, function, bound method or Primitive, but got"
    ):
        wrapper(target)


@pytest.mark.parametrize("call", [checkpoint, swap])
@pytest.mark.parametrize("target", [3, None, nn.Dense])
def test_what_can_not_be_called_is_refused(call: Callable, target: Any) -> None:
    with pytest.raises(TypeError, match=f"{call.__name__} calls a function or Cell, but got"):
        call(target, numbers(2))


def test_an_unknown_keyword_of_checkpoint_wrapper_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown keywords \['swap_input'\]"):
        checkpoint_wrapper(Layer(), swap_input=True)


def test_an_unknown_keyword_of_swap_wrapper_is_refused() -> None:
    with pytest.raises(TypeError, match="tensor_policy"):
        swap_wrapper(Layer(), tensor_policy=None)  # type: ignore[call-arg]


def test_output_recompute_is_a_replayed_region_and_says_what_it_is_not() -> None:
    with pytest.warns(PolicyOverruledWarning, match="its output stays with the operators that save it"):
        net = checkpoint_wrapper(Layer(), output_recompute=True)
    assert_same(gradients(net, numbers(2, 4)), gradients(Layer(), numbers(2, 4)))
    checkpoint_wrapper(Layer(), output_recompute=False)


@pytest.mark.parametrize("keywords", [{"early_stop": False}, {"early_stop": True}, {"group_swap": True}])
def test_keywords_accepted_for_compatibility_change_nothing(keywords: dict) -> None:
    x = numbers(2, 4)
    assert np.array_equal(grad_of(checkpoint_wrapper(tanh, **keywords), x), grad_of(tanh, x))
    assert np.array_equal(grad_of(lambda x: checkpoint(tanh, x, **keywords), x), grad_of(tanh, x))


@pytest.mark.parametrize("name", ["swap_inputs", "policy_fn", "context_fn", "group_swap", "early_stop"])
def test_a_parameter_named_like_a_keyword_of_checkpoint_points_to_partial(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def clashing(x, {name}): return x", scope)
    with pytest.raises(ValueError, match=rf"clashing has parameters .*\['{name}'\].*functools.partial"):
        checkpoint(scope["clashing"], numbers(2))


def test_a_parameter_named_like_a_keyword_of_swap_points_to_partial() -> None:
    def clashing(x: Tensor, policy_fn: Any) -> Tensor:
        return x

    with pytest.raises(ValueError, match=r"functools\.partial\(function, policy_fn=\.\.\.\)"):
        swap(clashing, numbers(2))


def test_the_remedy_for_a_clash_works() -> None:
    def clashing(x: Tensor, early_stop: float) -> Tensor:
        return ops.tanh(x) * early_stop

    x = numbers(2, 4)
    bound = functools.partial(clashing, early_stop=3.0)
    assert np.array_equal(grad_of(lambda x: checkpoint(bound, x), x), grad_of(bound, x))


@pytest.mark.parametrize("call", [checkpoint, swap])
def test_a_function_without_a_signature_can_be_called(call: Callable) -> None:
    x = numbers(2, 4)
    assert np.array_equal(grad_of(lambda x: call(getattr, x, "T"), x), grad_of(lambda x: x.T, x))


@pytest.mark.parametrize("decorated", [False, True])
def test_a_clash_in_the_construct_of_a_cell_is_found(decorated: bool) -> None:
    class Clashing(nn.Cell):
        def construct(self, x: Tensor, context_fn: Any = None) -> Tensor:
            return x

    cell = activation_policy(P.MUST_SAVE)(Clashing()) if decorated else Clashing()
    with pytest.raises(ValueError, match="context_fn"):
        checkpoint(cell, numbers(2))


def test_keyword_arguments_reach_the_function() -> None:
    def scaled(x: Tensor, *, scale: float) -> Tensor:
        return ops.tanh(x) * scale

    x = numbers(2, 4)
    for call in (checkpoint, swap):
        got = grad_of(lambda x, call=call: call(scaled, x, scale=3.0), x)
        assert np.array_equal(got, grad_of(lambda x: scaled(x, scale=3.0), x))


@pytest.mark.parametrize("call", [checkpoint, swap])
def test_a_function_and_what_it_holds_die_after_the_call(call: Callable) -> None:
    def once() -> weakref.ref:
        held = numbers(2, 4)
        call(lambda: ops.tanh(held))
        return weakref.ref(held)

    reference = once()
    gc.collect()
    assert reference() is None


def test_checkpoint_with_swapped_inputs_sends_the_input_to_host(manager: SwapManager) -> None:
    def forward(x: Tensor) -> Tensor:
        y = checkpoint(ops.tanh, ops.sin(x), swap_inputs=True)
        return settled(ops.exp(y))

    x = numbers(8, 8)
    got = ms.grad(forward)(x).asnumpy()
    assert np.array_equal(got, ms.grad(lambda x: ops.exp(ops.tanh(ops.sin(x))))(x).asnumpy())
    assert manager.stats().offloaded_bytes == x.nbytes


# ---- the tensor policy of swap


class TwoSaved(nn.Cell):
    """Saves two tensors of different shapes."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x).sum() + ops.exp(x[:3]).sum()


def saved_shapes(answer: Callable[[Tensor], Any]) -> list[tuple]:
    asked: list[tuple] = []

    def policy(tensor: Tensor) -> Any:
        asked.append(tensor.shape)
        return answer(tensor)

    gradients(swap_wrapper(TwoSaved(), policy_fn=policy), numbers(4, 4), loss=lambda y: y, wait=True)
    return asked


def test_the_tensor_policy_is_asked_once_for_every_saved_tensor() -> None:
    assert sorted(saved_shapes(lambda tensor: P.MUST_SWAP)) == [(3, 4), (4, 4)]


@pytest.mark.parametrize("keep", [P.MUST_SAVE, P.PREFER_SAVE])
def test_a_tensor_that_the_policy_keeps_does_not_leave(manager: SwapManager, keep: CheckpointPolicy) -> None:
    saved_shapes(lambda tensor: keep if tensor.shape == (3, 4) else P.MUST_SWAP)
    stats = manager.stats()
    assert (stats.offloaded_bytes, stats.kept_bytes) == (4 * 4 * 4, 3 * 4 * 4)


def test_the_numbers_are_right_whatever_the_tensor_policy_keeps() -> None:
    x = numbers(4, 4)
    plain = gradients(TwoSaved(), x, loss=lambda y: y)
    for kept in [(), ((3, 4),), ((4, 4),), ((3, 4), (4, 4))]:
        cell = swap_wrapper(
            TwoSaved(), policy_fn=lambda tensor, kept=kept: P.MUST_SAVE if tensor.shape in kept else P.MUST_SWAP
        )
        assert_same(gradients(cell, x, loss=lambda y: y, wait=True), plain)


@pytest.mark.parametrize("answer", [P.MUST_RECOMPUTE, None, True, 4])
def test_a_wrong_answer_of_the_tensor_policy_names_cell_shape_and_dtype(answer: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        saved_shapes(lambda tensor: answer)
    said = str(answer) if isinstance(answer, P) else repr(answer)
    assert all(text in str(caught.value) for text in ("TwoSaved", "(4, 4)", "Float32", said))


def test_a_tensor_policy_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match=r"policy_fn must be callable, but got 3 \(swap_wrapper\)"):
        swap_wrapper(Layer(), policy_fn=3)  # type: ignore[arg-type]


def test_an_exception_of_the_tensor_policy_reaches_the_user_and_leaves_nothing() -> None:
    def policy(tensor: Tensor) -> CheckpointPolicy:
        raise LookupError("mine")

    layer = swap_wrapper(Layer(), policy_fn=policy)
    with pytest.raises(PolicyError, match=r"Layer.*the tensor policy raised LookupError: mine.*\(2, 4\)") as caught:
        gradients(layer, numbers(2, 4))
    assert isinstance(caught.value.__cause__, LookupError)


def test_the_tensor_policy_of_a_wrapped_function_is_asked() -> None:
    asked: list[tuple] = []

    def policy(tensor: Tensor) -> CheckpointPolicy:
        asked.append(tensor.shape)
        return P.MUST_SAVE

    grad_of(swap_wrapper(ops.tanh, policy_fn=policy), numbers(2, 4))
    grad_of(lambda x: swap(ops.tanh, x, policy_fn=policy), numbers(3, 4))
    assert asked == [(2, 4), (3, 4)]
