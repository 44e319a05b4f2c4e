"""Holders: things of Python that hold values, what they held when a region began, and holding that again."""

import collections
import operator
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_memory.trees import leaves, map_leaves
from ms_ops.autograd import alias, requires_grad

CELLS_OWN = frozenset(vars(nn.Cell())) - {"training"}
"""Attributes that every cell has: MindSpore's own business."""
_ABSENT = object()
_MOST_ITEMS_LOOKED_AT = 100
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

Function = Callable[[Any], Any]


class Holder:
    """Something that holds values, and what it held when the region began."""

    __slots__ = ("before", "owner", "what")

    def __init__(self, owner: Any, what: str) -> None:
        self.owner = owner
        self.what = what
        self.before: Any = None

    def children(self) -> Any:
        """The values that are held, with a name each."""
        return ()

    def seal(self) -> None:
        """The forward has ended."""

    def map(self, function: Function) -> None:
        """Apply `function` to every value that was held."""

    def restore(self) -> Callable[[], None] | None:
        """Hold again what was held; gives what undoes that, if there was anything to do."""
        raise NotImplementedError

    def read(self) -> Any:
        """What is held now, as a copy."""
        raise NotImplementedError

    def changed_since(self, held: Any) -> Any:
        """What is held now, if it isn't what `read` gave before and a replay must know; else None."""
        raise NotImplementedError

    def write(self, changed: Any) -> Callable[[], None]:
        """Hold what `changed_since` gave; gives what undoes that."""
        raise NotImplementedError


