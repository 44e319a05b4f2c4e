"""Dropout as a replay reads it: one bit for each element instead of a mask and a result in floating point.

MindSpore's CPU kernel gives `x * mask * (1 / keep)`, for float16 `x * (1 / keep)` in float32, rounded, times the mask;
the mask is 0 or 1. So the bits of the mask and the replay's own `x` give the same result, bit for bit. That is checked
once for each `keep` and dtype, against what the kernel gave; what doesn't agree is kept as it is.
"""

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory.written import Written
from ms_ops.autograd import alias, requires_grad, result_like
from ms_ops.dispatch import keep_probability
from ms_ops.tensors import is_on_host, over, view_of

_LEAST_BYTES = 1 << 18
"""Packing waits for the queue once a region, which doesn't pay for less."""
_DTYPES = {ms.float16: np.float16, ms.float32: np.float32, ms.float64: np.float64}
_agrees: dict[tuple[float, Any], bool] = {}


class PackedMask:
    """A dropout mask; instead of a tensor that backward needs."""

    __slots__ = ("_bits", "_tensor", "dtype", "shape")

    def __init__(self, mask: Tensor) -> None:
        self._tensor: Tensor | None = alias(mask, tracked=False)
        self._bits: Any = None
        self.shape = mask.shape
        self.dtype = mask.dtype

    def get(self) -> Tensor:
        """The mask as the operator gave it."""
        if self._tensor is not None:
            return self._tensor
        count = math.prod(self.shape)
        return over(np.unpackbits(self._bits, count=count).astype(_DTYPES[self.dtype]).reshape(self.shape))

    def pack(self) -> None:
        """Keep the bits only; waits for the queue."""
        if self._tensor is not None:
            self._bits = np.packbits(view_of(self._tensor) != 0)
            self._tensor = None


class PackedDropout:
    """What a call of Dropout gave.

    Args:
        args: The operator's arguments, as it is dispatched.
        result: Its two results.
        mask: What stands for the mask.
    """

    __slots__ = ("_given", "_is_written", "_keep", "_mask", "_tracked", "_x")

    def __init__(self, args: tuple, result: Any, mask: PackedMask) -> None:
        self._keep = keep_probability(args)
        self._mask = mask
        self._tracked = requires_grad(result[0])
        self._is_written = False
        self._given: Tensor | None = alias(result[0], tracked=False)
        self._x = None if (self._keep, mask.dtype) in _agrees else alias(args[2][0], tracked=False)

    @staticmethod
    def suits(name: str, args: tuple) -> bool:
        """Whether the result of this call can be packed."""
        if name != "Dropout" or not is_on_host():
            return False
        x = args[2][0]
        return x.dtype in _DTYPES and x.nbytes >= _LEAST_BYTES and _agrees.get((keep_probability(args), x.dtype), True)

    def pack(self) -> None:
        """Keep the bits only, if they give what the operator gave; waits for the queue."""
        if self._given is None:
            return
        key = self._keep, self._mask.dtype
        if self._x is not None and key not in _agrees:
            computed = _result(self._x, self._mask.get(), self._keep)
            mask = view_of(self._mask.get())
            zeros_and_ones = np.array_equal(mask, mask != 0)
            _agrees[key] = zeros_and_ones and view_of(computed).tobytes() == view_of(self._given).tobytes()
        self._x = None
        if _agrees.get(key):
            self._mask.pack()
            self._given = None

    def results(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the operator gave when it was called with the same `x`."""
        given = self._given
        if given is None:
            given = _result(alias(x, tracked=False), self._mask.get(), self._keep)
        return (result_like if self._is_written else alias)(given, self._tracked), self._mask.get()

    def rescue(self, written: Written) -> None:
        """One of the results is about to be written."""
        self._is_written = self._is_written or written.rebinds
        if self._given is not None and (written.reaches(self._given) or written.reaches(self._mask.get())):
            self._is_written = True
            self.pack()


def _result(x: Tensor, mask: Tensor, keep: float) -> Tensor:
    scale = float(np.float32(1) / np.float32(keep))
    if x.dtype == ms.float16:
        return (x.astype(ms.float32) * scale).astype(ms.float16) * mask
    return x * mask * scale
