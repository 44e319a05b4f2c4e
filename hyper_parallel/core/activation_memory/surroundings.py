"""What lives outside of a region that is swapped, and is left alone: parameters, tables, masks, gathered weights.

A storage that other code owns must not be moved: that would free nothing, and whoever owns it may free it.

Note: [What code can reach]
Looked at are the attributes of the cells that run, and what their methods and the region's function read: variables
that they close over, defaults, those of their module, of their classes, and of modules and classes that they name.
Plain objects, collections, user's functions and what `functools.lru_cache` holds are followed some levels deep; of a
cell that is found so, only what it holds itself. It is done for every call of a region: both are bounded, and which
variables code reads is worked out once. Functions, classes and modules under a name are taken for good.
"""

import collections
import functools
import gc
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_memory.python_state import is_foreign, methods_of, names_in, slots_of
from hyper_parallel.core.activation_memory.state_holders import CELLS_OWN
from ms_ops.autograd import is_written_cast, mixed_precision_is_on
from ms_ops.cells import all_cells, has_own_precision, own_parameters
from ms_ops.tensors import storage_of

_DEEPEST = 4
_MOST = 1000
"""Items of a collection, and objects, collections and functions in all."""
_KINDS: tuple[tuple[Any, str], ...] = (
    (Parameter, "parameter"),
    (Tensor, "tensor"),
    (nn.Cell, "cell"),
    ((tuple, list, set, frozenset, collections.deque), "items"),
    (dict, "mapping"),
    (types.FunctionType, "function"),
    (types.MethodType, "method"),
    (functools.partial, "partial"),
    (functools._lru_cache_wrapper, "cache"),
    (types.ModuleType, "module"),
    (type, "class"),
    ((types.SimpleNamespace, collections.UserDict, collections.UserList), "object"),
)


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> str:
    """What a value of this class may hold: classes are compared once, since that is slow for MindSpore's."""
    for classes, kind in _KINDS:
        if issubclass(cls, classes):
            return kind
    return "" if is_foreign(cls.__module__) else "object"


def _class_of(value: Any) -> Any:
    """Its class; a type checker takes a class for a key that can't be hashed."""
    return type(value)


class _Reads:
    """Where the values are that code reads: variables that may hold a tensor some time, and what never changes."""

    def __init__(self) -> None:
        self.casts = False
        """Whether there is a cast in the code that mixed precision of level O1 has written into it."""
        self.variables: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.constants: list[Any] = []
        self._seen: set[int] = set()

    def add_function(self, function: types.FunctionType, depth: int = 0) -> None:
        """What it closes over, has by default, or reads from its module."""
        if depth > _DEEPEST or id(function) in self._seen or is_foreign(function.__module__):
            return
        self._seen.add(id(function))
        if depth:  # else whoever asks looks at them: a region's function may be made for one call
            self.constants += function.__closure__ or ()
        self.constants += defaults_of(function)
        self.add_names(function.__globals__, names_in(function.__code__), depth)

    def add_names(self, holder: Mapping[str, Any], names: Collection[str], depth: int) -> None:
        """What code finds under these names."""
        for name in names:
            if name in holder:
                self._add(holder, name, names, depth + 1)

    def _add(self, holder: Mapping[str, Any], name: str, names: Collection[str], depth: int) -> None:
        value = holder[name]
        kind = _kind(_class_of(value))
        self.casts = self.casts or is_written_cast(value)
        if kind == "function":
            self.add_function(value, depth)
        elif kind == "module" or kind == "class":
            if depth <= _DEEPEST and not is_foreign(value.__name__ if kind == "module" else value.__module__):
                for each in [value] if kind == "module" else value.__mro__:
                    self.add_names(vars(each), names, depth)
        elif kind or value is None:  # it may be made later
            self.variables[id(holder), name] = holder, name

    def values(self) -> Iterator[Any]:
        """What is there now."""
        for holder, name in self.variables.values():
            yield holder.get(name)
        for constant in self.constants:
            if isinstance(constant, types.CellType):
                yield from _closed_over((constant,))
            else:
                yield constant


@functools.lru_cache(maxsize=4096)
def _read_by_class(cls: type) -> _Reads:
    """What the methods of a user's cell class read."""
    found = _Reads()
    for function in methods_of(cls):
        found.add_function(function, depth=1)
        for base in cls.__mro__:
            if not is_foreign(base.__module__):
                found.add_names(vars(base), names_in(function.__code__), 1)
    return found


@functools.lru_cache(maxsize=4096)
def _read_by_code(code: types.CodeType, module: "_ById") -> _Reads:
    """What a function with this code reads but closes over."""
    found = _Reads()
    found.add_names(module.value, names_in(code), 0)
    return found


