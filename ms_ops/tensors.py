"""Tensors and numpy arrays over the same bytes. Seen in MindSpore 2.9.0 and 2.10.0 on the CPU backend."""

import operator
import zlib
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint
from mindspore.context import _context, ms_ctx_param
from mindspore.ops.auto_generate.gen_ops_prim import as_strided_op

from ms_ops.autograd import alias, without_history

# what is used here is MindSpore's own, before `ms_ops.writes` wraps it for everybody else
_set_data = Parameter.set_data
_as_array, _from_array = Tensor.asnumpy, Tensor.from_numpy
copy_into = Tensor.copy_
"""`copy_into(target, source, non_blocking=...)`: nobody hears of it as of a write of the user's."""
nbytes_of: Callable[[Tensor], int] = operator.attrgetter("_nbytes")
"""What `Tensor.nbytes` gives, which is written in Python: for what is asked of every saved tensor."""
set_storage = Tensor.set_
"""`set_storage(tensor, source, offset, shape, strides)`: let a tensor lie in the storage of `source`."""


def view_of(tensor: Tensor) -> np.ndarray:
    """The tensor's own bytes as an array (zero-copy on CPU); keeps its storage alive.

    Waits until every dispatched operator has run (the whole queue, not only this tensor's): call it for a group of
    tensors at once, so that only the first call waits.
    """
    return _as_array(tensor)


def address_of(array: np.ndarray) -> int:
    """Where the array's bytes begin."""
    return array.__array_interface__["data"][0]


def over(array: np.ndarray) -> Tensor:
    """A tensor over the array's bytes (zero-copy); it keeps the array alive until its last queued reader has run."""
    return _from_array(array)


def storage_of(tensor: Tensor) -> int:
    """Where the tensor's storage begins: the same for all its views; 0 if it has none yet.

    Waits for the whole queue, as `view_of` does.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # "Current Tensor has no device": made, but never used
        return 0


def checksum(tensor: Tensor) -> int:
    """A CRC-32 of the tensor's bytes. Waits for the whole queue, as `view_of` does."""
    return zlib.crc32(np.ascontiguousarray(view_of(tensor)).view(np.uint8).data)


def copy_of(tensor: Tensor) -> Tensor:
    """The same bytes in a storage of their own, without history; queued, so that later writes don't reach it."""
    with without_history():
        return alias(tensor, tracked=False).copy()


def rebind(parameter: Parameter, tensor: Tensor) -> None:
    """Make `tensor`'s storage the parameter's; the one it had stays as it is."""
    _set_data(parameter, tensor)


_WITH_NUMPY = {ms.float16: np.float16, ms.float32: np.float32, ms.float64: np.float64}


def untouched(shape: tuple[int, ...], dtype: Any) -> Tensor | None:
    """Zeros that nobody reads: they take no memory. None for what can't be made so.

    On host their memory is never touched; on a device all of them are one element.
    """
    kind = _WITH_NUMPY.get(dtype)
    if kind is None or not shape:
        return None
    if is_on_host():
        return _from_array(np.zeros(shape, kind))
    zero = _zeros.get(dtype)
    with without_history():
        if zero is None:
            zero = _zeros[dtype] = mint.zeros((1,), dtype=dtype)
        return as_strided_op(zero, tuple(shape), (0,) * len(shape), 0)


_zeros: dict[Any, Tensor] = {}


def device_target() -> str:
    """What `get_context("device_target")` gives, which takes a hundred times as long."""
    return _context().get_param(ms_ctx_param.device_target)


def is_on_host() -> bool:
    """Whether tensors live in host memory, so that arrays over them cost nothing."""
    return device_target() == "CPU"
