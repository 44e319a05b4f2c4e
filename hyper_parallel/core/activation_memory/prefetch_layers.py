"""Pairs of layers of which the first is loaded when backward reaches the second."""

import sys
from collections.abc import Callable
from types import FrameType
from weakref import WeakKeyDictionary, ref

from mindspore import nn

from hyper_parallel.core.activation_memory.call_site import constructed_by

_first_of: "WeakKeyDictionary[nn.Cell, list[ref[nn.Cell]]]" = WeakKeyDictionary()
_named: "WeakKeyDictionary[nn.Cell, None]" = WeakKeyDictionary()


def pair(first: nn.Cell, second: nn.Cell) -> Callable[[], None]:
    """Load what `first` has swapped when backward reaches `second`.

    Returns:
        A function that undoes it; it does nothing if the two were a pair before, and keeps neither alive.
    """
    firsts = _first_of.setdefault(second, [])
    is_new = not any(known() is first for known in firsts)
    if is_new:
        firsts.append(ref(first))
    _named[first] = _named[second] = None
    weak = ref(first), ref(second)

    def undo() -> None:
        one, other = weak[0](), weak[1]()
        if is_new and one is not None and other is not None:
            _unpair(one, other)

    return undo


def _unpair(first: nn.Cell, second: nn.Cell) -> None:
    rest = [known for known in _first_of.pop(second, []) if known() is not first]
    if rest:
        _first_of[second] = rest
    still_named = {id(cell) for cell in _first_of} | {id(known()) for firsts in _first_of.values() for known in firsts}
    for cell in (first, second):
        if id(cell) not in still_named:
            _named.pop(cell, None)


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
