"""`Effects`: a replay sees what a cell that runs once has changed besides its output."""

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import PolicyError, is_recomputing, register_state_provider
from hyper_parallel.core.activation_memory.scopes import current
from tests.helpers import RECOMPUTE, SAVE, SWAP, Stack, assert_same, gradients, numbers, on, state_of

X = numbers(2, 4)


class Runs(nn.Cell):
    """Does something, and gives something of its input."""

    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def construct(self, x: Tensor) -> Any:
        return self.does(x)


class Counts(nn.Cell):
    """Counts its calls in a parameter, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Parameter(Tensor(1.0, ms.float32), name="count", requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        self.count.set_data(self.count + 1.0)
        return ops.tanh(x * self.count)


class Reads(nn.Cell):
    """Reads, after a cell, the parameter that the cell has written."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner

    def construct(self, x: Tensor) -> Tensor:
        return ops.exp(self.inner(x) * self.inner.count)


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_replay_sees_what_a_cell_that_runs_once_has_written(policy: object) -> None:
    nets = [Reads(Counts()), on(Reads(on(Counts(), policy)), RECOMPUTE)]
    plain, got = (gradients(net, numbers(2, 4)) for net in nets)
    assert_same(got, plain)
    assert_same(state_of(nets[1]), state_of(nets[0]))


@pytest.mark.parametrize("policy", [SAVE, SWAP])
@pytest.mark.parametrize("change", [lambda held: held.append(1), lambda held: held.__setitem__(0, 1)])
def test_a_cell_that_runs_once_may_not_change_a_list_that_it_is_called_with(policy: object, change: object) -> None:
    class Changes(nn.Cell):
        def construct(self, x: Tensor, held: list) -> Tensor:
            change(held)
            return ops.tanh(x)

    inner = on(Changes(), policy)

    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(self.inner(x, [0]))

    with pytest.raises(PolicyError, match="Changes runs once inside a region that is replayed, but changes a list"):
        ms.grad(on(Outer(), RECOMPUTE))(numbers(2, 4))


# ---- what two cells share: one changes it, the other reads it

Pair = tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]


def _attribute() -> Pair:
    shared = SimpleNamespace(h=numbers(2, 4, seed=1))

    def sets(x: Tensor) -> Tensor:
        shared.h = ops.stop_gradient(shared.h * 0.5 + x)
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x) * shared.h


def _number_beside_a_tensor() -> Pair:
    shared = SimpleNamespace(h=numbers(2, 4, seed=1), step=1)

    def sets(x: Tensor) -> Tensor:
        shared.h, shared.step = ops.stop_gradient(x * 2), shared.step + 1
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x * 0.1) * shared.h * shared.step


def _closed_over() -> Pair:
    h = numbers(2, 4, seed=1)

    def sets(x: Tensor) -> Tensor:
        nonlocal h
        h = ops.stop_gradient(h * 0.5 + x)
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x) * h


def _list_in_an_object() -> Pair:
    shared = SimpleNamespace(cache=[numbers(2, 4, seed=1)])

    def sets(x: Tensor) -> Tensor:
        shared.cache.append(ops.stop_gradient(x * 2))
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x) * sum(shared.cache)


def _dict_in_an_object() -> Pair:
    shared = SimpleNamespace(cache={"k": numbers(2, 4, seed=1)})

    def sets(x: Tensor) -> Tensor:
        shared.cache["k"] = ops.stop_gradient(shared.cache["k"] + x)
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x) * shared.cache["k"]


def _array() -> Pair:
    scale = np.ones(4, np.float32)

    def sets(x: Tensor) -> Tensor:
        scale[0] += 1
        return ops.tanh(x)

    return sets, lambda x: ops.exp(x) * Tensor(scale.copy())


def _own_generator(generator: Any, draw: Callable[[], Any]) -> Pair:
    class Holds:
        def __init__(self) -> None:
            self.generator = generator

    holds = Holds()

    def draws(x: Tensor) -> Tensor:
        assert holds.generator is generator
        return ops.tanh(x) * Tensor(np.float32(draw()))

    return draws, lambda x: ops.exp(x) * Tensor(np.float32(draw()))


def _global_generators() -> Pair:
    def draws(x: Tensor) -> Tensor:
        return ops.tanh(x) * Tensor(np.float32(np.random.rand() + random.random()))

    return draws, lambda x: ops.exp(draws(x))


def _numpys_generator() -> Pair:
    generator = np.random.default_rng(3)
    return _own_generator(generator, generator.random)


