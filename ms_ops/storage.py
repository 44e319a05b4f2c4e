"""Storages: the bytes behind tensors, and tensors made over bytes again.

Seen in MindSpore 2.9.0 and 2.10.0 on the CPU backend. A storage is named by where it begins while something holds it;
afterwards the address may be used again.
"""

import ctypes
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_ops.autograd import without_history

# what is used here is MindSpore's own, before `ms_ops.writes` wraps it for everybody else
_from_array, _set = Tensor.from_numpy, Tensor.set_


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None = None
    """In elements; None: contiguous, and all of the storage."""
    offset: int = 0
    """In elements."""


class Storage:
    """A storage on the device, held: its memory stays while this object lives. It holds no history."""

    __slots__ = ("_storage", "address", "nbytes")

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.address: int = storage.data_ptr()
        self.nbytes: int = storage.nbytes()

    @classmethod
    def of(cls, tensor: Tensor) -> "Storage | None":
        """The storage that a tensor lies in; None if it has none yet, or its owner has freed it (`resize_(0)`).

        Asking the first tensor of a group waits until every dispatched operator has run.
        """
        try:
            found = cls(tensor.untyped_storage())
            return found if found.nbytes or not tensor.nbytes else None
        except RuntimeError:  # "Current Tensor has no device": made, but never used
            return None

    def layout_of(self, tensor: Tensor) -> Layout:
        """How a tensor lies in this storage."""
        if tensor.nbytes == self.nbytes and tensor.is_contiguous():
            return Layout(tensor.shape, tensor.dtype)
        return Layout(tensor.shape, tensor.dtype, tuple(tensor.stride()), tensor.storage_offset())

    def buffer(self) -> Any:
        """The bytes, as something with the buffer protocol (zero-copy); doesn't hold the storage."""
        return (ctypes.c_ubyte * self.nbytes).from_address(self.address)

    def tensor(self, layout: Layout) -> Tensor:
        """A tensor without history in this storage."""
        strides = _contiguous(layout.shape) if layout.strides is None else layout.strides
        return _set_to(self._storage, layout, strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _set_to(source: Any, layout: Layout, strides: tuple[int, ...]) -> Tensor:
    with without_history():
        return _set(Tensor(np.zeros(1, array_type(layout.dtype))), source, layout.offset, layout.shape, strides)


_array_types: dict[Any, np.dtype] = {}


def array_type(dtype: Any) -> np.dtype:
    """The numpy type of the same bytes (`bfloat16` has one, too)."""
    found = _array_types.get(dtype)
    if found is None:
        found = _array_types[dtype] = np.dtype(ms.dtype_to_nptype(dtype))
    return found


def tensor_over(buffer: np.ndarray, layout: Layout) -> Tensor:
    """A tensor over the bytes of a storage that came back (zero-copy); holds the buffer until its last reader has run.

    Args:
        buffer: The bytes of the whole storage, an array of uint8.
        layout: How the tensor lies in it.
    """
    elements = buffer.view(array_type(layout.dtype))
    if layout.strides is None:
        return _from_array(elements.reshape(layout.shape))
    return _set_to(_from_array(elements), layout, layout.strides)
