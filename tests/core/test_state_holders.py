"""Holders: what a region's code may have changed is held again for a replay, and put back after it."""

import collections
import contextlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.activation_memory.state_holders import (
    Array,
    Closed,
    Collection,
    Generator,
    Holder,
    Namespace,
    without_history,
)
from ms_ops.autograd import requires_grad
from tests.helpers import numbers

OLD, NEW, NEWER = (numbers(2, seed=seed) for seed in range(3))


@contextlib.contextmanager
def replay(holder: Holder, forward: Callable[[], Any] = lambda: None, after: Any = lambda: None) -> Iterator[None]:
    """Change things as a forward does, and then as what runs after it does; inside is the replay."""
    forward()
    holder.seal()
    after()
    undo = holder.restore()
    try:
        yield
    finally:
        if undo is not None:
            undo()


# ---- attributes


class Thing:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_an_attribute_with_another_tensor_is_restored_and_put_back() -> None:
    thing = Thing(h=OLD)
    with replay(Namespace(thing.__dict__, "thing"), lambda: setattr(thing, "h", NEW)):
        assert thing.h is OLD
    assert thing.h is NEW


def test_a_tensor_that_is_exchanged_after_the_forward_is_restored_too() -> None:
    thing = Thing(h=OLD)
    with replay(Namespace(thing.__dict__, "thing"), after=lambda: setattr(thing, "h", NEW)):
        assert thing.h is OLD
    assert thing.h is NEW


def test_an_attribute_that_the_forward_made_is_not_there_for_the_replay() -> None:
    thing = Thing()
    with replay(Namespace(thing.__dict__, "thing"), lambda: setattr(thing, "h", NEW)):
        assert not hasattr(thing, "h")
    assert thing.h is NEW


def test_an_attribute_that_the_forward_deleted_is_there_for_the_replay() -> None:
    thing = Thing(h=OLD)
    with replay(Namespace(thing.__dict__, "thing"), lambda: delattr(thing, "h")):
        assert thing.h is OLD
    assert not hasattr(thing, "h")


def test_an_attribute_that_a_replay_makes_is_left_to_it() -> None:
    thing = Thing(h=OLD)
    with replay(Namespace(thing.__dict__, "thing"), lambda: setattr(thing, "h", NEW)):
        thing.other = 3
    assert (thing.h is NEW, thing.other) == (True, 3)


def test_a_plain_attribute_that_is_exchanged_after_the_forward_is_restored() -> None:
    thing = Thing(scale="old")
    with replay(Namespace(thing.__dict__, "thing"), after=lambda: setattr(thing, "scale", "new")):
        assert thing.scale == "old"
    assert thing.scale == "new"


def test_what_a_replay_counts_is_added_to_what_was_counted_meanwhile() -> None:
    thing = Thing(replays=1)
    with replay(Namespace(thing.__dict__, "thing"), after=lambda: setattr(thing, "replays", 5)):
        thing.replays += 2
    assert thing.replays == 7


def test_what_a_replay_says_otherwise_is_what_is_there_afterwards() -> None:
    thing = Thing(said="old")
    with replay(Namespace(thing.__dict__, "thing"), after=lambda: setattr(thing, "said", "new")):
        thing.said = "by the replay"
    assert thing.said == "by the replay"


def test_a_plain_attribute_that_the_forward_changes_is_left_alone() -> None:
    thing = Thing(count=0)
    with replay(Namespace(thing.__dict__, "thing"), lambda: setattr(thing, "count", 1)):
        assert thing.count == 1
    assert thing.count == 1


def test_a_plain_attribute_beside_a_tensor_that_changed_is_restored_with_it() -> None:
    thing = Thing(h=OLD, step=0)
    with replay(Namespace(thing.__dict__, "thing"), lambda: thing.__dict__.update(h=NEW, step=1)):
        assert (thing.h is OLD, thing.step) == (True, 0)
    assert (thing.h is NEW, thing.step) == (True, 1)


def test_a_plain_attribute_beside_a_tensor_that_stayed_is_left_alone() -> None:
    thing = Thing(h=OLD, count=0)
    with replay(Namespace(thing.__dict__, "thing"), lambda: setattr(thing, "count", 1)):
        assert (thing.h is OLD, thing.count) == (True, 1)


def test_training_is_what_it_was_in_the_forward() -> None:
    cell = nn.Cell()
    cell.set_train()
    with replay(Namespace(cell.__dict__, "cell"), after=lambda: cell.set_train(False)):
        assert cell.training
    assert not cell.training


