"""`PythonState`: what the code of a region can reach, what of it a replay begins with, and what is left alone."""

import collections
import contextlib
import dataclasses
import functools
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.activation_memory import python_state, state_holders
from hyper_parallel.core.activation_memory.python_state import PythonState
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.tensors import storage_of
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Stack, numbers, on

OLD, NEW = numbers(2), numbers(2, seed=1)
of_the_module: Any = OLD
elsewhere: Any = OLD
LIST_OF_THE_MODULE: list[Any] = []


@contextlib.contextmanager
def replay(owner: Any, forward: Callable[[], Any], *arguments: Any) -> Iterator[None]:
    """Change things as a forward does; inside is the replay."""
    state = PythonState(owner, [(f"argument {index}", argument) for index, argument in enumerate(arguments)])
    forward()
    state.seal()
    with state.restored():
        yield


def found(owner: Any, *arguments: Any) -> list[str]:
    """Where tensors were found."""
    return [
        what for what, _ in PythonState(owner, [(f"argument {i}", value) for i, value in enumerate(arguments)]).tensors
    ]


class Holds(nn.Cell):
    """A cell with one attribute, which it reads."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def construct(self, x: Tensor) -> Tensor:
        return x * self.value

    def method(self) -> Any:
        return self.value


class Thing:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


@dataclasses.dataclass
class Record:
    """A dataclass of the user's own."""

    value: Any

    def method(self) -> Any:
        return self.value


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass that has its attributes in slots."""

    value: Any

    def method(self) -> Any:
        return self.value


class Set:
    """Exchanges what an object holds."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self) -> None:
        self.thing.value = NEW


# ---- what is reached

REACHED: dict[str, Callable[[Any], Any]] = {
    "a cell": lambda holder: holder,
    "a cell inside": lambda holder: Stack([Layer(), Holds(holder)]),
    "a bound method": lambda holder: holder.method,
    "a partial": lambda holder: functools.partial(print, holder, 3),
    "a keyword of a partial": lambda holder: functools.partial(print, end=holder),
    "an object's attribute": Thing,
    "a list in an attribute": lambda holder: Holds([3, holder]),
    "a dict in an attribute": lambda holder: Holds({"k": holder}),
    "a tuple in an attribute": lambda holder: Holds((3, (holder,))),
    "a closed-over variable": lambda holder: lambda: holder,
    "an item of a closed-over list": lambda holder: (lambda held: lambda: held)([holder]),
}


@pytest.mark.parametrize("make", [Holds, Thing, Record, Slotted])
@pytest.mark.parametrize("way", REACHED)
def test_a_tensor_that_is_held_somewhere_is_restored_and_put_back(way: str, make: Callable[[Any], Any]) -> None:
    holder = make(OLD)
    with replay(REACHED[way](holder), Set(holder)):
        assert holder.value is OLD
    assert holder.value is NEW


@pytest.mark.parametrize("pack", [lambda thing: thing, lambda thing: [thing], lambda thing: {"k": (thing,)}])
def test_an_object_that_is_an_argument_is_reached(pack: Callable[[Any], Any]) -> None:
    thing = Thing(OLD)
    with replay(len, Set(thing), pack(thing)):
        assert thing.value is OLD
    assert thing.value is NEW


def rebind(value: Any) -> None:
    global of_the_module
    of_the_module = value


def reads_the_module() -> Any:
    return of_the_module


def calls_another() -> Any:
    return reads_the_module()


def defines_another() -> Any:
    def inner() -> Any:
        return of_the_module

    return inner()


class ReadsTheModule(nn.Cell):
    """Its construct reads a variable of the module."""

    def construct(self, x: Tensor) -> Tensor:
        return x * of_the_module


@pytest.mark.parametrize(
    "owner",
    [reads_the_module, calls_another, defines_another, ReadsTheModule(), on(ReadsTheModule(), RECOMPUTE)],
    ids=["a function", "one that it calls", "one that it defines", "a cell", "a cell under a policy"],
)
def test_a_variable_of_the_module_is_restored_and_put_back(owner: Any) -> None:
    try:
        with replay(owner, lambda: rebind(NEW)):
            assert of_the_module is OLD
        assert of_the_module is NEW
    finally:
        rebind(OLD)


def test_a_variable_of_the_module_that_the_code_does_not_name_is_not_reached() -> None:
    assert found(reads_the_module) == ["of_the_module"]
    assert elsewhere is OLD


def test_a_base_class_of_the_cell_is_looked_at() -> None:
    class Derived(ReadsTheModule):
        pass

    assert found(Derived()) == ["of_the_module"]


def test_a_variable_of_a_class_is_restored_and_put_back() -> None:
    class Base(nn.Cell):
        value: Any = OLD
        scale = 1.0

    class Derived(Base):
        pass

    def forward() -> None:
        Base.value = NEW

    with replay(Derived(), forward):
        assert Base.value is OLD
    assert Base.value is NEW


def test_an_empty_slot_is_filled_and_emptied_again() -> None:
    thing = Slotted(OLD)
    del thing.value
    with replay(thing, Set(thing)):
        assert not hasattr(thing, "value")
    assert thing.value is NEW


def test_a_list_of_a_class_is_left_alone() -> None:
    class Cell(nn.Cell):
        seen: ClassVar[list[Any]] = []

    with replay(Cell(), lambda: Cell.seen.append(NEW)):
        assert len(Cell.seen) == 1


def test_objects_that_hold_each_other_are_visited_once() -> None:
    one, other = Thing(OLD), Thing(None)
    one.other, other.one = other, one
    assert found(one) == ["value"]


def test_a_variable_that_two_functions_close_over_is_held_once() -> None:
    held = OLD

    def one() -> Any:
        return held, other

    def other() -> Any:
        return held

    assert found(one) == ["held"]


def test_a_list_that_holds_itself_is_visited_once() -> None:
    held: list[Any] = [OLD]
    held.append(held)
    assert found(Holds(held)) == ["Holds.value[0]"]


def test_tensors_are_named_by_where_they_are() -> None:
    net = Stack([Holds(OLD), Holds({"k": [NEW]})])
    assert found(net) == ["layers.0.value", "layers.1.value['k'][0]"]
    assert found(len, [OLD], Thing(NEW)) == ["argument 0[0]", "argument 1.value"]


def test_the_cells_inside_are_found_with_their_paths() -> None:
    net = Stack([Layer(), Holds(OLD)])
    paths = [path for path, _ in PythonState(net, ()).cells]
    assert paths == ["Stack", "layers", "layers.0", "layers.0.dense", "layers.1"]


def test_a_cell_that_appears_twice_is_found_once() -> None:
    layer = Holds(OLD)
    assert len(PythonState(Stack([layer, layer]), ()).cells) == 3


def test_small_arrays_and_generators_are_restored() -> None:
    array, generator = np.zeros(2), random.Random(1)
    drawn: list[float] = []

    def forward() -> None:
        array.fill(1)
        drawn.append(generator.random())

    with replay(Holds([array, generator]), forward):
        assert (array == 0).all()
        assert generator.random() == drawn[0]
    assert (array == 1).all()


def test_a_cell_that_runs_without_being_held_is_looked_at_when_it_begins() -> None:
    cell = Holds(OLD)
    state = PythonState(len, ())
    for _ in range(2):
        state.enter(cell)
    Set(cell)()
    state.seal()
    with state.restored():
        assert cell.value is OLD
    assert cell.value is NEW
    assert [path for path, _ in state.cells] == ["Holds"]


# ---- what is left alone


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
