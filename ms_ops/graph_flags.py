"""Flags on cells and Primitives that MindSpore's compiler reads. Seen in MindSpore 2.9.0 and 2.10.0.

The compiler recomputes an operator if its Primitive's attribute `recompute` is True, or if its scope begins with
`recompute_` and the attribute isn't False. A scope is what a cell's `get_scope()` says; operators of cells and
functions that are called inside get the prefix, too. The func-graph flag `output_recompute=False` of a cell says that
its output is kept; only a flagged cell is a region of its own.

Everything here changes attributes and gives back what takes the change back; `Cell.recompute()` itself isn't called:
it checks its keywords after it has flagged the cell, sets what PyNative mode runs, and can't be undone.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

from mindspore import nn
from mindspore.ops import Primitive

from ms_ops.graph_compile import is_compiling

Undo = Callable[[], None]

RECOMPUTED = "recompute_"
"""What the scope of a recomputed cell begins with."""

COMMUNICATION = "recompute_comm_op"
SLICED = "slice_activation"


def set_attribute(primitive: Primitive, name: str, value: Any) -> Undo:
    """Set an attribute of a Primitive.

    `add_prim_attr` also stores the value on the object, which would hide the method `recompute`: a second call of it
    then fails.

    Args:
        primitive: The Primitive.
        name: Of the attribute.
        value: Of the attribute.

    Returns:
        What puts the attribute back.
    """
    had, before = name in primitive.attrs, primitive.attrs.get(name)
    shadowing = name in vars(primitive)
    primitive.add_prim_attr(name, value)
    if not shadowing:
        del vars(primitive)[name]

    def undo() -> None:
        if had:
            primitive.add_prim_attr(name, before)
            if not shadowing:
                del vars(primitive)[name]
        else:
            primitive.attrs.pop(name, None)
            primitive.del_attr(name)

    return undo


def set_flag(cell: nn.Cell, **flags: Any) -> Undo:
    """Set func-graph flags of a cell, as `add_flags` does.

    Args:
        cell: The cell.
        **flags: The flags.

    Returns:
        What puts them back.
    """
    values = vars(cell)
    names = ("_func_graph_flags", "_cell_init_args", *flags)
    before = {name: copy.copy(values[name]) for name in names if name in values}
    cell.add_flags(**flags)
    weak = ref(cell)

    def undo() -> None:
        alive = weak()
        if alive is not None:
            for name in names:
                vars(alive).pop(name, None)
            vars(alive).update(before)

    return undo


def set_scope(cell: nn.Cell, scope: str | None) -> Undo:
    """Name the scope of what a cell runs.

    Args:
        cell: The cell.
        scope: Its name.

    Returns:
        What gives the cell its own scope back.
    """
    before, weak = vars(cell).get("_scope"), ref(cell)
    vars(cell)["_scope"] = scope

    def undo() -> None:
        alive = weak()
        if alive is not None:
            vars(alive)["_scope"] = before

    return undo


def has_own_recompute(cell: nn.Cell) -> bool:
    """Whether `Cell.recompute()` was called on the cell."""
    return bool(cell._has_config_recompute)


def is_flagged_natively(cell: nn.Cell) -> bool:
    """Whether `Cell.recompute()` was called on a cell without a plan, or on one around it."""
    scope = vars(cell).get("_scope")
    return has_own_recompute(cell) or (isinstance(scope, str) and scope.startswith(RECOMPUTED))


def own_primitives(cell: nn.Cell) -> list[Primitive]:
    """The Primitives that a cell itself holds, also in lists, tuples and dicts; each once.

    Args:
        cell: The cell.

    Returns:
        Its Primitives, without those of cells inside.
    """
    found: dict[int, Primitive] = {id(each): each for each in cell._primitives.values() if each is not None}
    for value in list(vars(cell).values()):
        found.update((id(each), each) for each in _inside(value))
    return list(found.values())


def _inside(value: Any) -> Iterator[Primitive]:
    if isinstance(value, Primitive):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, Primitive))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Primitive))


@functools.cache
def function_primitives() -> dict[str, tuple[Primitive, ...]]:
    """The Primitives behind functions (`ops.tanh`, `mint.matmul`), by their dispatch names: one for a whole process.

    Methods of tensors, and operators such as `@`, have none that Python reaches.
    """
    from mindspore.ops.auto_generate import gen_ops_prim

    found: dict[str, list[Primitive]] = {}
    for name, value in vars(gen_ops_prim).items():
        if isinstance(value, Primitive) and name.endswith("_op"):
            found.setdefault(value.name, []).append(value)
    return {name: tuple(primitives) for name, primitives in found.items()}


def flag_made_primitives(wanted: Callable[[str], bool | None]) -> Undo:
    """Set `recompute` on Primitives that are made while a graph is compiled.

    Functions such as `ops.dropout` make theirs there, where nobody else can reach them.

    Args:
        wanted: Gets the name of the operator; gives the attribute, or None for none.

    Returns:
        What ends it.
    """
    make: Any = Primitive.__init__

    @functools.wraps(make)
    def __init__(self: Primitive, name: str) -> None:
        make(self, name)
        value = wanted(name)
        if value is not None and is_compiling():
            set_attribute(self, "recompute", value)

    Primitive.__init__ = __init__

    def undo() -> None:
        if Primitive.__init__ is __init__:
            Primitive.__init__ = make

    return undo