def test_what_every_cell_has_is_left_to_mindspore() -> None:
    cell = nn.Cell()
    holder = Namespace(cell.__dict__, "cell")
    assert holder.before.keys() == {"training"}
    with replay(holder, after=lambda: cell.set_grad()):
        assert cell.requires_grad


def test_nothing_is_done_where_nothing_changed() -> None:
    thing = Thing(h=OLD, count=0)
    holder = Namespace(thing.__dict__, "thing")
    holder.seal()
    assert holder.restore() is None


def test_attributes_have_names_below_their_owners() -> None:
    holder = Namespace({"h": OLD, "n": 3}, "layers.0")
    assert list(holder.children()) == [("layers.0.h", OLD), ("layers.0.n", 3)]


def test_of_a_module_only_the_given_names_are_held() -> None:
    module = {"h": OLD, "other": OLD}
    holder = Namespace(module, "", ("h", "missing"))
    assert list(holder.children()) == [("h", OLD)]
    with replay(holder, lambda: module.update(h=NEW, other=NEW)):
        assert (module["h"] is OLD, module["other"] is NEW) == (True, True)
    assert module["h"] is NEW


# ---- variables that a function closes over


def closing_over(value: Any) -> tuple[Any, Callable[[], Any], Callable[[Any], None]]:
    """The cell of a variable, and functions that read and write it."""

    def read() -> Any:
        return value

    def write(new: Any) -> None:
        nonlocal value
        value = new

    return read.__closure__[0], read, write


def test_a_closed_over_tensor_is_restored_and_put_back() -> None:
    cell, read, write = closing_over(OLD)
    with replay(Closed(cell, "value"), lambda: write(NEW)):
        assert read() is OLD
    assert read() is NEW


def test_a_closed_over_plain_value_that_changes_after_the_forward_is_restored() -> None:
    cell, read, write = closing_over(0)
    with replay(Closed(cell, "value"), after=lambda: write(3)):
        assert read() == 0
    assert read() == 3


def test_a_closed_over_count_of_a_replay_is_added() -> None:
    cell, read, write = closing_over(0)
    with replay(Closed(cell, "value"), after=lambda: write(3)):
        write(read() + 1)
    assert read() == 4


def test_a_closed_over_plain_value_that_the_forward_changes_is_left_alone() -> None:
    cell, read, write = closing_over(0)
    with replay(Closed(cell, "value"), lambda: write(1)):
        assert read() == 1
    assert read() == 1


def test_a_closed_over_variable_is_named() -> None:
    cell, _, _ = closing_over(OLD)
    assert list(Closed(cell, "value").children()) == [("value", OLD)]


def test_a_closed_over_variable_that_is_not_bound_yet_is_left_alone() -> None:
    cell = types.CellType()
    with replay(Closed(cell, "late")):
        cell.cell_contents = NEW
    assert cell.cell_contents is NEW


# ---- collections

COLLECTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [OLD, 1], lambda held: held.append(NEW)),
    "an item of a list": (lambda: [OLD, 1], lambda held: held.__setitem__(0, NEW)),
    "a list that is emptied": (lambda: [OLD, 1], lambda held: held.clear()),
    "dict": (lambda: {"a": OLD}, lambda held: held.update(a=NEW, b=NEW)),
    "OrderedDict": (lambda: collections.OrderedDict(a=OLD, b=1), lambda held: held.move_to_end("a")),
    "defaultdict": (lambda: collections.defaultdict(list, a=OLD), lambda held: held["b"]),
    "set": (lambda: {OLD, 1}, lambda held: held.add(NEW)),
    "deque": (lambda: collections.deque([OLD, NEW], maxlen=2), lambda held: held.append(NEWER)),
}


def items(held: Any) -> list[Any]:
    found = held.items() if isinstance(held, dict) else sorted(held, key=id) if isinstance(held, set) else held
    return [tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in found]


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_a_collection_that_holds_tensors_is_restored_and_put_back(kind: str) -> None:
    make, change = COLLECTIONS[kind]
    held, after = make(), []
    before = items(held)
    with replay(Collection(held, "held"), lambda: (change(held), after.extend(items(held)))):
        assert items(held) == before != after
    assert items(held) == after


