"""`register_state_provider` and `ProvidedState`: state that its owner gives and takes."""

import random
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from hyper_parallel import PolicyError, checkpoint, register_state_provider
from hyper_parallel.core.activation_memory import state_providers
from hyper_parallel.core.activation_memory.state_providers import ProvidedState, StateProvider
from tests.helpers import numbers


class Flag:
    """State with a get and a set, which write down what they are called with."""

    def __init__(self, name: str = "flag", value: Any = "old") -> None:
        self.value = value
        self.name = name
        self.log: list[str] = []

    def get(self) -> Any:
        self.log.append("get")
        return self.value

    def set(self, value: Any) -> None:
        self.log.append(f"set {value}")
        self.value = value

    def register(self) -> StateProvider:
        return register_state_provider(self.name, self.get, self.set)


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers are one table for the whole process."""
    monkeypatch.setattr(state_providers, "_providers", {})


def test_the_state_of_the_forward_is_restored_inside_and_the_present_one_afterwards() -> None:
    flag = Flag()
    flag.register()
    state = ProvidedState()
    flag.value = "new"
    with state.restored():
        assert flag.value == "old"
        flag.value = "written by the replay"
    assert flag.value == "new"


def test_get_and_set_are_called_once_each_way() -> None:
    flag = Flag()
    flag.register()
    state = ProvidedState()
    assert flag.log == ["get"]
    with state.restored():
        assert flag.log == ["get", "get", "set old"]
    assert flag.log == ["get", "get", "set old", "set old"]


def test_the_present_state_comes_back_after_an_exception() -> None:
    flag = Flag()
    flag.register()
    state = ProvidedState()
    flag.value = "new"
    with pytest.raises(LookupError), state.restored():
        raise LookupError
    assert flag.value == "new"


def test_what_was_restored_is_put_back_if_a_set_fails() -> None:
    one, fails = Flag("one"), iter([True])
    one.register()
    register_state_provider("other", lambda: 0, lambda value: 1 / 0 if next(fails, False) else None)
    state = ProvidedState()
    one.value = "new"
    with pytest.raises(ZeroDivisionError), state.restored():
        raise AssertionError("the replay must not begin")
    assert one.value == "new"


def test_states_are_put_back_in_the_reverse_order() -> None:
    order: list[str] = []
    for name in ("first", "second"):
        register_state_provider(name, lambda: 0, lambda value, name=name: order.append(name))
    with ProvidedState().restored():
        assert order == ["first", "second"]
    assert order == ["first", "second", "second", "first"]


def test_a_provider_that_is_removed_is_not_asked_any_more() -> None:
    flag = Flag()
    flag.register().remove()
    ProvidedState()
    assert flag.log == []


def test_removing_twice_is_the_same_as_once() -> None:
    provider = Flag().register()
    provider.remove()
    provider.remove()


def test_a_forward_that_has_run_keeps_its_provider_when_it_is_removed() -> None:
    flag = Flag()
    provider = flag.register()
    state = ProvidedState()
    provider.remove()
    flag.value = "new"
    with state.restored():
        assert flag.value == "old"


def test_a_provider_that_comes_after_the_forward_is_not_asked() -> None:
    state, flag = ProvidedState(), Flag()
    flag.register()
    with state.restored():
        assert flag.log == []


def test_a_provider_shows_its_name() -> None:
    assert repr(Flag("scale").register()) == "StateProvider('scale')"


@pytest.mark.parametrize("name", ["flag", "numpy.random", "random"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    Flag("flag").register()
    with pytest.raises(PolicyError, match=rf"state provider '{name}' is registered already; remove that one first"):
        Flag(name).register()


def test_a_name_is_free_again_after_removal() -> None:
    Flag().register().remove()
    Flag().register()


@pytest.mark.parametrize(("get", "set"), [(3, print), (print, None), ("get", "set")])
def test_what_can_not_be_called_is_refused(get: Any, set: Any) -> None:
    with pytest.raises(PolicyError, match="get and set must be callable, but got"):
        register_state_provider("bad", get, set)
    assert state_providers._providers == {}


GENERATORS: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "numpy": (np.random.rand, lambda: np.random.get_state()[1].tolist() + list(np.random.get_state()[2:])),
    "numpy's normal numbers, which come in pairs": (np.random.randn, lambda: np.random.get_state()[4]),
    "random": (random.random, random.getstate),
    "random's normal numbers, which come in pairs": (lambda: random.gauss(0, 1), random.getstate),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_global_generator_is_built_in(kind: str) -> None:
    draw, look = GENERATORS[kind]
    state = ProvidedState()
    drawn, now = [draw() for _ in range(3)], look()
    with state.restored():
        assert [draw() for _ in range(2)] == drawn[:2]
    assert look() == now


def test_a_replay_runs_under_the_state_of_its_forward() -> None:
    flag = Flag(value=2.0)
    flag.register()
    seen: list[float] = []

    def body(x: Tensor) -> Tensor:
        seen.append(flag.value)
        return ops.tanh(x) * flag.value

    def forward(x: Tensor) -> Tensor:
        y = checkpoint(body, x)
        flag.value = 5.0
        return y

    ms.grad(forward)(numbers(2))
    assert seen == [2.0, 2.0]
    assert flag.value == 5.0


def test_without_a_provider_the_replay_sees_the_present_state() -> None:
    held, seen = [2.0], []  # a list that a function closes over is not looked at

    def body(x: Tensor) -> Tensor:
        seen.append(held[0])
        return ops.tanh(x)

    def forward(x: Tensor) -> Tensor:
        y = checkpoint(body, x)
        held[0] = 5.0
        return y

    ms.grad(forward)(numbers(2))
    assert seen == [2.0, 5.0]


def test_nothing_is_asked_where_no_gradient_is_recorded() -> None:
    flag = Flag()
    flag.register()
    checkpoint(ops.tanh, numbers(2))
    assert flag.log == []


def test_the_name_of_a_provider_that_fails_in_the_forward_is_the_users_error() -> None:
    register_state_provider("bad", lambda: 1 / 0, print)
    with pytest.raises(ZeroDivisionError):
        ms.grad(lambda x: checkpoint(ops.tanh, x))(numbers(2))
