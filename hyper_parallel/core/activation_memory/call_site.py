"""Where in the user's code something happens, for messages."""

import sys
from collections.abc import Iterable
from types import FrameType

from mindspore import nn

from ms_ops.host_values import NOT_THE_USERS


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
        cell = cell or constructed_by(frame)
        if not line and not f"{frame.f_globals.get('__name__', '')}.".startswith(NOT_THE_USERS):
            line = f"at {code.co_filename}:{frame.f_lineno}, {code.co_name}"
        frame = frame.f_back
    where = _path_of(cell, cells)
    found = [part for part in (line, where and f"in {where}") if part]
    return f" ({', '.join(found)})" if found else ""


def running_cell(cells: Iterable[tuple[str, nn.Cell]] = ()) -> str:
    """The path of the innermost cell whose construct runs; as in `call_site`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (cell := constructed_by(frame)) is not None:
            return _path_of(cell, cells)
        frame = frame.f_back
    return ""


def constructed_by(frame: FrameType) -> nn.Cell | None:
    """The cell whose construct this frame is."""
    code = frame.f_code
    if code.co_name != "construct" or not code.co_argcount:
        return None
    owner = frame.f_locals.get(code.co_varnames[0])
    return owner if isinstance(owner, nn.Cell) else None


def _path_of(cell: nn.Cell | None, cells: Iterable[tuple[str, nn.Cell]]) -> str:
    return "" if cell is None else next((path for path, known in cells if known is cell), type(cell).__name__)