def _numpys_old_generator() -> Pair:
    generator = np.random.RandomState(3)
    return _own_generator(generator, generator.rand)


def _pythons_generator() -> Pair:
    generator = random.Random(3)
    return _own_generator(generator, generator.random)


SHARED = {
    name.removeprefix("_").replace("_", " "): make
    for name, make in list(globals().items())
    if name.startswith("_") and getattr(make, "__annotations__", {}).get("return") is Pair and name != "_own_generator"
}


def net_of(make: Callable[[], Pair], inner: Any = None, outer: Any = None, nested: bool = False) -> nn.Cell:
    changes, reads = make()
    cells = [Runs(reads), on(Runs(changes), inner), Runs(reads), on(Runs(changes), inner), Runs(reads)]
    if nested:
        cells = [cells[0], on(Stack(cells[1:4]), outer), *cells[3:]]
    return on(Stack(cells), outer)


def two_steps(make: Callable[[], nn.Cell]) -> list[Any]:
    np.random.seed(5)
    random.seed(6)
    net = make()
    return [gradients(net, X), gradients(net, X)]


@pytest.mark.parametrize("nested", [False, True], ids=["one region", "two regions"])
@pytest.mark.parametrize("policy", [SAVE, SWAP])
@pytest.mark.parametrize("name", SHARED)
def test_what_follows_in_a_replay_reads_what_a_cell_that_runs_once_has_left(
    name: str, policy: object, nested: bool
) -> None:
    got = two_steps(lambda: net_of(SHARED[name], policy, RECOMPUTE, nested))
    for one, plain in zip(got, two_steps(lambda: net_of(SHARED[name], nested=nested)), strict=True):
        assert_same(one, plain)


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_gradient_goes_through_what_a_cell_that_runs_once_has_left(policy: object) -> None:
    def net(inner: Any, outer: Any) -> nn.Cell:
        shared = SimpleNamespace(h=None)

        def sets(x: Tensor) -> Tensor:
            shared.h = ops.tanh(x)
            return x * 2

        return on(Stack([on(Runs(sets), inner), Runs(lambda x: ops.exp(x) * shared.h)]), outer)

    assert_same(gradients(net(policy, RECOMPUTE), X), gradients(net(None, None), X))


@contextlib.contextmanager
def provided(state: dict[str, float]) -> Iterator[None]:
    provider = register_state_provider("scale", lambda: state["scale"], lambda value: state.update(scale=value))
    try:
        yield
    finally:
        provider.remove()


def test_a_registered_state_holds_again_after_a_cell_that_runs_once() -> None:
    def pair(state: dict[str, float]) -> Callable[[], Pair]:
        def sets(x: Tensor) -> Tensor:
            state["scale"] += 1.0
            return ops.tanh(x)

        return lambda: (sets, lambda x: ops.exp(x * state["scale"]))

    plain_state, state = {"scale": 1.0}, {"scale": 1.0}
    plain = gradients(net_of(pair(plain_state)), X)
    with provided(state):
        assert_same(gradients(net_of(pair(state), SAVE, RECOMPUTE), X), plain)
    assert state == plain_state


def test_what_nobody_changes_is_not_kept() -> None:
    tapes = []

    class Looks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            if not is_recomputing():
                tapes.append(current().tape)
            return x

    ms.grad(on(Stack([on(Runs(ops.tanh), SAVE), Looks(), Runs(ops.exp)]), RECOMPUTE))(X)
    (_, (_, effects)), *_ = tapes[0].entries
    assert (effects._held, effects._parameters, effects._provided) == ([], [], None)


@pytest.mark.parametrize("inner", [None, SAVE])
def test_what_the_user_resets_before_backward_stays_reset(inner: object) -> None:
    """The replay begins with the very value that is there, and changes it again."""
    h = start = numbers(2, 4, seed=1)
    shared = SimpleNamespace(h=start, cache=[])

    def sets(x: Tensor) -> Tensor:
        nonlocal h
        h, shared.h = x * 2, x * 3
        shared.cache.append(x)
        return ops.tanh(x) * h * shared.h * sum(shared.cache)

    def forward(x: Tensor) -> Tensor:
        nonlocal h
        y = net(x)
        h = shared.h = start
        shared.cache.clear()
        return y

    net = on(Stack([Runs(ops.exp), on(Runs(sets), inner), Runs(ops.tanh)]), RECOMPUTE)
    ms.grad(forward)(X)
    assert h is start
    assert shared.h is start
    assert shared.cache == []
