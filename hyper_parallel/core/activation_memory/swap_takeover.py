"""`Takeovers`: from the end of a region to the transfers of what it saved.

Note: [One wait per group]
Data is not ready when autograd saves a tensor, since operators run asynchronously; asking for a tensor's address waits
for every dispatched operator. A group only collects while its region runs. When the region ends, the first address
waits, the others are there.

Note: [Settled later]
When a region ends, the next one begins, or backward comes to one, the thread that trains only notes it: making
transfers, finding room on host and launching cost several times as much as asking for the storages, and can be done by
whoever has time. That is the copy thread, or the next thread that asks the engine for something, whoever comes first;
always in the order of what was noted. It is done at once where nothing may be launched but from the thread that
trains, where the user moves the group, and where the host may have to be asked for more room, so that the region itself
fails if there is none.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_memory import marks
from hyper_parallel.core.activation_memory.swap_group import VIEWS_AND_CASTS, SwapGroup, SwapHandle
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_limits import Limits
from hyper_parallel.core.activation_memory.swap_out import Offloads, fused
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_tensor import Piece, SwapTensor
from hyper_parallel.core.errors import HostMemoryError
from ms_ops.autograd import from_parameters
from ms_ops.backend import BackEnd
from ms_ops.host import SLOT_ALIGNMENT, slot_bytes
from ms_ops.tensors import storage_of


class Closed:
    """A region has ended: what it saved, and who else has a part in it. Made without the lock: it waits for operators.

    Args:
        group: The region's.
        handles: Those of its handles that live.
        back_end: Moves bytes.
    """

    __slots__ = ("_asked", "_back_end", "group", "handles", "held", "left_alone", "nbytes", "of_parameters", "thread")

    def __init__(self, group: SwapGroup, handles: list[SwapHandle], back_end: BackEnd) -> None:
        self._back_end, self.group, self.handles, self.thread = back_end, group, handles, group.thread
        tensors = [handle.tensor for handle in handles]
        self._asked = back_end.ask(tensors)
        self.of_parameters = from_parameters(tensors, VIEWS_AND_CASTS)
        """The places of handles whose tensors are views or casts of weights."""
        self.nbytes = group.saved + SLOT_ALIGNMENT * len(handles)
        """What will be on its way to host, and take room there: about so much; more if only parts of storages were
        saved."""
        self.left_alone = self._left_alone()
        self.held = group.held_elsewhere()

    def storages(self) -> list[Any]:
        """The storages in which the tensors of the handles lie, None for one that isn't on the device."""
        of = self._back_end.storage_of
        return [of(handle.tensor, asked) for handle, asked in zip(self.handles, self._asked, strict=True)]

    def leave(self) -> None:
        """Nothing of it will be taken over."""
        for handle in self.handles:
            if handle.tensor is not None:
                handle.leave()

    def _left_alone(self) -> dict[int, str]:
        """Why storages are left alone, by their address. One question for each, however often it was saved."""
        group = self.group
        found = dict.fromkeys(marks.storages(group.left_alone), "kept_bytes") | group.owned_elsewhere()
        if group.has_tensor_policy:
            wanted = {storage_of(tensor) for tensor in group.registered}
            for handle, storage in zip(self.handles, self.storages(), strict=True):
                if storage is not None and storage.address not in found:
                    wants = storage.address in wanted or group.wants(handle.tensor)
                    found[storage.address] = "" if wants else "kept_bytes"
        return found


class _Begun:
    """A region has begun on a thread: there is computation after what that thread has swapped."""

    __slots__ = ("thread",)
    nbytes = 0

    def __init__(self, thread: int) -> None:
        self.thread = thread


class _Reached:
    """Backward has come to a group on a thread."""

    __slots__ = ("group", "thread")
    nbytes = 0

    def __init__(self, group: SwapGroup) -> None:
        self.group, self.thread = group, threading.get_ident()


