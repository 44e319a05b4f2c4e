"""What is in a cell, and hearing of calls of cells. Seen in MindSpore 2.9.0 and 2.10.0.

Every cell runs through `nn.Cell.__call__`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Parameter, nn

from ms_ops.dispatch import is_intercepted


def hear_of_calls(listener: Callable[[nn.Cell], None]) -> None:
    """Call `listener(cell)` before every call of a cell on a thread whose operators are intercepted; installed once."""
    run: Any = nn.Cell.__call__
    if hasattr(run, "_hp_tells"):
        return

    @functools.wraps(run)
    def __call__(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        if is_intercepted():
            listener(self)
        return run(self, *args, **kwargs)

    __call__._hp_tells = True  # type: ignore[attr-defined]
    nn.Cell.__call__ = __call__


def all_cells(cell: nn.Cell) -> list[nn.Cell]:
    """The cell and those inside it, once each."""
    found, seen = [cell], {id(cell)}
    for one in found:  # grows meanwhile
        for child in one._cells.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def own_parameters(cell: nn.Cell) -> Iterable[Parameter]:
    """The parameters of the cell itself, without those of cells inside."""
    return cell._params.values()


def has_own_precision(cell: nn.Cell) -> bool:
    """Whether the cell runs in a precision that `to_float` or mixed precision gave it."""
    return cell.mixed_precision_type is not None
