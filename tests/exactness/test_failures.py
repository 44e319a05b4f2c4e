"""A step that fails raises its own exception, leaves nothing behind, and the next step gives plain's numbers."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor

from hyper_parallel import is_recomputing
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Stack, assert_nothing_live, assert_same, gradients, numbers, on

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
