"""A step that fails raises its own exception, leaves nothing behind, and the next step gives plain's numbers."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore._c_expression.amp import get_curr_amp_strategy
from mindspore.graph.api import _pynative_executor

from hyper_parallel import is_recomputing
from tests.helpers import (
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_nothing_live,
    assert_same,
    flat,
    gradients,
    numbers,
    on,
    state_of,
)

X = numbers(3, 4, seed=1)


class Boom(Exception):
    """Nothing of MindSpore's."""


class Fails(nn.Cell):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.where = Layer(seed=5), ""

    def construct(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.where == "forward" and not is_recomputing():
            raise Boom("in forward")
        if self.where == "replay" and is_recomputing():
            raise Boom("in replay")
        return ops.tanh(y) * x


class FailsBackward(nn.Cell):
    """Fails in its own bprop."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def construct(self, x: Tensor) -> Tensor:
        return x * 2

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple:
        if self.where == "backward":
            raise Boom("in backward")
        return (dout * 2,)


KINDS: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
    "swap in recompute": lambda cell: on(Stack([on(cell, SWAP), Layer(seed=6)]), RECOMPUTE),
    "recompute in recompute": lambda cell: on(Stack([on(cell, RECOMPUTE), Layer(seed=6)]), RECOMPUTE),
    "save in recompute": lambda cell: on(Stack([on(cell, SAVE), Layer(seed=6)]), RECOMPUTE),
}


class Net(nn.Cell):
    """Layers around a cell, then something that may fail outside of any region."""

    def __init__(self, put: Callable[[nn.Cell], nn.Cell]) -> None:
        super().__init__()
        self.fails, self.backward = Fails(), FailsBackward()
        self.first, self.middle, self.last = put(Layer(seed=1)), put(self.fails), put(Layer(seed=2))
        self.where = ""

    def construct(self, x: Tensor) -> Tensor:
        y = self.middle(self.backward(self.first(x)))
        if self.where == "after":
            raise Boom("after the regions")
        return self.last(y)


def plain_of(kind: str) -> Any:
    around = " in " in kind
    return gradients(Net(lambda cell: Stack([cell, Layer(seed=6)]) if around else cell), X)


def assert_the_failure_leaves_nothing(kind: str, fail: Callable[[Net], None], wait: bool = False) -> None:
    net = Net(KINDS[kind])
    fail(net)
    for _ in range(2):
        with pytest.raises(Boom):
            gradients(net, X, wait=wait)
        assert not _pynative_executor.grad_flag()
        assert_nothing_live()
    for _, cell in net.cells_and_names():
        if hasattr(cell, "where"):
            cell.where = ""
    for _ in range(2):
        assert_same(gradients(net, X), plain_of(kind))


def set_where(name: str, where: str) -> Callable[[Net], None]:
    return lambda net: setattr(getattr(net, name) if name else net, "where", where)


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "after the copies"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_forward_of_a_region(kind: str, wait: bool) -> None:
    assert_the_failure_leaves_nothing(kind, set_where("fails", "forward"), wait)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_forward_after_a_region(kind: str) -> None:
    assert_the_failure_leaves_nothing(kind, set_where("", "after"))


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs", "recompute in recompute"])
def test_in_a_replay(kind: str) -> None:
    assert_the_failure_leaves_nothing(kind, set_where("fails", "replay"))


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "after the copies"])
@pytest.mark.parametrize("kind", ["recompute", "swap", "swapped inputs"])
def test_in_backward(kind: str, wait: bool) -> None:
    assert_the_failure_leaves_nothing(kind, set_where("backward", "backward"), wait)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, StopIteration])
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_an_exception_keeps_its_type_and_message(kind: str, error: type[BaseException]) -> None:
    class Raises(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            raise error("of the user")

    with pytest.raises(error, match="of the user"):
        ms.grad(KINDS[kind](Raises()))(X)


def test_an_exception_that_the_forward_catches_is_no_failure() -> None:
    class Falls(nn.Cell):
        def __init__(self, inner: nn.Cell, other: nn.Cell) -> None:
            super().__init__()
            self.inner, self.other = inner, other

        def construct(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except Boom:
                return self.other(x)

    def net(put: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
        fails = Fails()
        fails.where = "forward"
        return Stack([Layer(seed=4), Falls(put(fails), put(Layer(seed=3)))])

    for kind in ("recompute", "swap", "swapped inputs"):
        assert_same(gradients(net(KINDS[kind]), X), gradients(net(lambda cell: cell), X))


@pytest.fixture
def flag_off_again() -> Iterator[None]:
    yield
    _pynative_executor.set_grad_flag(False)


@pytest.mark.parametrize("where", ["forward", "replay"])
@pytest.mark.parametrize("kind", ["recompute", "swapped inputs", "recompute in recompute"])
def test_a_flag_that_was_on_before_stays_on(kind: str, where: str, flag_off_again: None) -> None:
    """As MindFormers has it, for good."""
    net, plain = Net(KINDS[kind]), plain_of(kind)
    net.fails.where = where
    for _ in range(2):
        _pynative_executor.set_grad_flag(True)
        with pytest.raises(Boom):
            gradients(net, X)
        assert _pynative_executor.grad_flag()
        assert_nothing_live()
    net.fails.where = ""
    for _ in range(2):
        assert_same(gradients(net, X), plain)


def test_a_forward_that_fails_while_the_flag_is_on_does_not_leave_it_on_after_later_steps() -> None:
    """MindSpore would count later gradients as nested in the one that failed."""
    fails = Fails()
    fails.where = "forward"
    _pynative_executor.set_grad_flag(True)
    with pytest.raises(Boom):
        gradients(on(fails, RECOMPUTE), X)
    _pynative_executor.set_grad_flag(False)
    gradients(Layer(seed=1), X)
    assert not _pynative_executor.grad_flag()


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs", "recompute in recompute"])
def test_a_flag_that_is_on_for_good_stays_on_when_a_backward_by_itself_fails(kind: str, flag_off_again: None) -> None:
    fails = Fails()
    net = Stack([KINDS[kind](Layer(seed=1)), KINDS[kind](fails)])
    weights = tuple(net.trainable_params())
    for weight in weights:
        weight.requires_grad_()

    def backward() -> Any:
        loss = (net(X) ** 2).sum()
        return run_backward((loss,), (ops.ones_like(loss),), False, False, weights, False, accumulate_grad=False)

    _pynative_executor.set_grad_flag(True)
    want = flat(backward(), "gradients")
    fails.where = "replay"
    for _ in range(2):
        with pytest.raises(Boom):
            backward()
        assert _pynative_executor.grad_flag()
        assert_nothing_live()
    fails.where = ""
    assert_same(flat(backward(), "gradients"), want)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_optimizer(kind: str) -> None:
    """The gradients are there, the weights don't move; then the step is taken again."""

    class Adam(nn.Adam):
        failing = True

        def construct(self, gradients: tuple) -> Any:
            if self.failing:
                raise Boom("in the optimizer")
            return super().construct(gradients)

    def run(put: Callable[[nn.Cell], nn.Cell], fails: bool) -> Any:
        net = Net(put)
        weights = ms.ParameterTuple(net.trainable_params())
        optimizer = Adam(weights, learning_rate=0.01)
        step = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, weights)
        if fails:
            before = state_of(net)
            from ms_ops.autograd import _depth

            log = [_pynative_executor.grad_flag(), _depth.flag, _depth.value, _depth.makes_empty_graphs]
            g = step(X)[1]
            log += [_pynative_executor.grad_flag(), _depth.flag]
            with pytest.raises(Boom):
                optimizer(g)
            log += [_pynative_executor.grad_flag(), _depth.flag]
            assert not log[-2], log
            assert_same(state_of(net), before)
            assert not _pynative_executor.grad_flag()
            assert_nothing_live()
        optimizer.failing = False
        for _ in range(2):
            optimizer(step(X)[1])
        return {name.replace("layers.0.", ""): value for name, value in state_of(net).items()}

    assert_same(
        run(KINDS[kind], fails=True), run(lambda cell: cell if " in " not in kind else in_a_stack(cell), fails=False)
    )


