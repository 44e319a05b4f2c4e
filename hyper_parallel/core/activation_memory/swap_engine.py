"""`SwapEngine`: moves swapped tensors between the device and the host, through a back end.

Note: [An engine that can't be relied on]
A KeyboardInterrupt may come between any two steps of the bookkeeping, and leave it half done; so may a bug in a job of
the copy thread. Such an engine is broken: whatever asks it for something raises SwapStateError, nobody waits for it,
and the manager replaces it. Only what the failed step has swapped is lost with it.
"""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from mindspore import Tensor

from hyper_parallel.core.activation_memory.scopes import unseen
from hyper_parallel.core.activation_memory.swap_by_hand import ByHand
from hyper_parallel.core.activation_memory.swap_group import SwapGroup, SwapHandle
from hyper_parallel.core.activation_memory.swap_in import Loads
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_limits import Limits
from hyper_parallel.core.activation_memory.swap_out import Offloads
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from hyper_parallel.core.activation_memory.swap_takeover import Closed, Takeovers
from hyper_parallel.core.activation_memory.swap_tensor import SwapState, SwapTensor
from hyper_parallel.core.errors import ActivationMemoryError, SwapStateError
from ms_ops.backend import BackEnd

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
        back_end: Moves bytes.
        ledger: Counts on from an engine before it.
    """

    def __init__(self, settings: SwapSettings, back_end: BackEnd, ledger: Ledger | None = None) -> None:
        self.settings = settings
        self.back_end = back_end
        back_end.failed = self.breaks
        self.tier = back_end.tier
        self.limits = Limits(settings, fit=not back_end.ends_by_itself)
        self.ledger = ledger or Ledger()
        self.dead: deque[SwapTensor] = deque()
        """Transfers whose handle died, once per handle; filled by finalizers."""
        self._lock = back_end.lock
        self._groups: dict[int, SwapGroup] = {}
        self._indices = itertools.count(1)
        self._group_count = 0
        self._offloads = Offloads(settings, self.limits, back_end, self.ledger, self._drop)
        self._loads = Loads(self.limits, back_end, self.ledger, self._offloads, self._groups, self._reap)
        self._takeovers = Takeovers(
            settings,
            self.limits,
            back_end,
            self.ledger,
            self._offloads,
            self._groups,
            self._loads.reads,
            self._carry_on,
        )
        self._by_hand = ByHand(self.ledger, back_end, self._offloads, self._loads, self._groups)
        self._in_order = back_end.frees_in_order
        self._has_unneeded = False
        """Transfers on their way that nobody will read."""
        self._reading: SwapGroup | None = None

    # ---- forward

    @_all_or_broken
    def open_group(self, path: str, **about: Any) -> SwapGroup:
        """A group for one call of the region `path`; the rest is as `SwapGroup` takes it."""
        index = self._group_count = next(self._indices)
        if self.ledger.trace is not None:
            with self._lock:
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
            last = self._takeovers.last_bytes
            needed = last.get(path) or max(last.values(), default=1)
            return self.tier.used + self._offloads.deferred_slot_bytes + needed <= self.tier.limit

    @_all_or_broken
    def region_begins(self, path: str = "") -> None:
        """There is computation after what this thread's last group holds: launch it, and keep to the limit."""
        limit = self.limits.pending
        if self._takeovers.is_pending:
            if self._offloads.failure is None and self._offloads.backlog + self._takeovers.noted_bytes <= limit:
                self._takeovers.note_begun()
                return
        elif self._offloads.is_idle and not self._has_unneeded:
            return
        with self._lock:
            self._reap()
            self._offloads.raise_failure(self._group_count)
            self._offloads.begin_region(threading.get_ident())
            self._end_unneeded()
            self.ledger.wait(self.back_end, lambda: self._offloads.backlog <= limit, path, "offload")

    def makes_way(self, group: SwapGroup) -> None:
        """A region that runs has saved more: what is on its way has to make room for it, bit by bit.

        Otherwise the device would hold what this region saves, beside all that the last one sends.
        """
        limit = max(0, self.limits.pending - int(group.saved * self._takeovers.unique))
        if self.ledger.now["pending"] > limit:
            self._make_way(limit)

    @_all_or_broken
    def _make_way(self, limit: int) -> None:
        with self._lock:
            self.back_end.advance(lambda: self._offloads.backlog <= limit)

    def close_group(self, group: SwapGroup, handles: list[SwapHandle]) -> None:
        """Take over what the region saved: now or soon, see Note: [Settled later]."""
        if handles:
            self._close(Closed(group, handles, self.back_end))
        else:
            self._count_left(group)

    @_all_or_broken
    def _close(self, closed: Closed) -> None:
        self._offloads.raise_failure(self._group_count)
        self._takeovers.note_closed(closed)
        self._offloads.raise_failure(self._group_count)

    @_all_or_broken
    def _count_left(self, group: SwapGroup) -> None:
        with self._lock:
            self._takeovers.count_left(group)

    @_all_or_broken
    def settle(self, tells: bool = True) -> None:
        """Do what was noted for later; raise what this thread must be told, unless it is not the time."""
        with self._lock:
            self._takeovers.settle()
            if tells:
                self._offloads.raise_failure(self._group_count)

    def _carry_on(self) -> None:
        """What can be done for the thread that trains: on the copy thread, if there is one."""
        self._reap()
        if not self._in_order:
            self._loads.go_on()

    # ---- backward

    @_all_or_broken
    def is_told(self, group: SwapGroup) -> bool:
        """Backward comes to a group: whether that is only noted, so that what is there may be read meanwhile."""
        group.is_unread = False
        if self.ledger.trace is not None:
            return False  # it tells who computes, and when
        group.is_served = True
        self._takeovers.note_reached(group)
        return True

    @_all_or_broken
    def fetch(self, handle: SwapHandle) -> Any:
        """The bytes on the device in which the tensor lies that a handle stands for."""
        entry, piece = handle.entry, handle.piece
        with self._lock:
            if self._in_order:
                self._reap()
                if self._has_unneeded and entry.group is not self._reading:
                    self._end_unneeded()
                self._reading = entry.group
            else:
                self._takeovers.settle()
                self.back_end.soon(self._carry_on)
            state = entry.state
            if state is SwapState.RELEASED:
                raise SwapStateError(f"{entry} is read after its release: {entry.why_released}")
            if state is SwapState.RESIDENT or state is SwapState.OFFLOADING:
                self._stay(entry)
                self._loads.reads(entry.group, threading.get_ident())
                entry.was_read = True
                return self._hand_over(handle) if self._in_order else piece.storage
            self._loads.get(entry)
            loaded = entry.loaded
            if self._in_order:
                self._loads.hand_over(entry, id(handle))
            return loaded

    def _hand_over(self, handle: SwapHandle) -> Tensor:
        """Give a handle what it stands for: from now on it is the handle's own, as without swapping."""
        entry, piece = handle.entry, handle.piece
        with unseen():
            handle.tensor = piece.storage.tensor(handle.layout, piece)
        entry.handles -= 1
        if entry.handles == 0:
            entry.why_released = "backward has read it on the device"
            self._release(entry)
        return handle.tensor

    def _stay(self, entry: SwapTensor) -> None:
        """Backward has come to it before it left."""
        self._offloads.cancel(entry)
        self._offloads.overtaken(entry)

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
        """Release what nobody will read any more, since the handles died, and do what was noted."""
        self._offloads.settle()
        while self.dead or self._takeovers.is_pending:
            while self.dead:
                entry = self.dead.popleft()
                entry.handles -= 1
                if entry.handles == 0 and entry.state is not SwapState.RELEASED:
                    self._release(entry)
            self._takeovers.settle()
            self._offloads.settle()
        if self._loads.given_up:
            self._loads.take_back()

    def _release(self, entry: SwapTensor) -> None:
        was = entry.state
        if was is SwapState.RESIDENT or was is SwapState.OFFLOADING:
            self._offloads.cancel(entry)
            if entry.was_read:
                self._offloads.overtaken(entry)  # if it was read before the engine knew that backward had come to it
            self._drop(entry)
        else:
            if was is not SwapState.ON_HOST:
                self._loads.cancel(entry)
            self.ledger.move("host", -entry.nbytes)
        entry.move(SwapState.RELEASED)
        entry.ready = None
        if not entry.busy:
            self._offloads.free_slot(entry)
        elif not self.back_end.ends_by_itself:
            self._has_unneeded = True
        group = entry.group
        group.live -= 1
        if group.live == 0:
            self._groups.pop(group.index, None)
            self._loads.forget(group)

    def _end_unneeded(self) -> None:
        """End what is on its way for nobody. Not at once: a while later it has ended by itself, and costs nothing."""
        if self._has_unneeded:
            self._has_unneeded = self.back_end.end_unneeded()

    def _drop(self, entry: SwapTensor) -> None:
        """Its bytes are not on the device any more, as far as the engine is concerned."""
        self.ledger.move("resident", -entry.nbytes)
        for piece in entry.pieces:
            if piece.storage is not None:
                self._takeovers.by_address.pop(piece.address, None)
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
            self._end_unneeded()

    # ---- what is asked from outside

    @_all_or_broken
    def live_bytes(self) -> int:
        """Bytes held on the device, on host, or in flight."""
        with self._lock:
            self._tidy()
            return self.ledger.now["resident"] + self.ledger.now["host"]

    @_all_or_broken
    def stats(self) -> SwapStats:
        """Counters and peaks."""
        with self._lock:
            self._tidy()
            return self.ledger.stats(self.tier.allocated, self.tier.allocations)

    @_all_or_broken
    def reset(self) -> None:
        """Begin to count anew, and give back what the tier has free."""
        with self._lock:
            self._tidy()
            self.ledger.reset()
            self.tier.allocations = 0
            self.tier.trim()

    def _tidy(self) -> None:
        """Let go of what nobody needs; what waits for its room may be launched, so not on every thread."""
        if self.back_end.may_launch():
            self._reap()
            self._end_unneeded()

    def breaks(self, error: BaseException) -> None:
        """Note: [An engine that can't be relied on]. Called with or without the lock."""
        if self.ledger.broken is None:
            self.ledger.broken = error
        with self._lock:
            self._takeovers.forget()
            for group in list(self._groups.values()):
                group.is_served = False
            self.back_end.wake()

    def leave_to_the_parent(self) -> None:
        """In a forked child: the copy thread, and whoever held the lock, exist in the parent only."""
        self.ledger.broken = ChildProcessError("this process was forked after the forward")
        self.back_end.leave_to_the_parent()

    def close(self) -> None:
        """Stop what runs, and give the host's memory back."""
        self.back_end.close()
