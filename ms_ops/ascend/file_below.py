"""`AscendFileBackEnd`: pinned memory is on the way only; behind it a copy thread writes files and reads them.

Note: [The host waits on the copy thread only]
Only the host can tell the file that a block has arrived in pinned memory: the copy thread asks the event, and sleeps
in between. The thread that trains does so never; it waits where the copy thread has not read yet what backward needs,
or has not written yet what takes the room of the next region in pinned memory. Both count as `wait_seconds`.

Note: [A block changes hands when the host knows]
The next user of a block may be the copy thread, which no stream holds back. So, other than a slot of `AscendBackEnd`, a
block isn't free when the owner's stream has been told to wait for its last copy, but when the copy thread has seen that
copy's end; also when nobody needs its bytes any more.

Note: [The copy thread dispatches nothing]
MindSpore's queue takes operators of one thread at a time, see `AscendBackEnd.later`. So the copy thread reads and
writes files, and asks events; what it has read is loaded by the training thread, which also pins memory for what is to
be read: that is an operator, too.
"""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ms_ops.ascend import order
from ms_ops.ascend.backend import AscendBackEnd, Batch
from ms_ops.ascend.events import Mark
from ms_ops.ascend.pinned import PinnedSlot
from ms_ops.copy_thread import CopyThread
from ms_ops.host import Slot, TierFull, WrittenTier

_ASKS_AGAIN = 0.0003
"""Seconds."""


class _Staged:
    """A transfer's block of pinned memory, as long as its bytes are there."""

    __slots__ = ("forgotten", "is_loading", "is_written", "jobs", "moved", "slot")

    def __init__(self, slot: PinnedSlot, is_written: bool) -> None:
        self.slot = slot
        self.moved: Mark | None = None
        """The end of the device's last copy from or to the block; None: the host knows that it has run."""
        self.is_written = is_written
        """The file has them, too."""
        self.is_loading = False
        self.jobs = 0
        """Of the copy thread."""
        self.forgotten = False

    @property
    def may_go(self) -> bool:
        return (self.is_written or self.forgotten) and self.moved is None and not self.is_loading and not self.jobs


