"""Values that code takes from Python into a tensor without any operator that says so.

`x[i]` is no dispatched operator, and neither is `Tensor(value)`: an index or a number that is another one in a replay
would change nothing but bits. Both are heard here while operators are intercepted, if the code that calls them is
neither MindSpore's nor ours. Seen in MindSpore 2.9.0 and 2.10.0.
"""

import functools
import sys
import zlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mindspore import Tensor

from ms_ops.dispatch import is_intercepted

Site = tuple[CodeType, int]
"""An instruction."""

_MOST_BYTES = 1 << 16
_PASS_ON = ("tensor", "observed")
"""Functions of MindSpore, and our wrappers (`ms_ops.writes`), that only pass on what they are called with."""
NOT_THE_USERS = ("mindspore.", "ms_ops.", "hyper_parallel.core.")
"""Modules whose code isn't the user's."""


def hear_of_values(listener: Callable[[Site, str, Any], None]) -> None:
    """Call `listener(site, what, value)` for every index and every new tensor; installed once."""
    if hasattr(Tensor.__getitem__, "_hp_tells"):
        return
    get, make, wrap = Tensor.__getitem__, Tensor.__init__, Tensor.from_numpy

    @functools.wraps(get)
    def __getitem__(self: Tensor, index: Any) -> Any:
        if is_intercepted() and (site := site_of(sys._getframe(1))) is not None:
            listener(site, "index", _plain(index))
        return get(self, index)

    @functools.wraps(make)
    def __init__(self: Tensor, input_data: Any = None, *args: Any, **kwargs: Any) -> None:
        if is_intercepted():
            makes(input_data, sys._getframe(1))
        make(self, input_data, *args, **kwargs)

    @functools.wraps(wrap)
    def from_numpy(array: np.ndarray) -> Tensor:
        if is_intercepted():
            makes(array, sys._getframe(1))
        return wrap(array)

    def makes(data: Any, caller: FrameType) -> None:
        value, site = _value(data), site_of(caller)
        if value is not None and site is not None:
            listener(site, "Tensor", value)

    __getitem__._hp_tells = True  # type: ignore[attr-defined]
    Tensor.__getitem__ = __getitem__
    Tensor.__init__ = __init__
    Tensor.from_numpy = staticmethod(from_numpy)


def site_of(frame: FrameType | None) -> Site | None:
    """The instruction that calls; None if that is MindSpore's own or ours."""
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(NOT_THE_USERS):
        if frame.f_code.co_name not in _PASS_ON:
            return None
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def _plain(index: Any) -> Any:
    """What of an index is not a tensor."""
    if isinstance(index, Tensor):
        return Tensor
    if isinstance(index, slice):
        return ("slice", _plain(index.start), _plain(index.stop), _plain(index.step))
    if isinstance(index, (tuple, list)):
        return tuple(map(_plain, index))
    return index


def _value(data: Any) -> Any:
    """Numbers as they are, small arrays and lists by a checksum; None for what isn't compared."""
    if isinstance(data, (bool, int, float)):
        return data
    if isinstance(data, (list, tuple)):
        if len(data) > _MOST_BYTES // 8 or any(isinstance(item, Tensor) for item in data):
            return None
        data = np.asarray(data)
    if isinstance(data, (np.ndarray, np.generic)) and data.nbytes <= _MOST_BYTES and not data.dtype.hasobject:
        return data.item() if data.ndim == 0 else (data.shape, data.dtype.name, zlib.crc32(data.tobytes()))
    return None
