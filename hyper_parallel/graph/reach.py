"""Which cells a function can call: what it closes over, names as globals, or is bound to."""

import functools
import types
from collections import deque
from typing import Any

from mindspore import nn

_MOST = 10_000
"""Objects that are looked at."""


def cells_reached(start: Any) -> set[int]:
    """The ids of the cells that code can call.

    Args:
        start: A function, a cell or anything callable.

    Returns:
        The ids of cells, those inside other cells included.
    """
    waiting, seen, found = deque([start]), set[int](), set[int]()
    while waiting and len(seen) < _MOST:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Cell):
            found.add(id(each))
            waiting.extend(child for child in each._cells.values() if child is not None)
            waiting.extend(value for value in vars(each).values() if isinstance(value, _FOLLOWED))
        else:
            waiting.extend(_behind(each))
    return found


def _behind(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        wrapped = [value.__wrapped__] if hasattr(value, "__wrapped__") else []
        return [*closed, *wrapped, *(each for each in named if isinstance(each, _FOLLOWED))]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (type, types.ModuleType)):
        return []
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, _FOLLOWED)]


_FOLLOWED = (nn.Cell, types.FunctionType, types.MethodType, functools.partial, list, tuple, dict)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    """The global names that code uses, functions inside it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