def test_what_a_replay_adds_to_a_collection_is_dropped() -> None:
    held = [OLD]
    with replay(Collection(held, "held"), lambda: held.append(NEW)):
        held.append(NEWER)
        assert items(held) == items([OLD, NEWER])
    assert items(held) == items([OLD, NEW])


@pytest.mark.parametrize("held", [[1, 2], {"a": 1}, {1, 2}], ids=["list", "dict", "set"])
def test_a_collection_of_plain_values_that_changes_after_the_forward_is_restored(held: Any) -> None:
    before = items(held)
    with replay(Collection(held, "held"), after=held.clear):
        assert items(held) == before
    assert len(held) == 0


def test_a_dict_whose_keys_are_exchanged_has_changed() -> None:
    held = {"a": OLD}
    with replay(Collection(held, "held"), after=lambda: (held.pop("a"), held.update(b=OLD))):
        assert list(held) == ["a"]
    assert list(held) == ["b"]


def test_a_collection_of_plain_values_that_the_forward_changes_is_left_alone() -> None:
    held = [1, 2]
    holder = Collection(held, "held")
    held.append(3)
    holder.seal()
    assert holder.restore() is None


def test_a_collection_that_got_its_first_tensor_in_the_forward_is_restored() -> None:
    held: list[Any] = []
    with replay(Collection(held, "held"), lambda: held.append(NEW)):
        assert held == []
    assert items(held) == items([NEW])


def test_a_deque_keeps_its_length_limit() -> None:
    held = collections.deque([OLD], maxlen=1)
    with replay(Collection(held, "held"), lambda: held.append(NEW)):
        assert held.maxlen == 1
    assert held.maxlen == 1


def test_items_are_named_by_index_or_key() -> None:
    assert list(Collection([OLD], "cache").children()) == [("cache[0]", OLD)]
    assert list(Collection({"k": OLD}, "cache").children()) == [("cache['k']", OLD)]


# ---- arrays and generators


def test_an_array_is_restored_and_put_back() -> None:
    array = np.zeros(3)
    with replay(Array(array, "array"), lambda: array.fill(1)):
        assert (array == 0).all()
        array.fill(5)
    assert (array == 1).all()


def test_an_array_that_did_not_change_is_left_alone() -> None:
    holder = Array(np.full(2, np.nan), "array")
    assert holder.restore() is None


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "numpy.random.Generator": (lambda: np.random.default_rng(1), lambda g: g.random()),
    "numpy.random.RandomState": (lambda: np.random.RandomState(1), lambda g: g.rand()),
    "random.Random": (lambda: random.Random(1), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_draws_in_the_replay_what_it_drew_in_the_forward(kind: str) -> None:
    make, draw = GENERATORS[kind]
    generator, drawn = make(), []
    with replay(Generator(generator, "generator"), lambda: drawn.append(draw(generator))):
        assert draw(generator) == drawn[0]
        draw(generator)
    twin = make()
    draw(twin)
    assert draw(generator) == draw(twin)


# ---- what waits


@pytest.mark.parametrize(
    "make",
    [
        lambda held: Namespace({"h": held}, ""),
        lambda held: Collection([held], ""),
        lambda held: Collection({"h": held}, ""),
        lambda held: Closed(closing_over(held)[0], ""),
    ],
    ids=["attribute", "list", "dict", "closed-over"],
)
def test_what_is_held_can_be_exchanged(make: Callable[[Any], Holder]) -> None:
    holder = make(OLD)
    holder.map(lambda value: NEW if value is OLD else value)
    held = holder.before
    assert (held if isinstance(held, Tensor) else next(iter(held.values() if isinstance(held, dict) else held))) is NEW


@pytest.mark.parametrize("make", [lambda: Array(np.zeros(1), ""), lambda: Generator(random.Random(1), "")])
def test_arrays_and_generators_hold_no_tensors(make: Callable[[], Holder]) -> None:
    holder = make()
    holder.map(lambda value: NEW)
    holder.seal()
    assert list(holder.children()) == []


def test_a_result_waits_as_a_leaf_without_its_history() -> None:
    seen: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        waits = without_history(y)
        seen.extend([waits is y, requires_grad(waits), np.array_equal(waits.asnumpy(), y.asnumpy())])
        return y

    ms.grad(forward)(numbers(2))
    assert seen == [False, True, True]


@pytest.mark.parametrize("value", [numbers(2), Parameter(numbers(2), name="p"), 3, None])
def test_what_has_no_history_waits_as_itself(value: Any) -> None:
    assert without_history(value) is value
