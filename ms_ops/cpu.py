"""`CpuBackEnd`: a copy thread writes tensors to a tier and reads them back; device and host share their memory."""

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from ms_ops.autograd import wait_for_operators
from ms_ops.backend import BackEnd
from ms_ops.copy_thread import CopyThread
from ms_ops.host import WrittenTier
from ms_ops.storage import Layout, Storage, tensor_over

_ZEROS = bytes(64)


class _Loaded:
    """What came back: its bytes, and the tensor over all of them if there is one."""

    __slots__ = ("buffer", "layout", "whole")

    def __init__(self, buffer: np.ndarray, whole: Tensor | None, layout: Layout) -> None:
        self.buffer, self.whole, self.layout = buffer, whole, layout

    def tensor(self, layout: Layout, piece: Any) -> Tensor:
        if self.whole is not None and layout is self.layout:
            return self.whole
        buffer = self.buffer
        if piece.nbytes != buffer.nbytes:
            buffer = buffer[piece.offset : piece.offset + piece.nbytes]
        return tensor_over(buffer, layout)


class _Followed(weakref.ref):
    """Tells when the memory of what came back is free; one object, since there is one for every tensor."""

    __slots__ = ("given_up", "key")

    given_up: Callable[[int], None]
    key: int

    def is_free(self) -> None:
        self.given_up(self.key)


class CpuBackEnd(BackEnd):
    """Copies by a thread of its own, one at a time.

    Args:
        tier: Where tensors go.
        verify: Compare a checksum of what comes back with that of what left.
    """

    frees_in_order = False
    ends_by_itself = True

    tier: WrittenTier

    def __init__(self, tier: WrittenTier, verify: bool = False) -> None:
        super().__init__()
        self.tier = tier
        self._verify = verify
        self._changed = threading.Condition(self.lock)
        self._thread = CopyThread(self.lock, lambda error: self.failed(error))

    def storage_of(self, tensor: Tensor, asked: Any) -> Storage | None:
        return Storage.of(tensor, asked)

    def ready(self, before: Any = None) -> None:
        """Nothing: the first address that is asked for waits until all of it has been computed."""

    def send(self, transfers: Sequence[Any]) -> None:
        for transfer in transfers:
            self._thread.submit(transfer, self._write)

    def load(self, transfers: Sequence[Any], urgent: bool = False) -> None:
        for transfer in transfers:
            self._thread.submit(transfer, self._read, urgent=urgent)

    def take_back(self, transfer: Any) -> bool:
        return self._thread.cancel(transfer)

    def forget(self, transfer: Any) -> None:
        """Nothing: there is nothing but the slot."""

    def hurry(self, transfer: Any) -> None:
        self._thread.hurry(transfer)

    def advance(self, condition: Callable[[], bool], *loads: Any) -> None:
        """Nothing: the thread does."""

    def end_unneeded(self) -> bool:
        return False  # the thread does

    def wait(self, condition: Callable[[], bool], *loads: Any) -> None:
        self._changed.wait_for(condition)

    def wait_for_readers(self) -> None:
        self.lock.release()
        try:
            wait_for_operators()
        finally:
            self.lock.acquire()

    def wake(self) -> None:
        self._changed.notify_all()

    def follow(self, loaded: _Loaded, given_up: Callable[[int], None], key: int) -> Any:
        found = _Followed(loaded.buffer, _Followed.is_free)
        found.given_up, found.key = given_up, key
        return found

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self._thread.later(seconds, function)

    def soon(self, function: Callable[[], None]) -> None:
        self._thread.soon(function)

    def close(self) -> None:
        self._thread.stop()
        self.tier.close()

    def leave_to_the_parent(self) -> None:
        self.tier.close()

    # ---- on the thread, called with the lock held

    def _write(self, transfer: Any) -> None:
        buffers, transfer.busy = _buffers(transfer.pieces), True
        begin = time.perf_counter()
        self.lock.release()
        error = None
        try:
            if self._verify:
                transfer.checksum = 0
                for buffer in buffers:
                    transfer.checksum = zlib.crc32(buffer, transfer.checksum)
            self.tier.write(transfer.slot, buffers)
        except BaseException as caught:  # raised to the user by the next call on a thread of theirs
            error = caught
        finally:
            del buffers
            self.lock.acquire()
        transfer.busy = False
        self.sent(transfer, error, begin)
        self._changed.notify_all()

    def _read(self, transfer: Any) -> None:
        transfer.busy = True
        begin = time.perf_counter()
        self.lock.release()
        error, loaded = None, None
        try:
            buffer = np.empty(transfer.span, np.uint8)
            self.tier.read(transfer.slot, buffer)
            if transfer.checksum is not None and zlib.crc32(buffer.data) != transfer.checksum:
                raise OSError("its bytes aren't those that left")
            layout = transfer.first
            is_whole = len(transfer.pieces) == 1 and layout.strides is None
            loaded = _Loaded(buffer, tensor_over(buffer, layout) if is_whole else None, layout)
        except BaseException as caught:
            error, loaded = caught, None
        finally:
            self.lock.acquire()
        transfer.busy = False
        self.arrived(transfer, loaded, error, begin)
        self._changed.notify_all()


def _buffers(pieces: Sequence[Any]) -> list[Any]:
    """The bytes of a transfer, in order; they hold the storages."""
    found: list[Any] = []
    end = 0
    for piece in pieces:
        if piece.offset > end:
            found.append(memoryview(_ZEROS)[: piece.offset - end])
        found.append(piece.storage.array().data)
        end = piece.offset + piece.nbytes
    return found
