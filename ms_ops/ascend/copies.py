"""Copies between device and pinned memory, and tensors over what lies on the device. Nothing here waits or orders.

Note: [Bytes, not values]
What goes to host is the whole storage, byte by byte, whatever of it a tensor shows. `Tensor.copy_` copies between
device and host by itself only where both sides are contiguous, of one type and shape; otherwise it goes through the
device and makes the host tensor one of the device's, without an error. So both sides are made alike here, if need be
as plain bytes. `UntypedStorage.copy_` would copy bytes, too, but a copy that is queued doesn't hold its source: dropped
before the copy is launched, its memory is used for something else (the race checker of the emulated device saw it).

Seen in MindSpore 2.10.0: `untyped_storage()` of a tensor that is in use returns at once, that of a new one waits until
all dispatched operators have been launched, as `set_` does. `x.data` is an alias without history; it waits for nothing.
"""

import zlib
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint
from mindspore.ops.auto_generate.gen_ops_prim import as_strided_op

from ms_ops.ascend.pinned import PinnedSlot
from ms_ops.autograd import data_of, without_history
from ms_ops.storage import Layout, array_type, layout_in
from ms_ops.tensors import copy_into, view_of


class DeviceStorage:
    """A storage on the device, held: its memory stays while this object lives. It holds no history."""

    __slots__ = ("address", "alias", "layout", "nbytes")

    def __init__(self, storage: Any, tensor: Tensor) -> None:
        self.alias = data_of(tensor)
        self.address: int = storage.data_ptr()
        self.nbytes: int = storage.nbytes()
        self.layout = layout_in(self.nbytes, self.alias)

    @classmethod
    def of(cls, tensor: Tensor, storage: Any) -> "DeviceStorage | None":
        """The storage that a tensor lies in; None if it is not on the device, or its owner has freed it."""
        if storage is None or storage.device == "CPU" or (not storage.nbytes() and tensor.nbytes):
            return None
        return cls(storage, tensor)

    def tensor(self, layout: Layout, piece: Any = None) -> Tensor:
        """A tensor without history over these bytes."""
        if layout == self.layout:
            return self.alias
        with without_history():
            if layout.strides is not None and layout.dtype == self.alias.dtype and self.alias.ndim:
                return as_strided_op(self.alias, layout.shape, layout.strides, layout.offset)
            return tensor_in(self._flat(), layout)

    def _flat(self) -> Tensor:
        """All the bytes, as a tensor of uint8."""
        alias = self.alias
        flat = alias.view(1) if not alias.ndim else alias
        count = self.nbytes // array_type(alias.dtype).itemsize
        return as_strided_op(flat, (count,), (1,), 0).view(ms.uint8)

    def send(self, slot: PinnedSlot, offset: int) -> None:
        """Queue the copy of all bytes into a slot, on the current stream."""
        alias = self.alias
        if len(slot.place) == 1:
            if not (alias.nbytes == self.nbytes and alias.is_contiguous()):
                alias = self._flat()
            copy_into(slot.typed(alias.shape, alias.dtype, offset), alias, non_blocking=True)
            return
        flat, begin = self._flat(), 0
        for part, array in enumerate(slot.place):
            end = min(begin + array.nbytes, self.nbytes)
            copy_into(slot.part(part, end - begin), flat[begin:end], non_blocking=True)
            begin = end

    def checksum(self, before: int = 0) -> int:
        """A CRC-32 of the bytes, that of what comes before them given. Waits for the device."""
        return checksum(self.alias if not self.alias.ndim else self._flat(), before)


def is_plain(layout: Layout, slot: PinnedSlot) -> bool:
    """Whether a tensor that is all of a transfer can be loaded as what it is, and not only as bytes."""
    return layout.strides is None and len(slot.place) == 1 and layout.dtype not in _NOT_COPIED


_NOT_COPIED = (ms.complex64, ms.complex128)
"""`copy_` takes these through the device."""


def allocate(layout: Layout) -> Tensor:
    """A tensor on the device, whose memory is handed out when the operators that are queued before it are launched."""
    return mint.empty(layout.shape, dtype=layout.dtype)


def allocate_bytes(nbytes: int) -> Tensor:
    """So many bytes on the device."""
    return mint.empty((nbytes,), dtype=ms.uint8)


def load(target: Tensor, slot: PinnedSlot) -> None:
    """Queue the copy of a slot's bytes into a new tensor on the device, on the current stream."""
    if len(slot.place) == 1:
        copy_into(target, slot.typed(target.shape, target.dtype), non_blocking=True)
        return
    begin, nbytes = 0, target.nbytes
    for part, array in enumerate(slot.place):
        end = min(begin + array.nbytes, nbytes)
        copy_into(target[begin:end], slot.part(part, end - begin), non_blocking=True)
        begin = end


def tensor_in(flat: Tensor, layout: Layout, begin: int = 0) -> Tensor:
    """A tensor over the bytes of a storage.

    Args:
        flat: The bytes, as a tensor of uint8.
        layout: How the tensor lies in them.
        begin: Where they begin in the storage of `flat`, in bytes.
    """
    typed = flat if layout.dtype == ms.uint8 else flat.view(layout.dtype)
    if layout.strides is None:
        return typed.view(layout.shape)
    offset = layout.offset + begin // array_type(layout.dtype).itemsize  # from the begin of the storage, not of `flat`
    return as_strided_op(typed, layout.shape, layout.strides, offset)


def checksum(tensor: Tensor, before: int = 0) -> int:
    """A CRC-32 of a contiguous tensor's bytes, that of what comes before them given. Waits for the device."""
    return zlib.crc32(view_of(tensor).tobytes(), before)
