"""`PythonState`: what of a region's state is left alone, and what is put back afterwards."""

import collections
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.activation_memory import python_state, state_holders
from hyper_parallel.core.activation_memory.python_state import PythonState
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.tensors import storage_of
from tests.core.python_things import NEW, OLD, Holds, Set, Thing, found, replay
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Stack, numbers, on

LIST_OF_THE_MODULE: list[Any] = []


def unchanged_in_a_replay(owner: Any, change: Callable[[], Any], look: Callable[[], Any]) -> bool:
    """Whether the replay sees what the forward left."""
    with replay(owner, change):
        return look() is NEW


def holders_of(owner: Any) -> list[str]:
    return [type(holder).__name__ for holder in PythonState(owner, ()).holders]


def test_a_list_that_a_function_closes_over_is_left_alone() -> None:
    seen: list[Any] = []
    with replay(lambda: seen, lambda: seen.append(NEW)):
        assert len(seen) == 1


def test_a_list_of_the_module_is_left_alone() -> None:
    def function() -> Any:
        return LIST_OF_THE_MODULE

    try:
        with replay(function, lambda: LIST_OF_THE_MODULE.append(NEW)):
            assert len(LIST_OF_THE_MODULE) == 1
    finally:
        LIST_OF_THE_MODULE.clear()


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_cell_that_runs_once_is_left_alone(policy: Any) -> None:
    kept = on(Holds(OLD), policy)
    assert unchanged_in_a_replay(Stack([kept]), Set(kept), lambda: kept.value)


def test_a_nested_region_is_reached() -> None:
    nested = on(Holds(OLD), RECOMPUTE)
    assert not unchanged_in_a_replay(Stack([nested]), Set(nested), lambda: nested.value)


def test_the_region_itself_is_reached_whatever_its_policy() -> None:
    cell = on(Holds(OLD), SAVE)
    assert not unchanged_in_a_replay(cell, Set(cell), lambda: cell.value)


def test_what_the_standard_library_defines_is_left_alone() -> None:
    local = threading.local()
    local.value = OLD
    assert unchanged_in_a_replay(Holds(local), Set(local), lambda: local.value)


@pytest.mark.parametrize("kind", [types.SimpleNamespace, collections.UserDict, collections.Counter])
def test_plain_objects_of_the_standard_library_are_put_back(kind: Any) -> None:
    thing = kind()
    thing.value = OLD
    assert not unchanged_in_a_replay(Holds(thing), Set(thing), lambda: thing.value)


@pytest.mark.parametrize(
    "wrapped", [lambda t: (t, 1), lambda t: [t], lambda t: {"h": (t,)}, lambda t: types.SimpleNamespace(h=t)]
)
def test_tensors_in_a_value_that_is_assigned_anew_are_put_back(wrapped: Callable[[Tensor], Any]) -> None:
    cell = Holds(wrapped(OLD))
    before = cell.value

    def forward() -> None:
        cell.value = wrapped(NEW)

    with replay(cell, forward):
        assert cell.value is before
    assert cell.value is not before


def test_of_mindspores_own_cells_training_alone_is_looked_at() -> None:
    dense = nn.Dense(4, 4)
    dense.value = OLD
    assert unchanged_in_a_replay(Stack([dense]), Set(dense), lambda: dense.value)
    dense.set_train()
    with replay(dense, lambda: None):
        assert dense.training


def test_long_collections_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "_MOST_ITEMS", 2)
    short, long = [OLD, 1], [OLD, 1, 2]
    with replay(Holds([short, long]), lambda: (short.append(NEW), long.append(NEW))):
        assert (len(short), len(long)) == (2, 4)


def test_items_of_a_long_closed_over_list_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "_MOST_ITEMS", 1)
    thing = Thing(OLD)
    held = [thing, 2]
    assert unchanged_in_a_replay(lambda: held, Set(thing), lambda: thing.value)


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "large": lambda: np.zeros(python_state._MOST_BYTES + 1, np.uint8),
    "of objects": lambda: np.array([None, None]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_that_is_no_small_state_is_left_alone(kind: str) -> None:
    array = ARRAYS[kind]()
    with replay(Holds(array), lambda: array.fill(1)):
        assert array[0] == 1


def test_an_array_that_can_not_be_written_is_left_alone() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    assert holders_of(Thing(array)) == ["Namespace"]


def test_parameters_are_found_as_the_cells_own_and_not_copied() -> None:
    layer = Layer()
    assert found(layer) == []


def test_classes_modules_and_primitives_are_left_alone() -> None:
    held = [Thing, np, ops.Tanh(), len, 3, None, "text"]
    assert holders_of(Thing(held)) == ["Namespace", "Collection"]


# ---- afterwards


def test_everything_is_put_back_after_an_exception() -> None:
    one, other = Thing(OLD), Thing(OLD)
    with pytest.raises(LookupError), replay(Thing([one, other]), lambda: (Set(one)(), Set(other)())):
        raise LookupError
    assert one.value is other.value is NEW


def test_what_was_restored_is_put_back_if_restoring_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    thing = Thing(OLD)
    state = PythonState(Thing([thing, random.Random(1)]), ())
    Set(thing)()
    state.seal()
    monkeypatch.setattr(state_holders.Generator, "restore", lambda holder: 1 / 0)
    with pytest.raises(ZeroDivisionError), state.restored():
        raise AssertionError("the replay must not begin")
    assert thing.value is NEW


def test_tensors_are_let_go_when_the_forward_has_ended() -> None:
    state = PythonState(Holds(OLD), ())
    assert len(state.tensors) == 1
    state.seal()
    assert state.tensors == []


# ---- a write inside the region


def test_a_tensor_that_the_region_writes_waits_as_a_copy() -> None:
    tensor = ops.tanh(numbers(2, 4))
    cell = Holds(tensor)
    state = PythonState(cell, ())
    state.rescue(Written(tensor, "copy_", False))
    tensor.copy_(ops.zeros_like(tensor))
    state.seal()
    with state.restored():
        assert storage_of(cell.value) != storage_of(tensor)
        assert np.array_equal(cell.value.asnumpy(), ops.tanh(numbers(2, 4)).asnumpy())
    assert cell.value is tensor


def test_other_tensors_and_parameters_wait_as_themselves() -> None:
    tensor, parameter = ops.tanh(numbers(2, 4)), Parameter(numbers(2, 4), name="p")
    thing = Thing([tensor, parameter])
    state = PythonState(thing, ())
    state.rescue(Written(numbers(2, 4) * 1.0, "copy_", False))
    state.rescue(Written(parameter, "copy_", False))
    state.seal()
    with state.restored():
        assert thing.value[0] is tensor
        assert thing.value[1] is parameter
