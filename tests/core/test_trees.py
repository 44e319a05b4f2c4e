"""`map_leaves` on nested containers."""

import collections
import dataclasses
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.activation_memory.trees import map_leaves


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    """A frozen dataclass."""

    value: Any
    other: Any


@dataclasses.dataclass
class Prepared:
    """A dataclass whose fields aren't its constructor's arguments."""

    scale: dataclasses.InitVar[int]
    value: Any
    scaled: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self, scale: int) -> None:
        self.scaled = self.value * scale


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass without a __dict__."""

    value: Any


leaves = st.integers() | st.none() | st.text(max_size=2) | st.just(Record)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner, inner)
    ),
    max_leaves=12,
)


def types_of(tree: Any) -> Any:
    if isinstance(tree, Record):
        return (Record, types_of(tree.value), types_of(tree.other))
    if isinstance(tree, dict):
        return (dict, [(key, types_of(value)) for key, value in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree), [types_of(item) for item in tree])
    return type(tree)


@given(trees)
def test_the_identity_gives_an_equal_tree_of_the_same_types(tree: Any) -> None:
    same = map_leaves(lambda leaf: leaf, tree)
    assert same == tree
    assert types_of(same) == types_of(tree)


@given(trees)
def test_leaves_are_visited_in_the_same_order_each_time(tree: Any) -> None:
    first: list[Any] = []
    second: list[Any] = []
    copied = map_leaves(lambda leaf: first.append(leaf) or leaf, tree)
    map_leaves(lambda leaf: second.append(leaf) or leaf, copied)
    assert first == second


@given(st.lists(st.integers(), max_size=5))
def test_the_function_is_applied_to_every_leaf_once(numbers: list[int]) -> None:
    tree = {"a": Pair(numbers, tuple(numbers)), "b": [Record(numbers, None)]}
    expected = [number + 1 for number in numbers]
    result = map_leaves(lambda leaf: leaf if leaf is None else leaf + 1, tree)
    assert result == {"a": Pair(expected, tuple(expected)), "b": [Record(expected, None)]}


def test_containers_are_copied() -> None:
    tree = ([1], {"k": [2]})
    copied = map_leaves(lambda leaf: leaf, tree)
    tree[0].append(9)
    tree[1]["k"].append(9)
    assert copied == ([1], {"k": [2]})


def test_a_container_with_behaviour_of_its_own_is_a_leaf() -> None:
    ordered = collections.OrderedDict(a=[1])
    assert map_leaves(lambda leaf: leaf, ordered) is ordered


def test_the_constructor_of_a_dataclass_does_not_run_again() -> None:
    copied = map_leaves(lambda leaf: leaf + 1, Prepared(10, 2))
    assert (copied.value, copied.scaled) == (3, 21)
    assert not hasattr(copied, "unset")


def test_a_dataclass_with_slots_is_copied() -> None:
    assert map_leaves(lambda leaf: leaf + 1, Slotted([1, 2])) == Slotted([2, 3])


def test_a_dataclass_itself_is_a_leaf() -> None:
    assert map_leaves(lambda leaf: leaf, Record) is Record
