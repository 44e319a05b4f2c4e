"""`PythonState`: what the Python code of a region may change besides tensors' bytes, as it is when the region begins.

A replay runs the code again, so that a cache would grow twice, a hidden state be read one step late, and a loop
variable that a lambda closes over be that of the last turn. What the code can reach is therefore looked at when the
forward begins and put back for the replay, and afterwards is what it was before the replay: attributes of the cells
that run (`training`, too) and of plain objects that they or the arguments hold, lists, dicts and sets in them,
variables that a function closes over or reads from its module, small numpy arrays, and generators.

One thing is left alone: plain Python values that the forward itself changes, and lists and dicts of them. A counter
counts replays, too, as everybody expects of recomputation, and one that changes what is computed is caught by the
comparison of operators (`register_state_provider` puts it back). Beside a tensor that the forward has changed in the
same object they are put back. Not followed: lists that a function closes over or reads from its module (they are there
to look at what runs), cells that run once, what the standard library and MindSpore define, collections of more than
`_MOST_ITEMS`, arrays of more than `_MOST_BYTES`.
"""

import collections
import contextlib
import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.ops import Primitive

from hyper_parallel.core.activation_memory.spec import spec_of
from hyper_parallel.core.activation_memory.state_holders import (
    GENERATORS,
    Array,
    Closed,
    Collection,
    Generator,
    Holder,
    Namespace,
    Slots,
    values_of,
    without_history,
)
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.autograd import is_parameter
from ms_ops.tensors import copy_of

_MOST_ITEMS = 1000
_MOST_BYTES = 1 << 16
_ABSENT = object()
_COLLECTIONS = (list, dict, set, collections.deque)
_PLAIN_OBJECTS = (types.SimpleNamespace, collections.UserDict, collections.UserList)
"""Classes of the standard library whose instances are what a user puts into them."""
_FOREIGN = frozenset(sys.stdlib_module_names) | {"builtins", "mindspore", "numpy", "hyper_parallel", "ms_ops"}
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType, Primitive)
"""What a module is made of, and what no code changes."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those defined inside it may read from their module."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_in(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def methods_of(cls: type) -> tuple[types.FunctionType, ...]:
    """What a user's cell class defines, below MindSpore's own classes."""
    found: dict[types.FunctionType, None] = {}
    for base in cls.__mro__:
        if not is_foreign(base.__module__):
            for value in vars(base).values():
                function = getattr(value, "_hp_region", value)  # what our own construct stands before
                if isinstance(function, types.FunctionType):
                    found[function] = None
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def slots_of(cls: type) -> tuple[str, ...]:
    """Names of the attributes that a user's class has in slots."""
    return tuple(
        name
        for base in cls.__mro__
        if not is_foreign(base.__module__)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    )


def _is_variable(name: str, value: Any) -> bool:
    """Whether this is a variable of a class, not part of what the class is."""
    is_private = name.startswith(("__", "_abc_", "_hp_"))
    return not is_private and not callable(value) and not hasattr(type(value), "__get__")


def is_foreign(module: str | None) -> bool:
    """Whether a module is none of the user's: of the standard library, MindSpore, numpy or this library."""
    return module is not None and module.partition(".")[0] in _FOREIGN