class Takeovers:
    """What regions have saved, and what has begun after it. Used under the engine's lock, but where it says so.

    Args:
        settings: The limits.
        limits: How much may be on its way.
        back_end: Moves bytes.
        ledger: Counts.
        offloads: The way out.
        groups: The live groups, by their index.
        reached: Called with a group to which backward has come, and the thread.
        carry_on: Settles, among other things; called by whoever has time.
    """

    def __init__(
        self,
        settings: SwapSettings,
        limits: Limits,
        back_end: BackEnd,
        ledger: Ledger,
        offloads: Offloads,
        groups: dict[int, SwapGroup],
        reached: Callable[[SwapGroup, int], None],
        carry_on: Callable[[], None],
    ) -> None:
        self.by_address: dict[int, tuple[SwapTensor, Piece]] = {}
        """What is on the device, by where its storage begins: the address may be used again afterwards."""
        self.last_bytes: dict[str, int] = {}
        """What each region has taken on host the last time."""
        self._settings, self._limits, self._ledger = settings, limits, ledger
        self._back_end, self._offloads, self._groups = back_end, offloads, groups
        self._noted: deque[Closed | _Begun | _Reached] = deque()
        self._is_settling = False
        self._reached, self._carry_on = reached, carry_on
        self.unique = 1.0
        """The part of what regions save that isn't saved twice."""

    # ---- without the lock

    @property
    def is_pending(self) -> bool:
        """Whether something noted is still to be done."""
        return bool(self._noted)

    @property
    def noted_bytes(self) -> int:
        """At most so many bytes will be on their way when what is noted is done."""
        return sum(item.nbytes for item in tuple(self._noted)) if self._noted else 0

    def note_closed(self, closed: Closed) -> None:
        """A region has ended."""
        closed.group.is_noted = True
        tier = self._back_end.tier
        room = tier.used + self._offloads.deferred_slot_bytes + self.noted_bytes + closed.nbytes
        self._note(closed, at_once=closed.group.is_manual or room > tier.allocated)

    def note_begun(self) -> None:
        """A region begins on this thread."""
        self._note(_Begun(threading.get_ident()))

    def note_reached(self, group: SwapGroup) -> None:
        """Backward comes to a group on this thread."""
        self._note(_Reached(group))

    def _note(self, item: Closed | _Begun | _Reached, at_once: bool = False) -> None:
        self._noted.append(item)
        if at_once:
            with self._back_end.lock:
                self.settle()
        elif len(self._noted) == 1 and not self._is_settling:  # else somebody is at it, or is about to
            self._back_end.soon(self._carry_on)

    # ---- with it

    def settle(self) -> None:
        """Do what was noted."""
        if self._is_settling:
            return  # it is this thread that does: it has the lock
        while self._noted:
            self._is_settling = True
            try:
                while self._noted:
                    try:
                        self._do(self._noted[0])
                    finally:
                        if self._noted:
                            self._noted.popleft()
            finally:
                self._is_settling = False

    def _do(self, item: Closed | _Begun | _Reached) -> None:
        try:
            if isinstance(item, _Begun):
                self._offloads.begin_region(item.thread)
            elif isinstance(item, _Reached):
                self._reached(item.group, item.thread)
            else:
                self._offloads.end_region(item.thread)
                self._take_over(item)
        except HostMemoryError as error:
            self._offloads.fails(item.thread, error)
        finally:
            if isinstance(item, Closed):
                item.group.is_noted = False  # last: then all its handles are taken over

    def _take_over(self, closed: Closed) -> None:
        group = closed.group
        self.count_left(group)
        left_alone, by_address = closed.left_alone, self.by_address
        taken: list[tuple[SwapHandle, Any]] = []
        new: dict[int, Piece] = {}
        for place, (handle, storage) in enumerate(zip(closed.handles, closed.storages(), strict=True)):
            address = 0 if storage is None else storage.address
            why = "held_bytes" if storage is None else left_alone.get(address)
            if place in closed.of_parameters:
                why = "parameter_bytes"
            if why:
                self._ledger.count(group.path, why, handle.nbytes)
                group.left[why] += handle.nbytes
                handle.leave()
                continue
            if address in new or address in by_address:
                self._ledger.count(group.path, "duplicate_bytes", handle.nbytes)
            else:
                new[address] = Piece(storage, closed.held.get(address))
            taken.append((handle, storage))
        if new:
            try:
                self._add(group, list(new.values()))
            except BaseException:
                closed.leave()
                raise
        for handle, storage in taken:
            entry, piece = by_address[storage.address]
            entry.handles += 1
            layout = piece.layout if storage is piece.storage or storage.layout == piece.layout else storage.layout
            handle.entry, handle.piece, handle.layout = entry, piece, layout
            handle.tensor = None  # last: somebody may be reading it
        if not group.is_manual:
            self._offloads.hold(group.entries)

    def count_left(self, group: SwapGroup) -> None:
        """Count what the group has left alone."""
        for name, nbytes in group.left.items():
            self._ledger.count(group.path, name, nbytes)

    def _add(self, group: SwapGroup, new: list[Piece]) -> None:
        """Make the transfers of what is new; all of them, or none."""
        small, transfers = [], []
        for piece in new:
            if piece.nbytes < self._settings.fuse_below and not piece.is_held_elsewhere:
                small.append(piece)
            else:
                transfers.append([piece])
        transfers += fused(small, max(self._limits.fused, *(piece.nbytes for piece in small))) if small else []
        made = []
        try:
            for pieces in transfers:
                entry = SwapTensor(pieces, group)
                made.append(entry)
                if not entry.is_held_elsewhere:
                    self._offloads.take_slot(entry)
            self._offloads.reserve(made)
        except BaseException:
            for entry in made:
                self._offloads.free_slot(entry)
            raise
        group.entries += made
        group.live += len(made)
        self._groups[group.index] = group
        self.last_bytes[group.path] = sum(slot_bytes(entry.span) for entry in made)
        nbytes = sum(entry.nbytes for entry in made)
        self._ledger.move("resident", nbytes)
        self._limits.has_seen(nbytes)
        if group.saved:
            self.unique = min(1.0, nbytes / group.saved)
        ready = self._back_end.ready()  # after the slots were taken: who used them comes before
        for entry in made:
            entry.ready = ready
            for piece in entry.pieces:
                self.by_address[piece.address] = entry, piece

    def forget(self) -> None:
        """The engine can't be relied on: nothing of what was noted will be done."""
        noted, self._noted = self._noted, deque()
        for item in noted:
            if isinstance(item, Closed):
                item.leave()