class _ById:
    """A value that is told from others by its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


def defaults_of(function: types.FunctionType) -> list[Any]:
    """The values that its parameters have by default."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


class Surroundings:
    """The tensors that cells hold when a region begins: see Note: [What code can reach].

    Args:
        owner: The cell or function whose code runs.
    """

    def __init__(self, owner: Any) -> None:
        self._parameters: list[Parameter] = []
        self._tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._left = _MOST
        self.casts_frozen_weights = False
        """Whether weights without a gradient may be cast inside, by mixed precision: their history doesn't say so."""
        has_precision = False
        for held in _held_by(owner):
            if not isinstance(held, nn.Cell):
                self._take(held)
                continue
            for cell in all_cells(held):
                self._seen.add(id(cell))
                self._parameters += [weight for weight in own_parameters(cell) if weight is not None]
                self._take_all(_own_attributes(cell), 0)
                reads = _read_by_class(_class_of(cell))
                has_precision = has_precision or reads.casts or has_own_precision(cell)
                if reads.variables or reads.constants:
                    self._take_all(reads.values(), 0)
        if self._parameters and (has_precision or mixed_precision_is_on()):
            self.casts_frozen_weights = any(not weight.requires_grad for weight in self._parameters)

    def take(self, value: Any) -> None:
        """Take the tensors that are held by what the region is called with."""
        self._take(value)

    def _take(self, value: Any, depth: int = 0) -> None:
        """Take the tensors that a value is or holds."""
        kind = _kind(_class_of(value))
        if not kind or depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind == "tensor":
            self._tensors.append(value)
        elif kind == "parameter":
            self._parameters.append(value)
        elif self._left:
            self._left -= 1
            self._take_all(_inside(value, kind), depth)

    def _take_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if _kind(_class_of(value)):
                self._take(value, depth + 1)

    def storages(self) -> dict[int, str]:
        """Where the storages begin, and what a tensor in each of them counts as; waits for the queue. Asked once.

        Nothing is held afterwards: whoever owns it may let go of it before backward.
        """
        found = {storage_of(tensor): "held_bytes" for tensor in self._tensors}
        for parameter in self._parameters:
            found[storage_of(parameter)] = "parameter_bytes"
        found.pop(0, None)
        self._tensors.clear()
        self._parameters.clear()
        self._seen.clear()
        return found


def _held_by(owner: Any) -> Iterator[Any]:
    if isinstance(owner, nn.Cell):
        yield owner
        return
    function = getattr(owner, "__func__", owner)
    this = getattr(owner, "__self__", None)
    if this is not None:
        yield this
        if not isinstance(this, nn.Cell):
            yield from _inside(this, _kind(_class_of(this)))
    if isinstance(function, types.FunctionType):
        yield from _closed_over(function.__closure__ or ())
        yield from defaults_of(function)
        yield from _read_by_code(function.__code__, _ById(function.__globals__)).values()
    else:
        yield function


def _closed_over(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for closed in cells:
        try:
            yield closed.cell_contents
        except ValueError:  # not assigned yet
            continue


def _own_attributes(cell: nn.Cell) -> list[Any]:
    """What a cell has beside parameters, cells, and what every cell has."""
    attributes = vars(cell)
    key = _class_of(cell), len(attributes)
    try:
        return [attributes[name] for name in _added[key]]
    except KeyError:  # none has been looked at, or another one of the class has others, and as many
        added = attributes.keys() - CELLS_OWN
        names = _added[key] = tuple(name for name in added if name != "training" and not name.startswith("_hp_"))
        return [attributes[name] for name in names]


_added: dict[tuple[type, int], tuple[str, ...]] = {}
"""What cells of a class with so many attributes have beside MindSpore's own and ours: looking at names takes long."""


def _inside(value: Any, kind: str) -> Iterable[Any]:
    """What a value holds."""
    if kind == "cell":
        return [*own_parameters(value), *_own_attributes(value)]
    if kind == "method":
        return value.__self__, value.__func__
    if kind == "function":
        found = _closed_over(value.__closure__ or ())
        read = _read_by_code(value.__code__, _ById(value.__globals__)).values()
        return () if is_foreign(value.__module__) else [*found, *defaults_of(value), *read]
    if kind == "partial":
        return value.func, *value.args, *value.keywords.values()
    if kind == "cache":
        return gc.get_referents(value)
    if kind == "items" or kind == "mapping":
        items = value if kind == "items" else value.values()
        return list(items) if len(items) <= _MOST else ()
    if kind != "object":
        return ()
    attributes = getattr(value, "__dict__", {}).values()
    return *attributes, *(getattr(value, name) for name in slots_of(_class_of(value)) if hasattr(value, name))
