"""Hearing of calls of cells. Seen in MindSpore 2.9.0 and 2.10.0: every cell runs through `nn.Cell.__call__`."""

import functools
from collections.abc import Callable
from typing import Any

from mindspore import nn

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
