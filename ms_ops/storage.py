"""Storages: the bytes behind tensors, and tensors made over bytes again.

Seen in MindSpore 2.9.0 and 2.10.0 on the CPU backend. A storage is named by where it begins while something holds it;
afterwards the address may be used again.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_ops.autograd import data_of, without_history
from ms_ops.tensors import over, set_storage


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None = None
    """In elements; None: contiguous, and all of the storage."""
    offset: int = 0
    """In elements."""


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...], dtype: Any) -> Layout:
    return Layout(shape, dtype)


def layout_in(nbytes: int, tensor: Tensor) -> Layout:
    """How a tensor lies in its storage of so many bytes."""
    if tensor.nbytes == nbytes and tensor.is_contiguous():
        return _whole(tensor.shape, tensor.dtype)
    return Layout(tensor.shape, tensor.dtype, tuple(tensor.stride()), tensor.storage_offset())


def ask(tensors: Iterable[Tensor]) -> list[Any]:
    """MindSpore's storages of tensors; None for a tensor that has none yet: made, but never used.

    The first one waits until every dispatched operator has run: asked for at once, they all wait for the same. What
    they are asked afterwards waits for nothing.
    """
    found: list[Any] = []
    for tensor in tensors:
        try:
            found.append(tensor.untyped_storage())
        except RuntimeError:  # "Current Tensor has no device"
            found.append(None)
    return found


class Storage:
    """A storage on the device, held: its memory stays while this object lives. It holds no history.

    Args:
        tensor: A tensor that lies in it.
        storage: What `ask` gave for it.
    """

    __slots__ = ("_layout", "_storage", "address", "alias", "nbytes")

    def __init__(self, tensor: Tensor, storage: Any) -> None:
        self._storage = storage
        self.alias = data_of(tensor)
        self.address: int = storage.data_ptr()
        self.nbytes: int = storage.nbytes()
        self._layout: Layout | None = None

    @classmethod
    def of(cls, tensor: Tensor, storage: Any) -> "Storage | None":
        """The storage that a tensor lies in; None if it has none yet, or its owner has freed it (`resize_(0)`)."""
        if storage is None or (not storage.nbytes() and tensor.nbytes):
            return None
        return cls(tensor, storage)

    @property
    def layout(self) -> Layout:
        """How the tensor lies in it for which it was asked; worked out when it is first needed."""
        if self._layout is None:
            self._layout = layout_in(self.nbytes, self.alias)
        return self._layout

    def tensor(self, layout: Layout, piece: Any = None) -> Tensor:
        """A tensor without history over these bytes (zero-copy), which it holds until its last reader has run."""
        return self.alias if layout is self._layout or layout == self.layout else tensor_over(self.array(), layout)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def array(self) -> np.ndarray:
        """The bytes as an array of uint8 (zero-copy), which holds the storage."""
        return np.asarray(self)


_array_types: dict[Any, np.dtype] = {}


def array_type(dtype: Any) -> np.dtype:
    """The numpy type of the same bytes (`bfloat16` has one, too)."""
    found = _array_types.get(dtype)
    if found is None:
        found = _array_types[dtype] = np.dtype(ms.dtype_to_nptype(dtype))
    return found


def tensor_over(buffer: np.ndarray, layout: Layout) -> Tensor:
    """A tensor without history over the bytes of a storage (zero-copy), which it holds until its last reader has run.

    Args:
        buffer: The bytes of the whole storage, an array of uint8: as they came back, or `Storage.array()`.
        layout: How the tensor lies in it.
    """
    elements = buffer.view(array_type(layout.dtype))
    if layout.strides is None:
        return over(elements.reshape(layout.shape))
    with without_history():
        one = Tensor(np.zeros(1, elements.dtype))
        return set_storage(one, over(elements), layout.offset, layout.shape, layout.strides)
