"""`PythonState`: what the Python code of a region may change besides tensors' bytes, as it is when the region begins.

A replay runs the code again, so that a cache would grow twice and a hidden state be read one step late. What holds
tensors is therefore looked at when the forward begins, put back for the replay, and afterwards is what it was before
the replay: attributes of the cells inside and of plain objects that they or the arguments hold, lists, dicts and sets in
them, variables that a function closes over or reads from its module, small numpy arrays, generators, and `training`.

Plain Python values are left alone: a counter counts replays, too, as everybody expects of recomputation, and one that
changes what is computed is caught by the comparison of operators (`register_state_provider` puts it back). They are
put back only beside a tensor that the forward has changed in the same object. Left alone, too: a list that a function
closes over or reads from its module (it is there to look at what runs), cells that run once, what the standard library and
MindSpore define, collections of more than `_MOST_ITEMS`, arrays of more than `_MOST_BYTES`.
"""

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.ops import Primitive

from hyper_parallel.core.activation_memory.spec import spec_of
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.autograd import alias, is_parameter, requires_grad
from ms_ops.tensors import copy_of

_MOST_ITEMS = 1000
_MOST_BYTES = 1 << 16
_CELLS_OWN = frozenset(vars(nn.Cell())) - {"training"}
"""Attributes that every cell has: MindSpore's own business."""
_ABSENT = object()
_COLLECTIONS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"builtins", "mindspore", "numpy", "hyper_parallel", "ms_ops"}
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, Primitive)
"""What a module is made of, and what no code changes."""

Function = Callable[[Any], Any]


class _Holder:
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


