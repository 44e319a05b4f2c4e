"""The file tier: slots in preallocated files that have no name, with or without the system's page cache."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ms_ops.host import SLOT_ALIGNMENT, Slot, TierFull, WrittenTier

SLAB_BYTES = 64 * 2**20
"""A slab is allocated whole, so that a full disk shows when a step begins to need it, not while it writes."""
_CHUNK_BYTES = 4 * 2**20
_MOST_BUFFERS = 1024
"""As many as `pwritev` takes on Linux (IOV_MAX)."""


class FileTier(WrittenTier):
    """Slots in files that have no name: nothing is left behind, however the process ends.

    Args:
        folder: Where the files are. None: the system's temporary folder.
        limit: Most bytes.
        slab: Bytes of a file.
        direct: Pass the page cache by (O_DIRECT). Otherwise files are written and read through it: the kernel takes it
            back when memory is short, and it doesn't count as the process's resident memory, but as the container's.

    Raises:
        OSError: The folder can't be written, or its file system has no direct I/O.
    """

    name = "file"

    def __init__(self, folder: Path | None, limit: int, slab: int = SLAB_BYTES, direct: bool = False) -> None:
        super().__init__(limit)
        self.folder = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        self._slab_bytes = -(-slab // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._slabs: dict[int, int] = {}
        """Descriptors, and how many bytes each file has."""
        self._unused: list[int] = []
        """Slabs of which nothing is handed out."""
        self._slab = -1
        """The slab that is handed out now."""
        self._slab_left = 0
        self._slab_offset = 0
        self._bounce = mmap.mmap(-1, _CHUNK_BYTES) if direct else None
        if not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(self.folder))
        os.close(self._open_unnamed())  # a folder that can't be written shows now, not in mid-step

    def _open_unnamed(self) -> int:
        # mode 0600; without a name from the beginning where the file system can do that (O_TMPFILE)
        with tempfile.TemporaryFile(prefix="hyper_parallel_", dir=self.folder, buffering=0) as file:
            fd = os.dup(file.fileno())
        if self._bounce is not None:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            except OSError as error:
                os.close(fd)
                raise OSError(
                    error.errno, f"its file system has no direct I/O ({error.strerror})", str(self.folder)
                ) from error
        return fd

    def _grow(self, size: int) -> Slot:
        if self._slab_left < size and not self._take_unused(size):
            if self.allocated + size > self.limit:
                self.trim()
            slab = max(self._slab_bytes, size)
            if self.allocated + slab > self.limit:
                slab = size  # the last bytes of a budget are handed out exactly
            self._check_limit(slab)
            self._add_slab(slab)
        slot = Slot(size, self._slab, self._slab_offset)
        self._slab_offset += size
        self._slab_left -= size
        return slot

    def _begin_anew(self) -> None:
        self._free.clear()
        self._unused = list(self._slabs)
        self._slab_left = 0

    def _take_unused(self, size: int) -> bool:
        for fd in self._unused:
            if self._slabs[fd] >= size:
                self._unused.remove(fd)
                self._slab, self._slab_left, self._slab_offset = fd, self._slabs[fd], 0
                return True
        return False

    def _add_slab(self, nbytes: int) -> None:
        try:
            fd = self._open_unnamed()
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            why = "has no room for" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "takes no file of"
            raise TierFull(
                f"the disk under {self.folder} {why} another {nbytes} bytes ({error.strerror}); {self.allocated} bytes "
                f"are allocated there"
            ) from error
        self._slabs[fd], self._slab = nbytes, fd
        self.allocated += nbytes
        self.allocations += 1
        self._slab_left, self._slab_offset = nbytes, 0

    def write(self, slot: Slot, buffers: Sequence[Any]) -> None:
        end = slot.offset
        with _naming(self.folder):
            for chunk in self._chunks(buffers):
                end += _write_all(slot.place, chunk, end)

    def _chunks(self, buffers: Sequence[Any]) -> Iterator[list[memoryview]]:
        """What is written at once."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if self._bounce is None:
            for first in range(0, len(views), _MOST_BUFFERS):
                yield views[first : first + _MOST_BUFFERS]
            return
        bounce = memoryview(self._bounce)
        filled = 0
        for view in views:
            while len(view):
                some = view[: len(bounce) - filled]
                _copy(bounce[filled : filled + len(some)], some)
                filled, view = filled + len(some), view[len(some) :]
                if filled == len(bounce):
                    yield [bounce]
                    filled = 0
        if filled:
            yield [bounce[: -(-filled // SLOT_ALIGNMENT) * SLOT_ALIGNMENT]]

    def read(self, slot: Slot, array: np.ndarray) -> None:
        if self._bounce is None:
            self._read_all(slot.place, memoryview(array.data), slot.offset)
            return
        view = memoryview(array.data)
        for begin in range(0, len(view), _CHUNK_BYTES):
            some = view[begin : begin + _CHUNK_BYTES]
            bounce = memoryview(self._bounce)[: -(-len(some) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT]
            self._read_all(slot.place, bounce, slot.offset + begin)
            _copy(some, bounce[: len(some)])

    def _read_all(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            with _naming(self.folder):
                count = os.preadv(fd, [view[done:]], offset + done)
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
        self._unused.clear()
        self._free.clear()
        self.allocated = self._slab_left = 0


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """The system's errors name no file that is known by its descriptor only."""
    try:
        yield
    except OSError as error:
        raise error if error.errno is None else OSError(error.errno, error.strerror, str(folder)) from error


def _write_all(fd: int, views: list[memoryview], offset: int) -> int:
    """Write all of the views, one after the other; how many bytes that were."""
    total = sum(len(view) for view in views)
    done = os.pwritev(fd, views, offset)
    while done < total:  # the system may take less than it is given
        left, rest = done, []
        for view in views:
            if left < len(view):
                rest.append(view[left:])
            left = max(0, left - len(view))
        count = os.pwritev(fd, rest, offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the disk took {done} of {total} bytes, and no more")
        done += count
    return total


def _copy(to: memoryview, source: memoryview) -> None:
    ctypes.memmove(_address(to), _address(source), len(source))  # lets other threads run, which slices don't


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]
