"""`Loads`: what comes back from host.

Note: [Prefetch]
Backward reads nodes in reverse, so that transfers are loaded from the group that is being read, then from the groups
before it, latest first, as long as the bytes loaded and not given up yet fit into the window.

Note: [The window is kept]
What is loaded counts until its memory is given up, which is when the last operator that reads it has run. Backward
dispatches operators long before they run; when it has come further than the window allows, it waits for them.

Note: [Served]
A tensor that is there is taken without asking the engine. That backward comes to a group is noted, and done with by
whoever has time (Note: [Settled later]). Only when nothing is being loaded although something waits for room, the
engine has to be asked; otherwise the copy thread sees for itself what has died, whenever a load has ended.

Note: [Handed over]
Where memory is freed in order (`BackEnd.frees_in_order`), what backward has been given needs no room any more when the
next tensor is asked for: whatever that is copied into is handed out after the operators that read the first. So the
engine lets go of a transfer as soon as all its handles have been read, and nothing has to be waited for. It is on host
until its handles die, in case that it is read again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_memory import prefetch_layers
from hyper_parallel.core.activation_memory.scopes import unseen
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_limits import Limits
from hyper_parallel.core.activation_memory.swap_out import Offloads
from hyper_parallel.core.activation_memory.swap_tensor import SwapState, SwapTensor
from hyper_parallel.core.errors import HostMemoryError, SwapStateError
from ms_ops.backend import BackEnd

_GROUPS_AHEAD = 2


class _Reader:
    """What one thread's backward reads."""

    def __init__(self) -> None:
        self.group: Any = None
        self.to_load: deque[SwapTensor] | None = None
        """What is to be loaded next; None: not worked out yet."""