class _Namespace(_Holder):
    """Attributes of a cell or an object, or variables of a module."""

    __slots__ = ("_changed", "_names", "_whole")

    def __init__(self, owner: dict[str, Any], what: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(owner, what)
        self._names = names
        self._changed: frozenset[str] = frozenset()
        self._whole = False
        self.before = self._read()

    def _read(self) -> dict[str, Any]:
        if self._names is None:
            return {name: value for name, value in self.owner.items() if name not in _CELLS_OWN}
        return {name: self.owner[name] for name in self._names if name in self.owner}

    def children(self) -> Any:
        return ((f"{self.what}.{name}" if self.what else name, value) for name, value in self.before.items())

    def seal(self) -> None:
        now, before = self._read(), self.before
        self._changed = frozenset(
            name for name in {**before, **now} if before.get(name, _ABSENT) is not now.get(name, _ABSENT)
        )
        self._whole = any(_is_data(before.get(name)) or _is_data(now.get(name)) for name in self._changed)

    def map(self, function: Function) -> None:
        self.before = {name: function(value) for name, value in self.before.items()}

    def restore(self) -> Callable[[], None] | None:
        now = self._read()
        wanted = {name: self.before.get(name, _ABSENT) for name in self._changed} if self._whole else {}
        for name, value in self.before.items():
            if name not in self._changed and (name == "training" or _is_data(value)):
                wanted[name] = value
        differs = {name: value for name, value in wanted.items() if now.get(name, _ABSENT) is not value}
        if not differs:
            return None
        self._write(differs)
        return lambda: self._write({name: now.get(name, _ABSENT) for name in differs})

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is _ABSENT:
                self.owner.pop(name, None)
            else:
                self.owner[name] = value


class _Closed(_Holder):
    """A variable that a function closes over."""

    __slots__ = ()

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self._read()

    def _read(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:  # not bound yet
            return _ABSENT

    def children(self) -> Any:
        return ((self.what, self.before),)

    def map(self, function: Function) -> None:
        self.before = function(self.before)

    def restore(self) -> Callable[[], None] | None:
        now, before = self._read(), self.before
        if now is before or not _is_data(before):
            return None
        self.owner.cell_contents = before
        return lambda: setattr(self.owner, "cell_contents", now)


class _Collection(_Holder):
    __slots__ = ("_holds_tensors",)

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self._read()
        self._holds_tensors = False

    def _read(self) -> Any:
        return dict(self.owner) if isinstance(self.owner, dict) else list(self.owner)

    def children(self) -> Any:
        values = self.before.items() if isinstance(self.before, dict) else enumerate(self.before)
        return ((f"{self.what}[{key!r}]", value) for key, value in values)

    def seal(self) -> None:
        self._holds_tensors = any(_is_data(value) for held in (self.before, self._read()) for value in _values(held))

    def map(self, function: Function) -> None:
        if isinstance(self.before, dict):
            self.before = {key: function(value) for key, value in self.before.items()}
        else:
            self.before = [function(value) for value in self.before]

    def restore(self) -> Callable[[], None] | None:
        if not self._holds_tensors:
            return None
        now = self._read()
        self._write(self.before)
        return lambda: self._write(now)

    def _write(self, held: Any) -> None:
        self.owner.clear()
        if isinstance(self.owner, (list, collections.deque)):
            self.owner.extend(held)
        else:
            self.owner.update(held)


class _Array(_Holder):
    __slots__ = ()

    def __init__(self, owner: np.ndarray, what: str) -> None:
        super().__init__(owner, what)
        self.before = owner.copy()

    def restore(self) -> Callable[[], None] | None:
        if self.owner.tobytes() == self.before.tobytes():
            return None
        now = self.owner.copy()
        self.owner[...] = self.before
        return lambda: np.copyto(self.owner, now)


class _Generator(_Holder):
    """A random generator of numpy's or Python's that isn't the global one."""

    __slots__ = ()

    def __init__(self, owner: Any, what: str) -> None:
        super().__init__(owner, what)
        self.before = self._read()

    def _read(self) -> Any:
        if isinstance(self.owner, np.random.Generator):
            return self.owner.bit_generator.state
        return self.owner.get_state() if isinstance(self.owner, np.random.RandomState) else self.owner.getstate()

    def restore(self) -> Callable[[], None] | None:
        now = self._read()
        self._write(self.before)
        return lambda: self._write(now)

    def _write(self, state: Any) -> None:
        if isinstance(self.owner, np.random.Generator):
            self.owner.bit_generator.state = state
        elif isinstance(self.owner, np.random.RandomState):
            self.owner.set_state(state)
        else:
            self.owner.setstate(state)


def _is_data(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _values(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


def _without_history(value: Any) -> Any:
    """A result of an operator would keep its graph while it waits."""
    tracked = isinstance(value, Tensor) and not isinstance(value, Parameter) and requires_grad(value)
    return alias(value, tracked=True) if tracked else value


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those defined inside it may read from their module."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _methods_of(cls: type) -> tuple[types.FunctionType, ...]:
    """What a user's cell class defines, below MindSpore's own classes."""
    found: dict[types.FunctionType, None] = {}
    for base in cls.__mro__:
        if not _is_foreign(base.__module__):
            for value in vars(base).values():
                function = getattr(value, "_hp_region", value)  # what our own construct stands before
                if isinstance(function, types.FunctionType):
                    found[function] = None
    return tuple(found)


def _is_foreign(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _FOREIGN


class PythonState:
    """What the code of a region can reach and change.

    Args:
        owner: The cell or callable whose code runs.
        arguments: Objects that it is called with, with a name each.
    """

    __slots__ = ("_holders", "_seen", "cells", "tensors")

    def __init__(self, owner: Any, arguments: Any) -> None:
        self._holders: list[_Holder] = []
        self._seen: set[int] = set()
        self.cells: list[nn.Cell] = []
        """The cells that run inside."""
        self.tensors: list[tuple[str, Tensor]] = []
        """The tensors that were found, with where: attributes, closed-over variables, items."""
        self._visit("", owner)
        for what, value in arguments:
            self._visit(what, value)

    def seal(self) -> None:
        """The forward has ended: see what it changed."""
        for holder in self._holders:
            holder.seal()
            holder.map(_without_history)
        self.tensors.clear()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was, inside; as it is, afterwards."""
        undo = []
        try:
            for holder in self._holders:
                undo.append(holder.restore())
            yield
        finally:
            for put_back in reversed(undo):
                if put_back is not None:
                    put_back()

    def rescue(self, written: Written) -> None:
        """The region itself is about to write a tensor that waits here: keep a copy."""

        def rescued(value: Any) -> Any:
            found = isinstance(value, Tensor) and not is_parameter(value) and written.reaches(value)
            return copy_of(value) if found else value

        for holder in self._holders:
            holder.map(rescued)

    def _visit(self, what: str, value: Any) -> None:
        kind = type(value)
        if kind in (int, float, bool, str, type(None)) or id(value) in self._seen or isinstance(value, _FIXED):
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            self.tensors.append((what, value))
        elif isinstance(value, nn.Cell):
            self._visit_cell(what, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit(what, value.__self__)
            if not isinstance(value.__self__, nn.Cell):
                self._visit(what, value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(what, part)
        elif kind is tuple:
            self._seen.add(id(value))
            for index, item in enumerate(value):
                self._visit(f"{what}[{index}]", item)
        else:
            self._visit_object(what, value, kind)

    def _visit_object(self, what: str, value: Any, kind: type) -> None:
        self._seen.add(id(value))
        if kind in _COLLECTIONS:
            if len(value) <= _MOST_ITEMS:
                self._hold(_Collection(value, what))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.flags.writeable and not value.dtype.hasobject:
                self._hold(_Array(value, what))
        elif isinstance(value, _GENERATORS):
            self._hold(_Generator(value, what))
        elif hasattr(value, "__dict__") and not _is_foreign(kind.__module__):
            self._hold(_Namespace(value.__dict__, what))

    def _visit_cell(self, what: str, cell: nn.Cell) -> None:
        self._seen.add(id(cell))
        spec = spec_of(cell)
        if self.cells and spec is not None and (spec.policy.saves or spec.policy.swaps):
            return  # runs once
        self.cells.append(cell)
        self._hold(_Namespace(cell.__dict__, what or type(cell).__name__))
        for name, child in cell._cells.items():
            if child is not None and id(child) not in self._seen:
                self._visit_cell(f"{what}.{name}" if what else name, child)
        for method in _methods_of(cell.__class__):
            self._visit_function(method)

    def _visit_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or _is_foreign(function.__module__):
            return
        self._seen.add(id(function))
        for name, closed in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(closed) not in self._seen:
                self._seen.add(id(closed))
                self._hold(_Closed(closed, name), collections_too=False)
        module, names = function.__globals__, []
        for name in _names_in(function.__code__):
            value = module.get(name, _ABSENT)
            if isinstance(value, types.FunctionType):
                self._visit_function(value)
            elif value is not _ABSENT and not isinstance(value, _FIXED):
                names.append(name)
        if names:
            self._hold(_Namespace(module, "", tuple(names)), collections_too=False)

    def _hold(self, holder: _Holder, collections_too: bool = True) -> None:
        self._holders.append(holder)
        for what, value in holder.children():
            if collections_too or type(value) not in _COLLECTIONS:
                self._visit(what, value)
            elif len(value) <= _MOST_ITEMS:
                for item in _values(value):
                    self._visit(what, item)
