"""`SwapEngine`: moves swapped tensors between the device and a tier, on a thread of its own.

Note: [An engine that can't be relied on]
A KeyboardInterrupt may come between any two steps of the bookkeeping, and leave it half done; so may a bug in a job of
the copy thread. Such an engine is broken: whatever asks it for something raises SwapStateError, nobody waits for it,
and the manager replaces it. Only what the failed step has swapped is lost with it.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory import marks
from hyper_parallel.core.activation_memory.swap_by_hand import ByHand
from hyper_parallel.core.activation_memory.swap_group import SwapGroup, SwapHandle
from hyper_parallel.core.activation_memory.swap_in import Loads
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_out import Offloads, fused
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from hyper_parallel.core.activation_memory.swap_tensor import Piece, SwapState, SwapTensor
from hyper_parallel.core.errors import ActivationMemoryError, SwapStateError
from ms_ops.copy_thread import CopyThread
from ms_ops.host import Tier, slot_bytes
from ms_ops.storage import Layout, Storage
from ms_ops.tensors import storage_of

_MOST_FUSED_BYTES = 4 * 2**20

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _all_or_broken(method: _Method) -> _Method:
    """Break the engine if something that nobody expects ends this method of it early."""

    @functools.wraps(method)
    def run(self: "SwapEngine", *args: Any, **kwargs: Any) -> Any:
        try:
            self.ledger.check()
            return method(self, *args, **kwargs)
        except ActivationMemoryError:
            raise
        except BaseException as error:
            if error is not self.ledger.interrupted:
                self.breaks(error)
            self.ledger.interrupted = None
            raise

    return run  # type: ignore[return-value]


class SwapEngine:
    """One engine per configuration; thread-safe, except that a group belongs to the thread that fills it.

    Args:
        settings: The limits.
        tier: Where tensors go.
        ledger: Counts on from an engine before it.
    """

    def __init__(self, settings: SwapSettings, tier: Tier, ledger: Ledger | None = None) -> None:
        self.settings = settings
        self.tier = tier
        self.ledger = ledger or Ledger()
        self.dead: deque[SwapTensor] = deque()
        """Transfers whose handle died, once per handle; filled by finalizers."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = CopyThread(self._lock, self.breaks)
        self._groups: dict[int, SwapGroup] = {}
        self._group_count = 0
        self._by_address: dict[int, tuple[SwapTensor, Piece]] = {}
        """What is on the device, by where its storage begins: the address may be used again afterwards."""
        self._last_bytes: dict[str, int] = {}
        self._offloads = Offloads(settings, tier, self.ledger, self._changed, self._thread, self._leaves_device)
        self._loads = Loads(
            settings, tier, self.ledger, self._changed, self._thread, self._offloads, self._groups, self._reap
        )
        self._by_hand = ByHand(self.ledger, self._changed, self._offloads, self._loads, self._groups)

    # ---- forward

    @_all_or_broken
    def open_group(self, path: str, **about: Any) -> SwapGroup:
        """A group for one call of the region `path`; the rest is as `SwapGroup` takes it."""
        with self._lock:
            index = self._group_count = self._group_count + 1
            if self.ledger.trace is not None:
                self.ledger.trace.computes(f"forward {path}")
        return SwapGroup(self, path, index, **about)

    @_all_or_broken
    def count(self, path: str, name: str, amount: float) -> None:
        """Add to a counter of the region `path`."""
        with self._lock:
            self.ledger.count(path, name, amount)

    @_all_or_broken
    def has_room(self, path: str) -> bool:
        """Whether the tier can take what the region `path` sent last time (or the largest region, if it is new)."""
        with self._lock:
            self._reap()
            needed = self._last_bytes.get(path) or max(self._last_bytes.values(), default=1)
            return self.tier.used + self._offloads.deferred_slot_bytes + needed <= self.tier.limit

    @_all_or_broken
    def region_begins(self, path: str = "") -> None:
        """There is computation after what this thread's last group holds: launch it, and keep to the limit."""
        if self._offloads.is_idle:
            return
        with self._lock:
            self._reap()
            self._offloads.raise_failure(self._group_count)
            self._offloads.begin_region()
            limit = self.settings.pending
            self.ledger.wait(self._changed, lambda: self._offloads.backlog <= limit, path, "offload")

    def close_group(self, group: SwapGroup, handles: list[SwapHandle]) -> None:
        """Take over what the region saved. The only wait for operators: Note [One wait per group]."""
        if not handles:
            self._count_left(group)
            return
        # without the lock: the copy thread must go on while this waits
        storages = [Storage.of(handle.tensor) for handle in handles]
        left_alone = self._left_alone(group, handles, storages)
        self._take_over(group, handles, storages, left_alone, group.held_elsewhere())

    @_all_or_broken
    def _take_over(
        self,
        group: SwapGroup,
        handles: list[SwapHandle],
        storages: list[Storage | None],
        left_alone: dict[int, str],
        held: dict[int, list[Callable[[], Any]]],
    ) -> None:
        with self._lock:
            self._reap()
            self._offloads.raise_failure(self._group_count)
            self._offloads.end_region()
            self._count_left(group)
            taken: list[tuple[SwapHandle, int, Layout]] = []
            new: dict[int, Piece] = {}
            for handle, storage in zip(handles, storages, strict=True):
                tensor = handle.tensor
                assert tensor is not None
                if storage is None or (why := left_alone.get(storage.address, "")):
                    why = "held_bytes" if storage is None else why
                    self.ledger.count(group.path, why, tensor.nbytes)
                    continue
                address, layout = storage.address, storage.layout_of(tensor)
                if address in new or address in self._by_address:
                    self.ledger.count(group.path, "duplicate_bytes", tensor.nbytes)
                else:
                    new[address] = Piece(storage, layout, held.get(address))
                taken.append((handle, address, layout))
            if new:
                self._add(group, list(new.values()))
            for handle, address, layout in taken:
                entry, handle.piece = self._by_address[address]
                entry.handles += 1
                handle.entry, handle.layout, handle.tensor = entry, layout, None
            if not group.is_manual:
                self._offloads.hold(group.entries)

    @_all_or_broken
    def _count_left(self, group: SwapGroup) -> None:
        with self._lock:
            for name, nbytes in group.left.items():
                self.ledger.count(group.path, name, nbytes)

    @staticmethod
    def _left_alone(group: SwapGroup, handles: list[SwapHandle], storages: list[Storage | None]) -> dict[int, str]:
        """Why storages are left alone, by their address. One question for each, however often it was saved."""
        found = {**dict.fromkeys(marks.storages(group.left_alone), "kept_bytes"), **group.owned_elsewhere()}
        if group.has_tensor_policy:
            wanted = {storage_of(tensor) for tensor in group.registered}
            for handle, storage in zip(handles, storages, strict=True):
                if storage is not None and storage.address not in found:
                    wants = storage.address in wanted or group.wants(handle.tensor)
                    found[storage.address] = "" if wants else "kept_bytes"
        return found

    def _add(self, group: SwapGroup, new: list[Piece]) -> None:
        """Make the transfers of what is new; all of them, or none."""
        small, transfers = [], []
        for piece in new:
            if piece.nbytes < self.settings.fuse_below and not piece.is_held_elsewhere:
                small.append(piece)
            else:
                transfers.append([piece])
        transfers += fused(small, max(_MOST_FUSED_BYTES, *(piece.nbytes for piece in small))) if small else []
        made = []
        try:
            for pieces in transfers:
                entry = SwapTensor(pieces, group)
                made.append(entry)
                if not entry.is_held_elsewhere:
                    self._offloads.take_slot(entry)
        except BaseException:
            for entry in made:
                self._offloads.free_slot(entry)
            raise
        group.entries += made
        group.live += len(made)
        self._groups[group.index] = group
        self._last_bytes[group.path] = sum(slot_bytes(entry.span) for entry in made)
        self.ledger.move("resident", sum(entry.nbytes for entry in made))
        for entry in made:
            for piece in entry.pieces:
                self._by_address[piece.address] = entry, piece

    # ---- backward

    @_all_or_broken
    def fetch(self, handle: SwapHandle) -> "Tensor | np.ndarray":
        """The tensor that a handle stands for, or the bytes of the storage in which it lies."""
        entry, piece = handle.entry, handle.piece
        with self._lock:
            self._reap()
            state = entry.state
            if state is SwapState.RELEASED:
                raise SwapStateError(f"{entry} is read after its release: {entry.why_released}")
            if state is SwapState.RESIDENT or state is SwapState.OFFLOADING:
                self._stay(entry)
                self._loads.reads(entry.group)
                entry.was_read = True
                assert piece.storage is not None
                return piece.storage.array()
            self._loads.get(entry)
            if entry.tensor is not None and handle.layout is entry.first:
                return entry.tensor
            assert entry.buffer is not None
            return entry.buffer if len(entry.pieces) == 1 else entry.buffer[piece.offset : piece.offset + piece.nbytes]

    def _stay(self, entry: SwapTensor) -> None:
        """Backward has come to it before it left."""
        self._offloads.cancel(entry)
        if entry.state is SwapState.RESIDENT and not entry.stays:
            is_held = entry.begins_waited or entry.is_held_elsewhere
            self._offloads.stay(entry, "held_bytes" if is_held else "cancelled_bytes")

    @_all_or_broken
    def by_hand(self, name: str, action: str) -> None:
        """Launch or wait for the transfers of a group; see `ByHand`."""
        with self._lock:
            self._reap()
            self._by_hand.run(name, action, self._group_count)

    @_all_or_broken
    def is_last(self, name: str) -> bool:
        """Whether the newest group of this thread that holds swapped tensors has this name."""
        with self._lock:
            self._reap()
            return self._by_hand.is_last(name)

    # ---- the end of an entry

    def _reap(self) -> None:
        """Release what nobody will read any more: the handles died."""
        while self.dead:
            entry = self.dead.popleft()
            entry.handles -= 1
            if entry.handles == 0 and entry.state is not SwapState.RELEASED:
                self._release(entry)
        self._loads.take_back()

    def _release(self, entry: SwapTensor) -> None:
        was = entry.state
        if was is SwapState.RESIDENT or was is SwapState.OFFLOADING:
            self._offloads.cancel(entry)
            self._drop(entry)
        else:
            if was is not SwapState.ON_HOST:
                self._loads.cancel(entry)
            self.ledger.move("host", -entry.nbytes)
        entry.move(SwapState.RELEASED)
        if not entry.busy:
            self._offloads.free_slot(entry)
        group = entry.group
        group.live -= 1
        if group.live == 0:
            self._groups.pop(group.index, None)
            self._loads.forget(group)

    def _leaves_device(self, entry: SwapTensor) -> None:
        self._drop(entry)

    def _drop(self, entry: SwapTensor) -> None:
        self.ledger.move("resident", -entry.nbytes)
        for piece in entry.pieces:
            if piece.storage is not None:
                self._by_address.pop(piece.address, None)
            piece.storage = None

    @_all_or_broken
    def abort(self) -> None:
        """Give up everything that this thread has swapped, or one that has ended."""
        with self._lock:
            self._reap()
            self._offloads.forget_failure(self._group_count)
            others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
            for group in list(self._groups.values()):
                for entry in group.entries:
                    if entry.state is not SwapState.RELEASED and group.thread not in others:
                        entry.why_released = "abort_step() gave up the step that it belongs to"
                        self._release(entry)

    # ---- what is asked from outside

    @_all_or_broken
    def live_bytes(self) -> int:
        """Bytes held on the device, on host, or in flight."""
        with self._lock:
            self._reap()
            return self.ledger.now["resident"] + self.ledger.now["host"]

    @_all_or_broken
    def stats(self) -> SwapStats:
        """Counters and peaks."""
        with self._lock:
            self._reap()
            return self.ledger.stats(self.tier.allocated, self.tier.allocations)

    @_all_or_broken
    def reset(self) -> None:
        """Begin to count anew, and give back what the tier has free."""
        with self._lock:
            self._reap()
            self.ledger.reset()
            self.tier.allocations = 0
            self.tier.trim()

    def breaks(self, error: BaseException) -> None:
        """Note: [An engine that can't be relied on]. Called with or without the lock."""
        if self.ledger.broken is None:
            self.ledger.broken = error
        with self._lock:
            self._changed.notify_all()

    def leave_to_the_parent(self) -> None:
        """In a forked child: the copy thread, and whoever held the lock, exist in the parent only."""
        self.ledger.broken = ChildProcessError("this process was forked after the forward")
        self.tier.close()

    def close(self) -> None:
        """Stop the thread and give the tier's memory back."""
        self._thread.stop()
        self.tier.close()
