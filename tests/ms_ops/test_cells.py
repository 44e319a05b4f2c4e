"""Calls of cells are heard while operators are intercepted."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from mindspore import Tensor, nn, ops

from ms_ops import cells
from ms_ops.cells import hear_of_calls
from ms_ops.dispatch import Interception
from tests.helpers import Layer, Stack, numbers

X = numbers(2, 4)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[nn.Cell]:
    """The cells that are heard of, by a listener beside the library's own."""
    found: list[nn.Cell] = []
    run = nn.Cell.__call__.__wrapped__  # MindSpore's own
    monkeypatch.setattr(nn.Cell, "__call__", run)
    hear_of_calls(found.append)
    return found


def intercepted(run: Callable[[], Any]) -> Any:
    with Interception(lambda name, call, args: call(*args)):
        return run()


def test_every_cell_is_heard_before_the_cells_inside(heard: list[nn.Cell]) -> None:
    net = Stack([Layer()])
    intercepted(lambda: net(X))
    layer = net.layers[0]
    assert [cell is want for cell, want in zip(heard, (net, layer, layer.dense), strict=True)] == [True] * 3


def test_a_cell_is_heard_before_it_runs(heard: list[nn.Cell]) -> None:
    class Looks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            assert heard == [self]
            return x

    cell = Looks()
    intercepted(lambda: cell(X))
    assert len(heard) == 1


def test_nothing_is_heard_outside(heard: list[nn.Cell]) -> None:
    Layer()(X)
    assert heard == []


def test_nothing_is_heard_on_another_thread(heard: list[nn.Cell]) -> None:
    layer = Layer()

    def run() -> None:
        other = threading.Thread(target=lambda: layer(X))
        other.start()
        other.join()

    intercepted(run)
    assert heard == []


def test_a_cell_of_a_class_with_a_call_of_its_own_is_heard(heard: list[nn.Cell]) -> None:
    class Calls(Layer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    layer = Calls()
    intercepted(lambda: layer(X))
    assert heard[0] is layer


def test_a_call_gives_what_the_cell_gives(heard: list[nn.Cell]) -> None:
    class Adds(nn.Cell):
        def construct(self, x: Tensor, *more: float, scale: float = 1.0) -> Tensor:
            return ops.tanh(x) * scale + sum(more)

    cell = Adds()
    got = intercepted(lambda: cell(X, 1.0, 2.0, scale=3.0))
    assert (got.asnumpy() == (ops.tanh(X) * 3.0 + 3.0).asnumpy()).all()


def test_it_is_installed_once() -> None:
    before = nn.Cell.__call__
    cells.hear_of_calls(lambda cell: None)
    assert nn.Cell.__call__ is before
