"""`context_fn`: a context for the forward of each call, and one for its replay."""

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from hyper_parallel import checkpoint, checkpoint_wrapper, is_recomputing
from tests.helpers import Layer, Stack, assert_same, gradients, numbers


class Log:
    """A context_fn that writes down who enters and leaves."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.calls = 0

    def __call__(self) -> tuple[Any, Any]:
        self.calls += 1
        return self._context("forward"), self._context("replay")

    @contextlib.contextmanager
    def _context(self, name: str) -> Iterator[None]:
        self.events.append(f"enter {name}")
        try:
            yield
        finally:
            self.events.append(f"leave {name}")


ONCE = ["enter forward", "leave forward", "enter replay", "leave replay"]


def test_each_context_is_entered_once_and_left() -> None:
    log = Log()
    gradients(checkpoint_wrapper(Layer(), context_fn=log), numbers(2, 4))
    assert (log.calls, log.events) == (1, ONCE)


def test_the_body_runs_inside_the_contexts() -> None:
    log = Log()

    def body(x: Tensor) -> Tensor:
        log.events.append(f"body, replay {is_recomputing()}")
        return ops.tanh(x)

    ms.grad(lambda x: checkpoint(body, x, context_fn=log))(numbers(2, 4))
    assert log.events == [
        "enter forward", "body, replay False", "leave forward", "enter replay", "body, replay True", "leave replay",
    ]  # fmt: skip


def test_it_is_called_once_for_every_call_of_the_cell() -> None:
    log = Log()
    layer = checkpoint_wrapper(Layer(), context_fn=log)
    gradients(Stack([layer, layer]), numbers(2, 4))
    assert log.calls == 2
    assert sorted(log.events) == sorted(2 * ONCE)


def test_it_is_not_called_when_no_gradient_is_recorded() -> None:
    log = Log()
    checkpoint_wrapper(Layer(), context_fn=log)(numbers(2, 4))
    assert log.calls == 0


def test_contexts_are_left_when_the_forward_fails() -> None:
    log = Log()

    def body(x: Tensor) -> Tensor:
        raise LookupError("in forward")

    with pytest.raises(LookupError, match="in forward"):
        ms.grad(lambda x: checkpoint(body, x, context_fn=log))(numbers(2, 4))
    assert log.events == ["enter forward", "leave forward"]


def test_contexts_are_left_when_the_replay_fails() -> None:
    log = Log()

    def body(x: Tensor) -> Tensor:
        if is_recomputing():
            raise LookupError("in replay")
        return ops.tanh(x)

    with pytest.raises(LookupError, match="in replay"):
        ms.grad(lambda x: checkpoint(body, x, context_fn=log))(numbers(2, 4))
    assert log.events == ONCE


def test_a_context_that_is_falsy_is_entered_too() -> None:
    class Recorder(list):
        def __enter__(self) -> None:
            self.append("entered")

        def __exit__(self, *exc_info: object) -> None:
            self.append("left")

    forward, replay = Recorder(), Recorder()
    ms.grad(lambda x: checkpoint(ops.tanh, x, context_fn=lambda: (forward, replay)))(numbers(2, 4))
    assert forward == replay == ["entered", "left"]


@pytest.mark.parametrize("bad", [3, "context", (None, None)])
def test_a_context_fn_that_is_not_callable_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="checkpoint_wrapper: context_fn must be callable"):
        checkpoint_wrapper(Layer(), context_fn=bad)
    with pytest.raises(TypeError, match="checkpoint: context_fn must be callable"):
        checkpoint(ops.tanh, numbers(2), context_fn=bad)


@pytest.mark.parametrize("bad", [None, 3, (), (contextlib.nullcontext(),)])
def test_a_context_fn_that_does_not_give_two_contexts_is_named(bad: Any) -> None:
    with pytest.raises(TypeError, match="Layer: context_fn must give two context managers"):
        gradients(checkpoint_wrapper(Layer(), context_fn=lambda: bad), numbers(2, 4))


def test_the_numbers_are_those_of_the_plain_cell() -> None:
    x = numbers(2, 4)
    assert_same(gradients(checkpoint_wrapper(Layer(seed=2), context_fn=Log()), x), gradients(Layer(seed=2), x))


def test_a_context_may_hand_values_from_the_forward_to_the_replay() -> None:
    x = numbers(2, 4)
    scales = iter([2.0, 3.0])

    class Shared:
        def __init__(self) -> None:
            self.scale = next(scales)

    def context_fn() -> tuple[Any, Any]:
        shared = Shared()
        return _using(shared), _using(shared)

    present: list[Shared] = []

    @contextlib.contextmanager
    def _using(shared: Shared) -> Iterator[None]:
        present.append(shared)
        yield
        present.pop()

    def body(x: Tensor) -> Tensor:
        return ops.tanh(x) * (x * present[-1].scale)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(body, checkpoint(body, x, context_fn=context_fn), context_fn=context_fn)

    def plain(x: Tensor) -> Tensor:
        y = ops.tanh(x) * (x * 2.0)
        return ops.tanh(y) * (y * 3.0)

    assert np.array_equal(ms.grad(forward)(x).asnumpy(), ms.grad(plain)(x).asnumpy())
