"""State outside of cells and tensors: numpy's and Python's generators by themselves, anything else by a provider."""

import contextlib
import decimal
import random
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import PolicyError, ReplayMismatchError, checkpoint, register_state_provider
from tests.exactness.programs.entries import ENTRIES, put_by
from tests.exactness.programs.program import X
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, flat, gradients, on

MODES = ("recompute", "swapped inputs", "recompute in recompute", "swap in recompute", "swap")


def scale() -> float:
    """A flag that a library keeps per thread, where looking at cells and variables doesn't find it."""
    return float(decimal.getcontext().prec)


def set_scale(value: float) -> None:
    decimal.getcontext().prec = int(value)


class Scaled(nn.Cell):
    """Computes with the flag."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x * scale()) * x


@pytest.fixture
def provided() -> Iterator[list[float]]:
    """The flag has a provider; what was set."""
    sets: list[float] = []

    def put(value: float) -> None:
        sets.append(value)
        set_scale(value)

    provider = register_state_provider("flags", scale, put)
    yield sets
    provider.remove()


@pytest.fixture(autouse=True)
def one_again() -> Iterator[None]:
    set_scale(1)
    yield
    set_scale(28)


def changed_after(cell: Callable[[Tensor], Tensor]) -> Any:
    """Value and gradient of a call under another flag than the one that holds when backward begins."""

    def function(x: Tensor) -> Tensor:
        set_scale(2)
        y = cell(x)
        set_scale(5)
        return (y**2).sum()

    return flat(ms.value_and_grad(function)(X), "step")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_replay_runs_under_the_flag_of_its_forward(entry: str, mode: str, provided: list[float]) -> None:
    assert_same(changed_after(put_by(entry, mode)(Scaled())), changed_after(Scaled()))
    assert scale() == 5.0


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_a_provider_the_difference_is_noticed(entry: str) -> None:
    with pytest.raises(ReplayMismatchError, match="register_state_provider"):
        changed_after(put_by(entry, "recompute")(Scaled()))


def test_each_call_has_its_own_state(provided: list[float]) -> None:
    def run(cell: nn.Cell) -> Any:
        def function(x: Tensor) -> Tensor:
            total = ops.zeros((), ms.float32)
            for value in (1, 2, 3):
                set_scale(value)
                total = total + (cell(x) ** 2).sum()
            return total

        return flat(ms.value_and_grad(function)(X), "step")

    assert_same(run(on(Scaled(), RECOMPUTE)), run(Scaled()))
    assert scale() == 3.0
    assert provided == [3.0, 3.0, 2.0, 3.0, 1.0, 3.0]


def test_a_nested_region_meets_the_flag_that_the_outer_one_set(provided: list[float]) -> None:
    class Sets(nn.Cell):
        def __init__(self, inner: nn.Cell) -> None:
            super().__init__()
            self.inner = inner

        def construct(self, x: Tensor) -> Tensor:
            set_scale(scale() + 1)
            return self.inner(x) * ops.exp(x * scale())

    assert_same(changed_after(on(Sets(on(Scaled(), RECOMPUTE)), RECOMPUTE)), changed_after(Sets(Scaled())))
    assert scale() == 5.0


def test_nobody_asks_where_nothing_is_replayed() -> None:
    asked: list[str] = []
    provider = register_state_provider("asks", lambda: asked.append("get"), lambda _: asked.append("set"))
    try:
        on(Layer(), RECOMPUTE)(X)
        gradients(on(Layer(), SWAP), X)
        assert asked == []
        gradients(on(Layer(), RECOMPUTE), X)
        assert asked == ["get", "get", "set", "set"]  # in the forward, and around the replay
    finally:
        provider.remove()


def test_a_provider_that_is_removed_is_forgotten_by_later_forwards_only() -> None:
    provider = register_state_provider("flags", scale, set_scale)
    cell = on(Scaled(), RECOMPUTE)

    def function(x: Tensor) -> Tensor:
        set_scale(2)
        y = cell(x)
        set_scale(5)
        provider.remove()
        return (y**2).sum()

    assert_same(flat(ms.value_and_grad(function)(X), "step"), changed_after(Scaled()))
    provider.remove()  # once more is harmless
    with pytest.raises(ReplayMismatchError):
        changed_after(cell)


@pytest.mark.parametrize("where", ["get", "set"])
def test_a_provider_that_fails_raises_its_own_error_and_the_next_step_is_right(where: str) -> None:
    failing = [True]

    def fails(at: str) -> None:
        if failing[0] and at == where:
            raise LookupError(at)

    provider = register_state_provider("fails", lambda: fails("get"), lambda _: fails("set"))
    cell = on(Layer(), RECOMPUTE)
    try:
        with pytest.raises(LookupError, match=where):
            gradients(cell, X)
        failing[0] = False
        assert_same(gradients(cell, X), gradients(Layer(), X))
    finally:
        provider.remove()


def test_the_flag_is_put_back_after_a_replay_that_fails(provided: list[float]) -> None:
    def body(x: Tensor) -> Tensor:
        if scale() == 2.0 and len(provided) > 0:
            raise LookupError("in replay")
        return ops.tanh(x)

    with pytest.raises(LookupError):
        changed_after(lambda x: checkpoint(body, x))
    assert scale() == 5.0


@pytest.mark.parametrize("name", ["flags", "numpy.random", "random"])
def test_a_name_is_given_once(name: str, provided: list[float]) -> None:
    with pytest.raises(PolicyError, match=f"{name!r} is registered already"):
        register_state_provider(name, lambda: None, lambda _: None)


@pytest.mark.parametrize(("get", "put"), [(None, print), (print, 3)])
def test_what_cannot_be_called_is_refused(get: Any, put: Any) -> None:
    with pytest.raises(PolicyError, match="must be callable"):
        register_state_provider("bad", get, put)


class Draws(nn.Cell):
    """Multiplies by what a function of its own draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x * self.draw()) * x


