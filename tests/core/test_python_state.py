"""`PythonState`: what the code of a region can reach is what a replay begins with."""

import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.python_state import PythonState
from tests.core.python_things import NEW, OLD, Holds, Record, Set, Slotted, Thing, found, replay
from tests.helpers import RECOMPUTE, Layer, Stack, on

of_the_module: Any = OLD
elsewhere: Any = OLD


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
