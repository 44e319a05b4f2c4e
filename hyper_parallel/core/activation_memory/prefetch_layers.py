"""Pairs of layers of which the first is loaded when backward reaches the second."""

import sys
from types import FrameType
from weakref import WeakKeyDictionary, ref

from mindspore import nn

from hyper_parallel.core.activation_memory.call_site import constructed_by

_first_of: "WeakKeyDictionary[nn.Cell, list[ref[nn.Cell]]]" = WeakKeyDictionary()
_named: "WeakKeyDictionary[nn.Cell, None]" = WeakKeyDictionary()


def pair(first: nn.Cell, second: nn.Cell) -> None:
    """Load what `first` has swapped when backward reaches `second`."""
    firsts = _first_of.setdefault(second, [])
    if not any(known() is first for known in firsts):
        firsts.append(ref(first))
    _named[first] = _named[second] = None


def running() -> tuple[int, ...]:
    """The ids of the layers named in pairs whose construct runs now, the innermost first."""
    if not _named:
        return ()
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        cell = constructed_by(frame)
        if cell is not None and cell in _named:
            found.append(id(cell))
        frame = frame.f_back
    return tuple(dict.fromkeys(found))


def first_of(layers: tuple[int, ...]) -> set[int]:
    """The ids of the layers to load when backward reaches one of `layers`."""
    found: set[int] = set()
    if layers:
        for second, firsts in _first_of.items():
            if id(second) in layers:
                found.update(id(first) for known in firsts if (first := known()) is not None)
    return found
