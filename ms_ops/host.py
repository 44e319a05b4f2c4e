"""Where swapped tensors wait: the file tier and the host tier.

A tier hands out slots of a size, writes an array into a slot, reads a slot into an array, and takes slots back. Slots
are reused by size, so that after a first step nothing is allocated any more. A tier is not thread-safe: `write` and
`read` may run on a copy thread, everything else under its owner's lock.
"""

import errno
import os
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SLOT_ALIGNMENT = 4096
SLAB_BYTES = 64 * 2**20
"""A slab is allocated whole, so that a full disk shows when a step begins to need it, not while it writes."""


class TierFull(Exception):
    """No slot of the asked size fits: `reason` says which limit, how full."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Slot:
    """A piece of a tier: `place` is its slab (file tier) or its buffer (host tier)."""

    nbytes: int
    place: Any = None
    offset: int = 0


class Tier(ABC):
    """What the swap manager asks of a tier."""

    name: str

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocated = 0
        """Bytes taken from the system, in use or free for reuse."""
        self.used = 0
        """Bytes of the slots that are in use."""
        self._free: dict[int, list[Slot]] = defaultdict(list)

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes` bytes.

        Raises:
            TierFull: The limit, or the disk, leaves no room.
        """
        size = -(-nbytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        free = self._free[size]
        slot = free.pop() if free else self._grow(size)
        self.used += size
        return slot

    def give_back(self, slot: Slot) -> None:
        """The slot may be reused."""
        self.used -= slot.nbytes
        self._free[slot.nbytes].append(slot)

    def _check_limit(self, more: int) -> None:
        if self.allocated + more > self.limit:
            self.trim()
        if self.allocated + more > self.limit:
            raise TierFull(
                f"host_budget is {self.limit} bytes, {self.allocated} of them are allocated, and {more} more are needed"
            )

    @abstractmethod
    def _grow(self, size: int) -> Slot: ...

    @abstractmethod
    def write(self, slot: Slot, array: np.ndarray) -> None:
        """Copy the array's bytes into the slot."""

    @abstractmethod
    def read(self, slot: Slot, array: np.ndarray) -> None:
        """Copy the slot's bytes into the (contiguous) array."""

    @abstractmethod
    def trim(self) -> None:
        """Give back to the system what is free."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system."""


def _bytes_of(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class FileTier(Tier):
    """Slots in preallocated files that have no name: nothing is left behind, however the process ends.

    Written and read through the page cache, which the kernel takes back when memory is short; it doesn't count as the
    process's resident memory.
    """

    name = "file"

    def __init__(self, folder: Path | None, limit: int) -> None:
        super().__init__(limit)
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        self._slabs: list[int] = []
        self._slab_left = 0
        self._slab_offset = 0
        if not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(self.folder))
        os.close(self._open_unnamed())  # a folder that can't be written shows now, not in mid-step

    def _open_unnamed(self) -> int:
        fd, name = tempfile.mkstemp(prefix="hyper_parallel_", dir=self.folder)  # mode 0600
        os.unlink(name)
        return fd

    def _grow(self, size: int) -> Slot:
        if self._slab_left < size:
            if self.allocated + size > self.limit:
                self.trim()
            slab = max(SLAB_BYTES, size)
            if self.allocated + slab > self.limit:
                slab = size  # the last bytes of a budget are handed out exactly
            self._check_limit(slab)
            fd = self._open_unnamed()
            try:
                os.posix_fallocate(fd, 0, slab)
            except OSError as error:
                os.close(fd)
                raise TierFull(
                    f"the disk under {self.folder} has no room for another {slab} bytes ({error.strerror}); "
                    f"{self.allocated} bytes are allocated there"
                ) from error
            self._slabs.append(fd)
            self.allocated += slab
            self._slab_left, self._slab_offset = slab, 0
        slot = Slot(size, self._slabs[-1], self._slab_offset)
        self._slab_offset += size
        self._slab_left -= size
        return slot

    def write(self, slot: Slot, array: np.ndarray) -> None:
        view = memoryview(_bytes_of(array))
        done = 0
        while done < len(view):
            done += os.pwrite(slot.place, view[done:], slot.offset + done)

    def read(self, slot: Slot, array: np.ndarray) -> None:
        view = array.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            count = os.preadv(slot.place, [view[done:]], slot.offset + done)
            if count == 0:
                raise OSError(
                    errno.EIO, f"a swapped tensor came back short: {done} of {len(view)} bytes", str(self.folder)
                )
            done += count

    def trim(self) -> None:
        if self.used == 0:
            self.close()

    def close(self) -> None:
        for fd in self._slabs:
            os.close(fd)
        self._slabs.clear()
        self._free.clear()
        self.allocated = self._slab_left = 0


class HostTier(Tier):
    """Slots in RAM, which host and device share on the CPU backend: it saves nothing there; tests, accounting."""

    name = "host"

    def _grow(self, size: int) -> Slot:
        self._check_limit(size)
        self.allocated += size
        return Slot(size, np.empty(size, np.uint8))

    def write(self, slot: Slot, array: np.ndarray) -> None:
        slot.place[: array.nbytes] = _bytes_of(array)

    def read(self, slot: Slot, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = slot.place[: array.nbytes]

    def trim(self) -> None:
        self._free.clear()
        self.allocated = self.used

    def close(self) -> None:
        self._free.clear()
        self.allocated = 0