class Loads:
    """Transfers from the moment when they are wanted until their memory is given up. Used under the engine's lock.

    Args:
        limits: How much may be loaded ahead.
        back_end: Moves bytes.
        ledger: Counts.
        offloads: The way out.
        groups: The live groups, by their index.
        reap: Releases what nobody will read any more.
    """

    def __init__(
        self,
        limits: Limits,
        back_end: BackEnd,
        ledger: Ledger,
        offloads: Offloads,
        groups: dict[int, Any],
        reap: Callable[[], None],
    ) -> None:
        self._limits, self._ledger = limits, ledger
        self._back_end, self._tier, self._offloads, self._groups = back_end, back_end.tier, offloads, groups
        back_end.arrived = self._arrived
        self._in_order = back_end.frees_in_order
        self._reap = reap
        self._readers: dict[int, _Reader] = {}
        self._buffers: dict[int, tuple[Any, int, SwapTensor]] = {}
        self.given_up: deque[int] = deque()
        """Keys of buffers whose memory is free; filled by finalizers, which run on MindSpore's threads, too."""
        self._count = 0
        self._loaded: dict[int, SwapTensor] = {}
        """Loaded, and not read yet, in the order of loading."""
        self._loading: dict[int, SwapTensor] = {}
        self._last_end = 0.0
        """When the last copy has ended, for the trace."""

    # ---- on the thread that reads

    def get(self, entry: SwapTensor) -> None:
        """See to it that a transfer which has left the device is there again.

        Raises:
            HostMemoryError: They can't be read, or aren't what left.
        """
        reader = self._enter(entry.group, threading.get_ident())
        if entry.loaded is None:
            self._get_late(entry, reader)
        entry.was_read = True
        self._loaded.pop(id(entry), None)
        if self._in_order:
            self._prefetch(reader)

    def _get_late(self, entry: SwapTensor, reader: _Reader) -> None:
        path = entry.group.path
        entry.error = None
        while entry.loaded is None:  # a tensor that was loaded may be evicted before this thread goes on
            if entry.state is SwapState.RELEASED:
                raise SwapStateError(f"{entry} is read after its release: {entry.why_released}")
            self.check(entry)
            if entry.state is SwapState.ON_HOST:
                self._ledger.count(path, "late_loads", 1)
                self._make_room(entry)
                if entry.state is SwapState.ON_HOST:  # making room lets other threads go on
                    self._load([entry], urgent=True)
            else:
                self._back_end.hurry(entry)
            self._prefetch(reader)
            self._ledger.wait(self._back_end, entry.is_settled, path, f"load {entry.label}", entry)

    def hand_over(self, entry: SwapTensor, reader: int) -> None:
        """One of its handles, whose id is given, has been read: Note: [Handed over]."""
        if entry.readers is None:
            entry.readers, entry.unread = set(), entry.handles
        if reader not in entry.readers:
            entry.readers.add(reader)
            entry.unread -= 1
        if entry.unread <= 0 and entry.state is SwapState.LOADED:
            self._give_up(entry)

    def check(self, entry: SwapTensor) -> None:
        """Raise HostMemoryError if the last load failed."""
        if entry.error is not None:
            raise HostMemoryError(
                f"{entry} can't be read back from the {self._tier.name} tier: {entry.error}; the step may be tried "
                f"again"
            ) from entry.error

    def reads(self, group: Any, thread: int) -> None:
        """Backward reads something of this group on a thread, and need not wait for it."""
        reader = self._enter(group, thread)
        if self._in_order:
            self._prefetch(reader)

    def _enter(self, group: Any, thread: int) -> _Reader:
        reader = self._readers.get(thread)
        if reader is None:
            reader = self._readers[thread] = _Reader()
        if reader.group is not group:
            if reader.group is not None:
                reader.group.is_served = False
            reader.group, reader.to_load = group, None
            self._offloads.forget(group)
            group.is_served = self._may_serve(group)
            if self._ledger.trace is not None:
                self._ledger.trace.computes(f"backward {group.path}")
        return reader

    def _ahead(self, group: Any) -> deque[SwapTensor]:
        """What this group has on host and the groups before it, in the order in which backward will read it."""
        earlier = [
            other
            for index, other in sorted(self._groups.items(), reverse=True)
            if index < group.index and other.thread == group.thread and not other.is_manual
        ]
        first = prefetch_layers.first_of(group.layers)
        if first:
            earlier.sort(key=lambda other: first.isdisjoint(other.layers))  # stable: the rest stays in its order
        ahead = [group, *earlier[:_GROUPS_AHEAD]] if not group.is_manual else []
        return deque(entry for each in ahead for entry in reversed(each.entries))

    def _prefetch(self, reader: _Reader) -> None:
        if reader.to_load is None:
            reader.to_load = self._ahead(reader.group)
        to_load, window = reader.to_load, self._limits.window
        wanted: list[SwapTensor] = []
        loaded = self._ledger.now["window"]
        if self._in_order and loaded > window - window // 4:
            return  # a launch of several costs hardly more than one
        while to_load:
            entry = to_load[0]
            if entry.state is SwapState.ON_HOST and not entry.was_read:
                if loaded and loaded + entry.nbytes > window:
                    break
                wanted.append(entry)
                loaded += entry.nbytes
            to_load.popleft()
        if wanted:
            self._load(wanted, urgent=False)
        reader.group.is_served = self._may_serve(reader.group) and (bool(self._loading) or not to_load)

    def _may_serve(self, group: Any) -> bool:
        """Whether it may be read without asking: Note: [Served]. Not what the user moves, or what is handed over."""
        return not (self._in_order or group.is_manual)

    def go_on(self) -> None:
        """Memory may have been given up: load what has room now."""
        for reader in list(self._readers.values()):
            self._prefetch(reader)

    def _make_room(self, needed: SwapTensor) -> None:
        """Keep to the window: give up what was loaded too early, then wait for the operators that read the rest."""

        def fits() -> bool:
            self._reap()
            loaded = self._ledger.now["window"]
            return not loaded or loaded + needed.nbytes <= self._limits.window

        if self._in_order and not fits():
            self._back_end.advance(lambda: True, *self._loading.values())

        for entry in reversed(list(self._loaded.values())):
            if fits():
                return
            self._evict(entry)
        if not self._in_order and not fits():
            begin = time.perf_counter()
            self._back_end.wait_for_readers()
            self._reap()
            for _, _, entry in list(self._buffers.values()):
                if entry.state is SwapState.LOADED and entry.was_read and not fits():
                    self._give_up(entry)  # of a graph that is kept: it may be read again, and is loaded again then
            self._reap()
            for key, (_, nbytes, entry) in list(self._buffers.items()):
                # no operator reads it any more: it is the user's now
                if entry.state is SwapState.RELEASED or (entry.was_read and entry.loaded is None):
                    del self._buffers[key]
                    self._ledger.move("window", -nbytes)
            self._ledger.waited(begin, needed.group.path, "operators")

    def _evict(self, entry: SwapTensor) -> None:
        if entry.state is SwapState.LOADED and not entry.was_read and not entry.is_wanted:
            self._give_up(entry)
            self._ledger.count(entry.group.path, "evicted_bytes", entry.nbytes)

    def _give_up(self, entry: SwapTensor) -> None:
        """It is on host only, as far as the engine is concerned."""
        entry.move(SwapState.ON_HOST)
        self._loaded.pop(id(entry), None)
        self._let_go(entry)
        self._ledger.move("resident", -entry.nbytes)

    def _let_go(self, entry: SwapTensor) -> None:
        """Its memory may be used for something else; where that isn't in order, it shows later."""
        if self._in_order and entry.loaded is not None:
            self._ledger.move("window", -entry.nbytes)
        entry.loaded = None

    # ---- the copy

    def launch(self, entries: list[SwapTensor]) -> None:
        """The user wants these: load them, whatever the window says."""
        for entry in entries:
            entry.error = None
            entry.is_wanted = True
        if entries:
            self._load(entries, urgent=False)

    def _load(self, entries: list[SwapTensor], urgent: bool) -> None:
        for entry in entries:
            entry.move(SwapState.LOADING)
            self._ledger.move("window", entry.nbytes)
            self._ledger.move("resident", entry.nbytes)
            self._loading[id(entry)] = entry
        with unseen():
            self._back_end.load(entries, urgent)

    def cancel(self, entry: SwapTensor) -> None:
        """Nobody will read it any more."""
        if entry.state is SwapState.LOADING and not entry.busy and self._back_end.take_back(entry):
            self._ledger.move("window", -entry.nbytes)
            self._loading.pop(id(entry), None)
        self._loaded.pop(id(entry), None)
        self._ledger.move("resident", -entry.nbytes)
        self._let_go(entry)

    def _arrived(self, entry: SwapTensor, loaded: Any, error: BaseException | None, begin: float) -> None:
        """Its copy has ended; called with the lock held, on any thread."""
        self._loading.pop(id(entry), None)
        if error is not None or entry.state is SwapState.RELEASED:
            self._ledger.move("window", -entry.nbytes)
        if entry.state is SwapState.RELEASED:
            self._offloads.free_slot(entry)
        elif error is not None:
            entry.error = error
            entry.move(SwapState.ON_HOST)
            self._ledger.move("resident", -entry.nbytes)
        else:
            if not self._in_order:
                self._follow(loaded, entry)
            entry.loaded, entry.was_read, entry.readers = loaded, False, None
            self._loaded[id(entry)] = entry
            entry.move(SwapState.LOADED)
            self._ledger.count(entry.group.path, "loaded_bytes", entry.nbytes)
        if self._ledger.trace is not None:
            arrived = entry.nbytes if entry.state is SwapState.LOADED else 0
            begin, end = max(begin, self._last_end), time.perf_counter()  # Note: [Tracks of a trace]
            self._last_end = end
            self._ledger.trace.span("load", entry.label, begin, end, bytes=arrived, cell=entry.group.path)
        if not self._in_order:
            self._reap()
            self.go_on()

    # ---- memory that is given up

    def _follow(self, loaded: Any, entry: SwapTensor) -> None:
        key = self._count = self._count + 1
        self._buffers[key] = self._back_end.follow(loaded, self.given_up.append, key), entry.nbytes, entry

    def take_back(self) -> None:
        """Count what has been given up since."""
        nbytes = 0
        while self.given_up:
            found = self._buffers.pop(self.given_up.popleft(), None)
            if found is not None:
                nbytes += found[1]
        if nbytes:
            self._ledger.move("window", -nbytes)

    def forget(self, group: Any) -> None:
        """Nothing of the group is left."""
        for thread, reader in list(self._readers.items()):
            if reader.group is group:
                del self._readers[thread]