class PythonState:
    """What the code of a region can reach and change.

    Args:
        owner: The cell or callable whose code runs.
        arguments: Objects that it is called with, with a name each.
    """

    __slots__ = ("_seen", "cells", "holders", "tensors")

    def __init__(self, owner: Any, arguments: Any) -> None:
        self.holders: list[Holder] = []
        """Whatever holds something that the code can reach."""
        self._seen: set[int] = set()
        self.cells: list[tuple[str, nn.Cell]] = []
        """The cells that run inside, with their paths below the owner."""
        self.tensors: list[tuple[str, Tensor]] = []
        """The tensors that were found, with where: attributes, closed-over variables, items."""
        if isinstance(owner, nn.Cell):
            self._visit_tree("", owner)
        else:
            self._visit("", owner)
        for what, value in arguments:
            self._visit(what, value)

    def seal(self) -> None:
        """The forward has ended: see what it changed."""
        for holder in self.holders:
            holder.seal()
            holder.map(without_history)
        self.tensors.clear()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was, inside; as it is, afterwards."""
        with contextlib.ExitStack() as after:
            for holder in self.holders:
                put_back = holder.restore()
                if put_back is not None:
                    after.callback(put_back)
            yield

    def rescue(self, written: Written) -> None:
        """The region itself is about to write a tensor that waits here: keep a copy."""

        def rescued(value: Any) -> Any:
            found = isinstance(value, Tensor) and not is_parameter(value) and written.reaches(value)
            return copy_of(value) if found else value

        for holder in self.holders:
            holder.map(rescued)

    def _visit(self, what: str, value: Any) -> None:
        kind = type(value)
        if kind is types.BuiltinMethodType and isinstance(value.__self__, GENERATORS):
            value, kind = value.__self__, type(value.__self__)  # `draw = generator.random`
        if kind in (int, float, bool, str, type(None)) or id(value) in self._seen or isinstance(value, _FIXED):
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            self.tensors.append((what, value))
        elif isinstance(value, nn.Cell):
            self.enter(value, what)
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
        if isinstance(value, _COLLECTIONS):
            if len(value) <= _MOST_ITEMS:
                self._hold(Collection(value, what))
            if hasattr(value, "__dict__"):
                self._hold(Namespace(value.__dict__, what))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.flags.writeable and not value.dtype.hasobject:
                self._hold(Array(value, what))
        elif isinstance(value, GENERATORS):
            self._hold(Generator(value, what))
        elif isinstance(value, threading.local):
            return  # of every thread its own: its owner registers it
        elif isinstance(value, _PLAIN_OBJECTS):
            self._hold(Namespace(value.__dict__, what))
        elif not is_foreign(kind.__module__):
            self._visit_classes(kind)
            if hasattr(value, "__dict__"):
                self._hold(Namespace(value.__dict__, what))
            slots = slots_of(kind)
            if slots:
                self._hold(Slots(value, what, slots))

    def _visit_classes(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and not is_foreign(base.__module__):
                self._seen.add(id(base))
                names = tuple(name for name, value in vars(base).items() if _is_variable(name, value))
                if names:
                    self._hold(Slots(base, base.__name__, names), collections_too=False)

    def enter(self, cell: nn.Cell, what: str = "", runs_again: bool = False) -> None:
        """A cell is found, or is about to run: look at it, not at those inside, which may never run.

        Args:
            cell: The cell.
            what: Its path.
            runs_again: The replay will run it, whatever its policy: inside a gradient that the region takes.
        """
        if id(cell) in self._seen:
            return
        spec = spec_of(cell)
        if self.cells and spec is not None and (spec.policy.saves or spec.policy.swaps) and not runs_again:
            return  # runs once
        self._seen.add(id(cell))
        self.cells.append((what or type(cell).__name__, cell))
        names = ("training",) if is_foreign(type(cell).__module__) else None
        self._hold(Namespace(cell.__dict__, what or type(cell).__name__, names))
        self._visit_classes(type(cell))
        for method in methods_of(cell.__class__):
            self._visit_function(method)

    def _visit_tree(self, what: str, cell: nn.Cell) -> None:
        count = len(self.cells)
        self.enter(cell, what)
        if len(self.cells) == count:
            return
        for name, child in cell._cells.items():
            if child is not None:
                self._visit_tree(f"{what}.{name}" if what else name, child)

    def _visit_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or is_foreign(function.__module__):
            return
        self._seen.add(id(function))
        for name, closed in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(closed) not in self._seen:
                self._seen.add(id(closed))
                self._hold(Closed(closed, name), collections_too=False)
        module, names = function.__globals__, []
        for name in names_in(function.__code__):
            value = module.get(name, _ABSENT)
            if isinstance(value, types.FunctionType):
                self._visit_function(value)
            elif isinstance(value, types.BuiltinMethodType):
                self._visit(name, value)
            elif value is not _ABSENT and not isinstance(value, _FIXED):
                names.append(name)
        if names:
            self._hold(Namespace(module, "", tuple(names)), collections_too=False)

    def _hold(self, holder: Holder, collections_too: bool = True) -> None:
        self.holders.append(holder)
        for what, value in holder.children():
            if collections_too or not isinstance(value, _COLLECTIONS):
                self._visit(what, value)
            elif len(value) <= _MOST_ITEMS:
                for item in values_of(value):
                    self._visit(what, item)
