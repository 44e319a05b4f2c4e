"""Where in the user's code something happens, for messages."""

import sys
from collections.abc import Iterable
from types import FrameType

from mindspore import nn

_OURS = ("hyper_parallel.core.", "ms_ops.", "mindspore.")


def call_site(cells: Iterable[tuple[str, nn.Cell]] = ()) -> str:
    """The innermost line that is neither ours nor MindSpore's, and the innermost cell whose construct runs.

    Args:
        cells: The cells of the region with their paths below it; the others are named by their class.

    Returns:
        `` (at FILE:LINE, FUNCTION, in CELL)``, or what of it is known.
    """
    frame: FrameType | None = sys._getframe(1)
    line, cell = "", None
    while frame is not None and not (line and cell):
        code = frame.f_code
        if cell is None and code.co_name == "construct" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            cell = owner if isinstance(owner, nn.Cell) else None
        if not line and not f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
            line = f"at {code.co_filename}:{frame.f_lineno}, {code.co_name}"
        frame = frame.f_back
    where = "" if cell is None else next((path for path, known in cells if known is cell), type(cell).__name__)
    found = [part for part in (line, where and f"in {where}") if part]
    return f" ({', '.join(found)})" if found else ""