class Namespace(Holder):
    """Attributes of a cell or an object, or variables of a module."""

    __slots__ = ("_changed", "_names", "_whole")

    def __init__(self, owner: Any, what: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(owner, what)
        self._names = names
        self._changed: frozenset[str] = frozenset()
        self._whole = False
        self.before = self.read()

    def read(self) -> dict[str, Any]:
        if self._names is None:
            return {name: value for name, value in self.owner.items() if name not in CELLS_OWN}
        return {name: self.owner[name] for name in self._names if name in self.owner}

    def children(self) -> Any:
        return ((f"{self.what}.{name}" if self.what else name, value) for name, value in self.before.items())

    def seal(self) -> None:
        self._changed, self._whole = self._differences(self.before, self.read())

    @staticmethod
    def _differences(before: dict[str, Any], now: dict[str, Any]) -> tuple[frozenset[str], bool]:
        """The names whose values differ, and whether there is data among them."""
        changed = frozenset(
            name for name in {**before, **now} if before.get(name, _ABSENT) is not now.get(name, _ABSENT)
        )
        return changed, any(_is_data(before.get(name)) or _is_data(now.get(name)) for name in changed)

    def changed_since(self, held: Any) -> Any:
        now = self.read()
        changed, has_data = self._differences(held, now)
        return {name: without_history(now.get(name, _ABSENT)) for name in changed} if has_data else None

    def write(self, changed: Any) -> Callable[[], None]:
        now = self.read()
        self._write(changed)
        return lambda: self._write({name: now.get(name, _ABSENT) for name in changed})

    def map(self, function: Function) -> None:
        self.before = {name: function(value) for name, value in self.before.items()}

    def restore(self) -> Callable[[], None] | None:
        now = self.read()
        wanted = {
            name: value
            for name, value in self.before.items()
            if name not in self._changed and now.get(name, _ABSENT) is not value
        }
        if self._whole:  # the replay changes them again, even if they are what they were
            wanted.update((name, self.before.get(name, _ABSENT)) for name in self._changed)
        if not wanted:
            return None
        self._write(wanted)

        def put_back() -> None:
            after = self.read()
            self._write(
                {
                    name: now.get(name, _ABSENT)
                    if name in self._changed or name == "training"
                    else _after_replay(value, now.get(name, _ABSENT), after.get(name, _ABSENT))
                    for name, value in wanted.items()
                }
            )

        return put_back

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is _ABSENT:
                self.owner.pop(name, None)
            else:
                self.owner[name] = value


class Slots(Namespace):
    """Attributes of an object that has them in slots, or variables of a class."""

    __slots__ = ()

    def __init__(self, owner: Any, what: str, names: tuple[str, ...]) -> None:
        super().__init__(owner, what, names)

    def read(self) -> dict[str, Any]:
        values = ((name, getattr(self.owner, name, _ABSENT)) for name in self._names or ())
        return {name: value for name, value in values if value is not _ABSENT}

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is not _ABSENT:
                setattr(self.owner, name, value)
            elif hasattr(self.owner, name):
                delattr(self.owner, name)


class Closed(Holder):
    """A variable that a function closes over."""

    __slots__ = ("_changed", "_holds_data")

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self.read()
        self._changed = self._holds_data = False

    def read(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:  # not bound yet
            return _ABSENT

    def children(self) -> Any:
        return ((self.what, self.before),)

    def seal(self) -> None:
        now = self.read()
        self._changed = now is not self.before
        self._holds_data = self._changed and (_is_data(self.before) or _is_data(now))

    def map(self, function: Function) -> None:
        self.before = function(self.before)

    def restore(self) -> Callable[[], None] | None:
        now, before = self.read(), self.before
        if self._holds_data:  # the replay changes it again, even if it is what it was
            self._write(before)
            return lambda: self._write(now)
        if now is before or before is _ABSENT or self._changed:
            return None
        self.owner.cell_contents = before
        return lambda: self._write(_after_replay(before, now, self.read()))

    def changed_since(self, held: Any) -> Any:
        now = self.read()
        if now is held or not (_is_data(held) or _is_data(now)):
            return None
        return (without_history(now),)

    def write(self, changed: Any) -> Callable[[], None]:
        now = self.read()
        self._write(changed[0])
        return lambda: self._write(now)

    def _write(self, value: Any) -> None:
        if value is _ABSENT:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = value


class Collection(Holder):
    """A list, dict, set or deque."""

    __slots__ = ("_changed", "_holds_tensors")

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self.read()
        self._changed = self._holds_tensors = False

    def read(self) -> Any:
        return dict(self.owner) if isinstance(self.owner, dict) else list(self.owner)

    def children(self) -> Any:
        values = self.before.items() if isinstance(self.before, dict) else enumerate(self.before)
        return ((f"{self.what}[{key!r}]", value) for key, value in values)

    def seal(self) -> None:
        now = self.read()
        self._holds_tensors = any(_is_data(value) for held in (self.before, now) for value in values_of(held))
        self._changed = not _same(self.before, now)

    def map(self, function: Function) -> None:
        if isinstance(self.before, dict):
            self.before = {key: function(value) for key, value in self.before.items()}
        else:
            self.before = [function(value) for value in self.before]

    def restore(self) -> Callable[[], None] | None:
        now = self.read()
        if not self._holds_tensors if self._changed else _same(now, self.before):
            return None
        self._write(self.before)
        return lambda: self._write(now)

    def changed_since(self, held: Any) -> Any:
        now = self.read()
        if _same(held, now) or not any(_is_data(value) for each in (held, now) for value in values_of(each)):
            return None
        if isinstance(now, dict):
            return {key: without_history(value) for key, value in now.items()}
        return [without_history(value) for value in now]

    def write(self, changed: Any) -> Callable[[], None]:
        now = self.read()
        self._write(changed)
        return lambda: self._write(now)

    def _write(self, held: Any) -> None:
        self.owner.clear()
        if isinstance(self.owner, (list, collections.deque)):
            self.owner.extend(held)
        else:
            self.owner.update(held)


class Array(Holder):
    """A numpy array."""

    __slots__ = ("_changed",)

    def __init__(self, owner: np.ndarray, what: str) -> None:
        super().__init__(owner, what)
        self.before = self.read()
        self._changed = False

    def seal(self) -> None:
        self._changed = self.changed_since(self.before) is not None

    def restore(self) -> Callable[[], None] | None:
        return self.write(self.before) if self._changed or self.changed_since(self.before) is not None else None

    def read(self) -> Any:
        return self.owner.copy()

    def changed_since(self, held: Any) -> Any:
        return None if self.owner.tobytes() == held.tobytes() else self.owner.copy()

    def write(self, changed: Any) -> Callable[[], None]:
        now = self.owner.copy()
        self.owner[...] = changed
        return lambda: np.copyto(self.owner, now)


class Generator(Holder):
    """A random generator of numpy's or Python's that isn't the global one."""

    __slots__ = ()

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self.read()

    def read(self) -> Any:
        if isinstance(self.owner, np.random.Generator):
            return self.owner.bit_generator.state
        return self.owner.get_state() if isinstance(self.owner, np.random.RandomState) else self.owner.getstate()

    def restore(self) -> Callable[[], None] | None:
        return self.write(self.before)

    def changed_since(self, held: Any) -> Any:
        return self.read()

    def write(self, changed: Any) -> Callable[[], None]:
        now = self.read()
        self._write(changed)
        return lambda: self._write(now)

    def _write(self, state: Any) -> None:
        if isinstance(self.owner, np.random.Generator):
            self.owner.bit_generator.state = state
        elif isinstance(self.owner, np.random.RandomState):
            self.owner.set_state(state)
        else:
            self.owner.setstate(state)


def _is_data(value: Any, levels: int = 3) -> bool:
    """Whether a value is a tensor or array, or a container or plain object with one in it."""
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    items = _items_of(value) if levels else ()
    return len(items) <= _MOST_ITEMS_LOOKED_AT and any(_is_data(item, levels - 1) for item in items)


def _items_of(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (tuple, list, set, collections.deque)):
        return value
    if isinstance(value, (nn.Cell, type, types.ModuleType)):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _same(one: Any, other: Any) -> bool:
    """Whether two copies of a collection hold the same objects."""
    keys_too = not isinstance(one, dict) or list(one) == list(other)
    return len(one) == len(other) and keys_too and all(map(operator.is_, values_of(one), values_of(other)))


def _after_replay(before: Any, now: Any, after: Any) -> Any:
    """What a variable is after a replay that began with `before` instead of `now` and left it as `after`.

    What the forward leaves alone, a replay may still count: `if is_recomputing(): replays += 1`.
    """
    if after is before or _is_data(before) or _is_data(now):
        return now
    if all(type(value) in (int, float) for value in (before, now, after)):
        return now + (after - before)
    return after


def values_of(held: Any) -> Any:
    """The values of a copy of a collection."""
    return held.values() if isinstance(held, dict) else held


def without_history(value: Any) -> Any:
    """A result of an operator would keep its graph while it waits."""
    if isinstance(value, Tensor):
        tracked = not isinstance(value, Parameter) and requires_grad(value)
        return alias(value, tracked=True) if tracked else value
    if not isinstance(value, tuple) or not _is_data(value):
        return value
    mapped = map_leaves(without_history, value)
    return mapped if any(map(operator.is_not, leaves(mapped), leaves(value))) else value