class AscendFileBackEnd(AscendBackEnd):
    """As `AscendBackEnd`, with a file tier behind the pinned memory.

    Args:
        file: Where tensors wait.
        pinned: Most bytes of pinned memory.
        verify: Compare what comes back with what left.

    Raises:
        NotSupported: MindSpore lacks something.
        TierFull: `pinned` is more than the machine has.
    """

    def __init__(self, file: WrittenTier, pinned: int, verify: bool = False) -> None:
        super().__init__(pinned, verify)
        self.tier = self._file = file
        self._changed = threading.Condition(self.lock)
        self._files = CopyThread(self.lock, lambda error: self.failed(error))
        self._staged: dict[int, _Staged] = {}
        """By the id of the transfer."""
        self._writes = 0
        """Jobs that will give pinned memory back."""
        self._were_read: deque[Any] = deque()
        """Transfers whose bytes are in pinned memory again; the next call of the training thread loads them."""
        self._queued: deque[Any] = deque()
        """Transfers that are to be sent when there is room."""
        self._starved: deque[Any] = deque()
        """Transfers that are to be read when there is room."""

    def _pinned(self, transfer: Any) -> PinnedSlot:
        return self._staged[id(transfer)].slot

    # ---- to host

    def send(self, transfers: Sequence[Any]) -> None:
        self._queued.extend(transfers)
        self._launch_queued()

    def _launch_queued(self) -> None:
        """Send what there is room for."""
        some = []
        while self._queued and (slot := self._room_for(self._queued[0])) is not None:
            self._staged[id(self._queued[0])] = _Staged(slot, is_written=False)
            some.append(self._queued.popleft())
        if some:
            super().send(some)
        elif self._queued and not self._gives_room():
            transfer = self._queued.popleft()
            self.sent(transfer, self._no_room(transfer), time.perf_counter())

    def _room_for(self, transfer: Any) -> PinnedSlot | None:
        try:
            return self._pool.take(transfer.span)
        except TierFull:
            return None

    def _gives_room(self) -> bool:
        """Whether pinned memory will be given back by what goes on now."""
        return self._writes > 0 or any(staged.is_loading or staged.jobs for staged in self._staged.values())

    def _no_room(self, transfer: Any) -> OSError:
        return OSError(
            errno.ENOMEM,
            f"there is no room for {transfer.span} bytes in pinned memory, of which {self._pool.limit} may be used "
            f"on the way to the file and {self._pool.used} are in use",
        )

    def _recorded(self, batch: Batch, to_host: Any) -> None:
        moved = Mark()
        order.record_sent(moved.event, to_host)
        for transfer in batch.transfers:
            self._staged[id(transfer)].moved = moved
            self._writes += 1
            self._files.submit(transfer, self._write)

    def _write(self, transfer: Any) -> None:
        """On the copy thread, called with the lock held."""
        staged = self._staged[id(transfer)]
        self._until(order.is_sent, staged)
        error = None
        if not staged.forgotten:
            slot, parts = transfer.slot, _parts(staged.slot, transfer.span)
            staged.jobs += 1
            self.lock.release()
            try:
                self._file.write(slot, [part.data for part in parts])
            except BaseException as caught:  # nothing is lost: the bytes stay in pinned memory
                error = caught
            finally:
                self.lock.acquire()
            staged.jobs -= 1
        self._writes -= 1
        staged.is_written = error is None
        self._let_go(transfer, staged)
        if error is not None:
            self.troubled(transfer, error)
        self._changed.notify_all()

    def forget(self, transfer: Any) -> None:
        staged = self._staged.get(id(transfer))
        if staged is not None:
            staged.forgotten = True
            self._let_go(transfer, staged)

    def _let_go(self, transfer: Any, staged: _Staged) -> None:
        if staged.may_go and self._staged.get(id(transfer)) is staged:
            del self._staged[id(transfer)]
            self._pool.give_back(staged.slot)
            while self._starved:
                self._files.submit(self._starved.popleft(), self._read)

    # ---- to the device

    def load(self, transfers: Sequence[Any], urgent: bool = False) -> None:
        here = [transfer for transfer in transfers if id(transfer) in self._staged]
        for transfer in transfers:
            if id(transfer) not in self._staged:
                self._files.submit(transfer, self._read, urgent=urgent)
        self._load_staged(here)

    def _load_staged(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            self._staged[id(transfer)].is_loading = True
        if transfers:
            super().load(transfers)

    def _read(self, transfer: Any) -> None:
        """On the copy thread, called with the lock held."""
        try:
            slot = self._pool.take_pinned(transfer.span)
        except TierFull:
            self._starved.append(transfer)
            self._changed.notify_all()
            return
        order.begin_use_of_slot(transfer)
        staged = self._staged[id(transfer)] = _Staged(slot, is_written=True)
        staged.jobs += 1
        begin, error = time.perf_counter(), None
        self.lock.release()
        try:
            at = transfer.slot.offset
            for part in _parts(slot, transfer.span):
                self._file.read(Slot(part.nbytes, transfer.slot.place, at), part)
                at += part.nbytes
        except BaseException as caught:
            error = caught
        finally:
            self.lock.acquire()
        staged.jobs -= 1
        if error is None and transfer.is_needed:
            staged.is_loading = True
            self._were_read.append(transfer)
        else:
            self._drop(transfer, error, begin)
        self._changed.notify_all()

    def _drop(self, transfer: Any, error: BaseException | None, begin: float) -> None:
        """It isn't loaded after all."""
        staged = self._staged[id(transfer)]
        staged.is_loading = False
        order.end_use_of_slot(transfer)
        self._let_go(transfer, staged)
        self.arrived(transfer, None, error, begin)

    def advance(self, condition: Callable[[], bool], *loads: Any) -> None:
        self._launch_what_was_read()
        self._launch_queued()
        self._feed_starved()
        super().advance(condition, *loads)

    def _feed_starved(self) -> None:
        """Pin memory for what is to be read; see Note: [The copy thread dispatches nothing]."""
        slots = []
        while self._starved and (slot := self._room_for(self._starved[0])) is not None:
            slots.append(slot)
            self._files.submit(self._starved.popleft(), self._read)
        for slot in slots:  # the copy thread takes them
            self._pool.give_back(slot)
        while self._starved and not slots and not self._gives_room():
            transfer = self._starved.popleft()
            self.arrived(transfer, None, self._no_room(transfer), time.perf_counter())

    def _launch_what_was_read(self) -> None:
        needed = []
        while self._were_read:
            transfer = self._were_read.popleft()
            if transfer.is_needed:
                needed.append(transfer)
            else:
                self._drop(transfer, None, time.perf_counter())
        self._load_staged(needed)

    def end_unneeded(self) -> bool:
        self._launch_what_was_read()
        return super().end_unneeded()

    def _load_recorded(self, batch: Batch, to_device: Any) -> None:
        moved = Mark()
        order.record_loaded(moved.event, to_device)
        for transfer in batch.transfers:
            self._staged[id(transfer)].moved = moved
            self._files.submit((transfer, self._staged[id(transfer)]), self._has_been_read)

    def _has_been_read(self, loaded: tuple[Any, _Staged]) -> None:
        """On the copy thread: Note: [A block changes hands when the host knows]."""
        transfer, staged = loaded
        self._until(order.is_loaded, staged)
        staged.is_loading = False
        self._let_go(transfer, staged)
        self._changed.notify_all()

    def _until(self, has_run: Callable[[Any], bool], staged: _Staged) -> None:
        """On the copy thread, without the lock: ask until the device's last copy of a block has run."""
        moved = staged.moved
        if moved is None:
            return
        self.lock.release()
        try:
            while not has_run(moved.event):
                time.sleep(_ASKS_AGAIN)
        finally:
            self.lock.acquire()
        if staged.moved is moved:
            staged.moved = None

    def take_back(self, transfer: Any) -> bool:
        for queue in (self._queued, self._starved):
            if transfer in queue:
                queue.remove(transfer)
                return True
        return id(transfer) not in self._staged and self._files.cancel(transfer)

    def hurry(self, transfer: Any) -> None:
        if id(transfer) not in self._staged:
            self._files.hurry(transfer)

    def wait(self, condition: Callable[[], bool], *loads: Any) -> None:
        while not condition():
            self.advance(condition, *loads)
            if condition():
                return
            if self._starved and self._loads:
                self._end_loads(*[self._loads.popleft() for _ in range(len(self._loads))])
            else:
                self._changed.wait()

    def wake(self) -> None:
        self._changed.notify_all()

    def close(self) -> None:
        self._files.stop()
        super().close()
        self._pool.close()

    def leave_to_the_parent(self) -> None:
        self._file.close()


def _parts(slot: PinnedSlot, nbytes: int) -> list[Any]:
    """The arrays in which so many bytes lie."""
    found = []
    for part in slot.place:
        found.append(part[: min(part.nbytes, nbytes)])
        nbytes -= found[-1].nbytes
        if not nbytes:
            break
    return found