def generators() -> dict[str, Callable[[], Callable[[], float]]]:
    def of_random() -> Callable[[], float]:
        generator = random.Random(3)
        return lambda: generator.random()

    def of_state() -> Callable[[], float]:
        generator = np.random.RandomState(3)
        return lambda: float(generator.randn())

    def of_numpy() -> Callable[[], float]:
        generator = np.random.default_rng(3)
        return lambda: float(generator.normal())

    return {"random.Random": of_random, "RandomState": of_state, "default_rng": of_numpy}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", generators())
def test_a_generator_that_a_cell_closes_over_is_replayed(kind: str, mode: str) -> None:
    build = generators()[kind]

    def run(put: Callable[[nn.Cell], nn.Cell]) -> Any:
        draw = build()
        net = put(Stack([Draws(draw), Draws(draw)]))
        return {**gradients(net, X), "next": np.array(draw()), **{f"2: {k}": v for k, v in gradients(net, X).items()}}

    assert_same(run(put_by("decorated instance", mode)), run(lambda cell: cell))


class Lagged:
    """A generator of a library's own: nobody could find its state by looking at the cell."""

    def __init__(self) -> None:
        self._state = 1

    def __call__(self) -> float:
        self._state = self._state * 48271 % 2147483647
        return self._state / 2147483647


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_generator_of_ones_own_is_replayed_by_a_provider(entry: str) -> None:
    def run(entry: str | None) -> Any:
        lagged = Lagged()
        with contextlib.ExitStack() as stack:
            if entry is not None:
                provider = register_state_provider(
                    "lagged", lambda: lagged._state, lambda state: setattr(lagged, "_state", state)
                )
                stack.callback(provider.remove)
            cell = Draws(lagged)
            net = cell if entry is None else put_by(entry, "recompute")(cell)
            found = gradients(Stack([net, net]), X)
        return {**found, "next": np.array(lagged())}

    assert_same(run(entry), run(None))
