"""`Offloads`: what is on its way to host.

Note: [What has no computation after it never leaves]
A closed group waits until the next region begins, or for a short grace, before its copies are launched. If backward
arrives first, which is how a step's last region ends, they are never launched.

Note: [What other code holds]
Moving a tensor that other code holds frees nothing. Such a transfer waits until the last of them has let go, which is
looked at whenever a region begins; if backward arrives first, it never leaves.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.core.activation_memory.scopes import unseen
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_limits import Limits
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_tensor import Piece, SwapState, SwapTensor
from hyper_parallel.core.errors import HostMemoryError
from ms_ops.backend import BackEnd
from ms_ops.host import TierFull, slot_bytes

GRACE_SECONDS = 0.02


class Offloads:
    """Transfers from the moment when their group closes until they are on host. Used under the engine's lock.

    Args:
        settings: The limits.
        limits: How much may be on its way.
        back_end: Moves bytes.
        ledger: Counts.
        on_host: Called when a transfer has left the device.
    """

    def __init__(
        self,
        settings: SwapSettings,
        limits: Limits,
        back_end: BackEnd,
        ledger: Ledger,
        on_host: Callable[[SwapTensor], None],
    ) -> None:
        self._failures: dict[int, HostMemoryError] = {}
        """Why a copy of what a thread swapped has failed, until that thread has been told."""
        self._told: dict[int, int] = {}
        """Up to which group each thread has been told: a step fails once, however many of its copies do."""
        self._settings, self._limits, self._ledger = settings, limits, ledger
        self._back_end, self._tier, self._on_host = back_end, back_end.tier, on_host
        back_end.sent, back_end.troubled = self._sent, self._troubled
        self._held: dict[int, list[SwapTensor]] = {}
        """What each thread's last group sends."""
        self._overtaken: list[SwapTensor] = []
        """On the device still when backward came to their group."""
        self._elsewhere: list[SwapTensor] = []
        """Held by other code."""
        self._waiting: deque[SwapTensor] = deque()
        """Launched, but above the limit `pending`."""
        self._waiting_bytes = 0
        self._last_end = 0.0
        """When the last copy has ended, for the trace."""

    @property
    def failure(self) -> HostMemoryError | None:
        """Why a copy of what this thread swapped has failed, if it has not been told yet."""
        return self._failures.get(threading.get_ident()) if self._failures else None

    @property
    def backlog(self) -> int:
        """Bytes that are launched and not on host yet."""
        return self._waiting_bytes + self._ledger.now["pending"]

    @property
    def deferred_slot_bytes(self) -> int:
        """What will probably need room on host, as soon as other code has let go of it."""
        if not self._elsewhere:
            return 0
        return sum(slot_bytes(entry.span) for entry in self._elsewhere if entry.begins_waited < 2)  # else: for good

    @property
    def is_idle(self) -> bool:
        """Whether a region may begin without asking."""
        return not self._held and not self._elsewhere and self.failure is None and self.backlog <= self._limits.pending

    def take_slot(self, entry: SwapTensor) -> bool:
        """Find room on host; False if there is none, so that it stays on the device.

        Raises:
            HostMemoryError: There is none, and that is not allowed for.
        """
        try:
            entry.slot = self._tier.take(entry.span)
            return True
        except TierFull as full:
            entry.stays = True
            if "keep" in self._settings.when_exhausted:
                self._keeps(entry)
                return False
            raise HostMemoryError(
                f"{entry.group.path}: no room on host for {entry}: {full.reason}; raise host_budget, give the file "
                f"tier another folder, swap fewer cells, or allow a fallback with when_exhausted=['recompute', 'keep']"
            ) from full

    def reserve(self, entries: list[SwapTensor]) -> None:
        """See to it that there is room for these when other code lets go of them.

        Where the grace of Note: [What has no computation after it never leaves] ends by itself, how many are launched
        depends on how fast a step is: the host would be asked for more in whichever step is the first slow one.
        """
        if not self._back_end.ends_by_itself:
            return
        slots = []
        with contextlib.suppress(TierFull):
            for entry in entries:
                if entry.is_held_elsewhere:
                    slots.append(self._tier.take(entry.span))
        for slot in slots:
            self._tier.give_back(slot)

    def hold(self, entries: list[SwapTensor]) -> None:
        """A group has closed: launch these when something comes after them."""
        if entries:
            self._held[entries[0].group.thread] = list(entries)
            self._back_end.later(GRACE_SECONDS, self._launch_all_held)

    def begin_region(self, thread: int) -> None:
        """There is computation after the group that this thread holds."""
        before = [entry for entry in self._elsewhere if entry.group.thread == thread]
        self._elsewhere = [entry for entry in self._elsewhere if entry.group.thread != thread]
        self.launch([*before, *self._held.pop(thread, ())])
        for entry in self._elsewhere:
            entry.begins_waited += entry.group.thread == thread

    def end_region(self, thread: int) -> None:
        """A group closes: there was computation after the one that this thread holds."""
        self.launch(self._held.pop(thread, ()))

    def _launch_all_held(self) -> None:
        """On the copy thread: nothing came after the groups for a while, so that they are no step's last ones."""
        held, self._held = self._held, {}
        for thread, entries in held.items():
            try:
                self.launch(entries)
            except HostMemoryError as error:
                self.fails(thread, error)

    def launch(self, entries: Iterable[SwapTensor]) -> None:
        """Send them, as far as the limit lets them go now."""
        try:
            for entry in entries:
                if entry.state is not SwapState.RESIDENT or entry.stays:
                    continue
                if entry.is_held_elsewhere:
                    self._elsewhere.append(entry)
                elif entry.slot is not None or self._take_slot_late(entry):
                    entry.move(SwapState.OFFLOADING)
                    self._waiting.append(entry)
                    self._waiting_bytes += entry.nbytes
        finally:
            self._submit()  # also when there is no room for one of them: somebody may wait for the others

    def _take_slot_late(self, entry: SwapTensor) -> bool:
        """After its group has closed: what has used the slot until now comes before the copy, too."""
        found = self.take_slot(entry)
        if found:
            entry.ready = self._back_end.ready(entry.ready)
        return found

    def is_deferred(self, entry: SwapTensor) -> bool:
        """Whether it is launched, but other code has held it so far."""
        return any(each is entry for each in self._elsewhere)

    def launch_deferred(self, entries: list[SwapTensor]) -> None:
        """The user waits for these: what other code still holds stays for good, so that what is waited for is known."""
        deferred = [entry for entry in entries if self.is_deferred(entry)]
        self._elsewhere = [entry for entry in self._elsewhere if entry not in deferred]
        for entry in deferred:
            if entry.is_held_elsewhere:
                self.stay(entry, "held_bytes")
        self.launch(deferred)

    def stay(self, entry: SwapTensor, why: str) -> None:
        """It stays on the device, and is counted as `why`."""
        self._ledger.count(entry.group.path, why, entry.nbytes)
        self.free_slot(entry)
        entry.stays = True

    def _submit(self) -> None:
        entries = []
        while self._waiting:
            entry = self._waiting[0]
            pending = self._ledger.now["pending"]
            if pending and pending + entry.nbytes > self._limits.pending:
                break
            self._waiting.popleft()
            self._waiting_bytes -= entry.nbytes
            self._ledger.move("pending", entry.nbytes)
            entries.append(entry)
        if entries:
            with unseen():
                self._back_end.send(entries)

    def cancel(self, entry: SwapTensor) -> None:
        """Backward needs it, or nobody does any more: it stays, unless it is being written already."""
        if entry.state is SwapState.RESIDENT:
            if entry in self._elsewhere:
                self._elsewhere.remove(entry)
            return
        if entry.state is not SwapState.OFFLOADING or entry.busy:
            return
        if self._back_end.take_back(entry):
            self._ledger.move("pending", -entry.nbytes)
        else:
            self._waiting.remove(entry)
            self._waiting_bytes -= entry.nbytes
        entry.move(SwapState.RESIDENT)
        if self._waiting:
            self._submit()

    def forget(self, group: Any) -> None:
        """Backward reads this group: what of it has not been launched yet, or is held by other code, stays."""
        held = self._held.get(group.thread)
        if held and held[0].group is group:
            self._overtaken += self._held.pop(group.thread)
        if self._elsewhere:
            self._overtaken += [entry for entry in self._elsewhere if entry.group is group]
            self._elsewhere = [entry for entry in self._elsewhere if entry.group is not group]

    def settle(self) -> None:
        """See to what `forget` left to be done."""
        overtaken, self._overtaken = self._overtaken, []
        for entry in overtaken:
            self.overtaken(entry)

    def overtaken(self, entry: SwapTensor) -> None:
        """Backward has come to it; if it is still on the device, it stays there."""
        if entry.state is SwapState.RESIDENT and not entry.stays:
            is_held = entry.begins_waited or entry.is_held_elsewhere
            self.stay(entry, "held_bytes" if is_held else "cancelled_bytes")

    def _sent(self, entry: SwapTensor, error: BaseException | None, begin: float) -> None:
        """Its copy has ended; called with the lock held, on any thread."""
        self._ledger.move("pending", -entry.nbytes)
        if entry.state is SwapState.RELEASED:
            self.free_slot(entry)
        elif error is not None:
            entry.move(SwapState.RESIDENT)  # nothing is lost: the bytes are still on the device
            self.free_slot(entry)
            if not entry.group.is_manual:  # else the user may launch it again
                entry.stays = True
                self._keeps(entry)
            self._troubled(entry, error)
        else:
            entry.move(SwapState.ON_HOST)
            entry.ready = None
            self._ledger.count(entry.group.path, "offloaded_bytes", entry.nbytes)
            self._ledger.move("host", entry.nbytes)
            self._on_host(entry)
        if self._ledger.trace is not None:
            arrived = entry.nbytes if entry.state is SwapState.ON_HOST else 0
            begin, end = max(begin, self._last_end), time.perf_counter()  # Note: [Tracks of a trace]
            self._last_end = end
            self._ledger.trace.span("offload", entry.label, begin, end, bytes=arrived, cell=entry.group.path)
        self._submit()

    def _troubled(self, entry: SwapTensor, error: BaseException) -> None:
        is_allowed = "keep" in self._settings.when_exhausted and isinstance(error, OSError)
        if not is_allowed and entry.group.index > self._told.get(entry.group.thread, 0):
            failure = HostMemoryError(
                f"{entry}: a copy to the {self._tier.name} tier failed: {error}; {self._tier.used} of "
                f"{self._tier.limit} bytes are in use there. Nothing is lost: the step may be tried again. If it goes "
                f"on, give the file tier another folder, swap fewer cells, or allow a fallback with "
                f"when_exhausted=['keep']"
            )
            failure.__cause__ = error
            self._failures[entry.group.thread] = failure

    def _keeps(self, entry: SwapTensor) -> None:
        """The host can't take it: a step of the ladder, which plans tell of."""
        self._ledger.count(entry.group.path, "kept_bytes", entry.nbytes)
        self._ledger.count(entry.group.path, "no_room_bytes", entry.nbytes)

    def free_slot(self, entry: SwapTensor) -> None:
        """The tier may use its slot again."""
        if entry.slot is not None:
            self._back_end.forget(entry)
            self._tier.give_back(entry.slot)
            entry.slot = None

    def fails(self, thread: int, error: HostMemoryError) -> None:
        """What a thread has swapped can't be moved: it is told when it asks next."""
        self._failures[thread] = error

    def forget_failure(self, newest: int) -> None:
        """What this thread has swapped up to the group `newest` is given up."""
        self._failures.pop(threading.get_ident(), None)
        self._told[threading.get_ident()] = newest

    def raise_failure(self, newest: int) -> None:
        """Tell this thread if a copy of what it has swapped, up to the group `newest`, has failed."""
        failure = self.failure
        if failure is not None:
            self.forget_failure(newest)
            raise failure


_ALIGNMENT = 64


def fused(pieces: list[Piece], most: int) -> list[list[Piece]]:
    """Small pieces in the transfers in which they travel, none larger than `most` bytes; sets their offsets."""
    transfers: list[list[Piece]] = []
    end = most
    for piece in pieces:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if begin + piece.nbytes > most:
            transfers.append([])
            begin = 0
        piece.offset = begin
        transfers[-1].append(piece)
        end = begin + piece.nbytes
    return transfers