def in_a_stack(cell: nn.Cell) -> nn.Cell:
    return Stack([cell, Layer(seed=6)])


def ambient() -> Any:
    amp = get_curr_amp_strategy()
    return (
        amp and (amp.get_amp_level(), amp.get_amp_dtype()),
        ms.get_rng_state().asnumpy().tobytes(),
        str(np.random.get_state(legacy=False)),
        random.getstate(),
    )


@pytest.mark.parametrize("where", ["forward", "replay"])
@pytest.mark.parametrize("kind", ["recompute", "swapped inputs"])
def test_precision_and_generators_are_as_before(kind: str, where: str) -> None:
    cell = Fails().to_float(ms.float16)
    cell.where = where
    net = KINDS[kind](cell)
    a, b = numbers(3, 3, seed=1), numbers(3, 3, seed=2)
    before, product = ambient(), ops.matmul(a, b)

    with pytest.raises(Boom):
        ms.grad(lambda x: net(x).astype(ms.float32).sum())(X)

    assert ambient() == before
    after = ops.matmul(a, b)
    assert after.dtype == product.dtype and np.array_equal(after.asnumpy(), product.asnumpy())


@pytest.mark.parametrize("where", ["forward", "replay"])
def test_no_hook_is_left(where: str) -> None:
    net, packed = Net(KINDS["recompute"]), []
    net.fails.where = where

    def failing(x: Tensor) -> Tensor:
        return (net(x) ** 2).sum()

    def function(x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            return ops.exp(x).sum()

    with pytest.raises(Boom):
        ms.grad(failing)(X)
    ms.grad(function)(X)
    assert packed == [(3, 4)]


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs", "recompute in recompute"])
def test_out_of_memory_in_a_replay_once(kind: str) -> None:
    """The step after it is right at once, and so is the one after that: no argument of the failed one is left."""

    class Falls(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.falls = Layer(seed=5), True

        def construct(self, x: Tensor) -> Tensor:
            if self.falls and is_recomputing():
                self.falls = False
                raise MemoryError("no room")
            return ops.tanh(self.layer(x)) * x

    cell = Falls()
    net, plain = KINDS[kind](cell), Stack([Falls(), Layer(seed=6)]) if " in " in kind else Falls()
    with pytest.raises(MemoryError):
        ms.grad(lambda x: (net(x) ** 2).sum())(X * 3)
    for _ in range(3):
        found, want = (ms.value_and_grad(lambda x, n=n: (n(x) ** 2).sum())(X) for n in (net, plain))
        assert_same(flat(found, "step"), flat(want, "step"))
