"""`Loads`: what comes back from host.

Note: [Prefetch]
Backward reads nodes in reverse, so that transfers are loaded from the group that is being read, then from the groups
before it, latest first, as long as the bytes loaded and not given up yet fit into the window.

Note: [The window is kept]
What is loaded counts until its memory is given up, which is when the last operator that reads it has run. Backward
dispatches operators long before they run; when it has come further than the window allows, it waits for them.
"""

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.activation_memory import prefetch_layers
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_out import Offloads
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_tensor import SwapState, SwapTensor
from hyper_parallel.core.errors import HostMemoryError, SwapStateError
from ms_ops.autograd import wait_for_operators
from ms_ops.copy_thread import CopyThread
from ms_ops.host import Tier
from ms_ops.storage import tensor_over

_GROUPS_AHEAD = 2


class _Reader:
    """What one thread's backward reads."""

    def __init__(self) -> None:
        self.group: Any = None
        self.to_load: deque[SwapTensor] = deque()


class Loads:
    """Transfers from the moment when they are wanted until their memory is given up. Used under the engine's lock.

    Args:
        settings: The limits.
        tier: Where they come from.
        ledger: Counts.
        changed: The engine's condition variable.
        thread: The copy thread.
        offloads: The way out.
        groups: The live groups, by their index.
        reap: Releases what nobody will read any more.
    """

    def __init__(
        self,
        settings: SwapSettings,
        tier: Tier,
        ledger: Ledger,
        changed: threading.Condition,
        thread: CopyThread,
        offloads: Offloads,
        groups: dict[int, Any],
        reap: Callable[[], None],
    ) -> None:
        self._settings, self._tier, self._ledger = settings, tier, ledger
        self._changed, self._thread, self._offloads, self._groups = changed, thread, offloads, groups
        self._reap = reap
        self._readers: dict[int, _Reader] = {}
        self._buffers: dict[int, tuple[weakref.ref, int, SwapTensor]] = {}
        self._given_up: deque[int] = deque()
        """Keys of buffers whose memory is free; filled by finalizers, which run on MindSpore's threads, too."""
        self._count = 0
        self._loaded: dict[int, SwapTensor] = {}
        """Loaded, and not read yet, in the order of loading."""

    # ---- on the thread that reads

    def get(self, entry: SwapTensor) -> None:
        """See to it that a transfer which has left the device is there again.

        Raises:
            HostMemoryError: They can't be read, or aren't what left.
        """
        reader = self._enter(entry.group)
        if entry.buffer is None:
            self._get_late(entry, reader)
        entry.was_read = True
        self._loaded.pop(id(entry), None)
        if reader.to_load:
            self._prefetch(reader)

    def _get_late(self, entry: SwapTensor, reader: _Reader) -> None:
        path = entry.group.path
        entry.error = None
        while entry.buffer is None:  # a tensor that was loaded may be evicted before this thread goes on
            if entry.state is SwapState.RELEASED:
                raise SwapStateError(f"{entry} is read after its release: {entry.why_released}")
            self.check(entry)
            if entry.state is SwapState.ON_HOST:
                self._ledger.count(path, "late_loads", 1)
                self._make_room(entry)
                if entry.state is SwapState.ON_HOST:  # making room lets other threads go on
                    self._load(entry, urgent=True)
            else:
                self._thread.hurry(entry)
            self._prefetch(reader)
            self._ledger.wait(self._changed, lambda: entry.state is not SwapState.LOADING, path, f"load {entry.label}")

    def check(self, entry: SwapTensor) -> None:
        """Raise HostMemoryError if the last load failed."""
        if entry.error is not None:
            raise HostMemoryError(
                f"{entry} can't be read back from the {self._tier.name} tier: {entry.error}; the step may be tried "
                f"again"
            ) from entry.error

    def reads(self, group: Any) -> None:
        """Backward reads something of this group that has not left the device."""
        self._prefetch(self._enter(group))

    def _enter(self, group: Any) -> _Reader:
        thread = threading.get_ident()
        reader = self._readers.get(thread)
        if reader is None:
            reader = self._readers[thread] = _Reader()
        if reader.group is not group:
            self._begin(reader, group)
        return reader

    def _begin(self, reader: _Reader, group: Any) -> None:
        reader.group = group
        self._offloads.forget(group)
        if self._ledger.trace is not None:
            self._ledger.trace.computes(f"backward {group.path}")
        earlier = [
            other
            for index, other in sorted(self._groups.items(), reverse=True)
            if index < group.index and other.thread == group.thread and not other.is_manual
        ]
        first = prefetch_layers.first_of(group.layers)
        if first:
            earlier.sort(key=lambda other: first.isdisjoint(other.layers))  # stable: the rest stays in its order
        ahead = [group, *earlier[:_GROUPS_AHEAD]] if not group.is_manual else []
        reader.to_load = deque(entry for each in ahead for entry in reversed(each.entries))

    def _prefetch(self, reader: _Reader) -> None:
        to_load = reader.to_load
        while to_load:
            entry = to_load[0]
            if entry.state is SwapState.ON_HOST and not entry.was_read:
                loaded = self._ledger.now["window"]
                if loaded and loaded + entry.nbytes > self._settings.window:
                    return
                self._load(entry, urgent=False)
            to_load.popleft()

    def _make_room(self, needed: SwapTensor) -> None:
        """Keep to the window: give up what was loaded too early, then wait for the operators that read the rest."""

        def fits() -> bool:
            self._reap()
            loaded = self._ledger.now["window"]
            return not loaded or loaded + needed.nbytes <= self._settings.window

        for entry in reversed(list(self._loaded.values())):
            if fits():
                return
            self._evict(entry)
        if not fits():
            begin = time.perf_counter()
            self._changed.release()
            try:
                wait_for_operators()
            finally:
                self._changed.acquire()
            self._reap()
            for key, (_, nbytes, entry) in list(self._buffers.items()):
                if entry.state is SwapState.RELEASED:  # no operator reads it any more: it is the user's now
                    del self._buffers[key]
                    self._ledger.move("window", -nbytes)
            self._ledger.waited(begin, needed.group.path, "operators")

    def _evict(self, entry: SwapTensor) -> None:
        if entry.state is SwapState.LOADED and not entry.was_read and not entry.is_wanted:
            del self._loaded[id(entry)]
            entry.move(SwapState.ON_HOST)
            entry.buffer = entry.tensor = None
            self._ledger.move("resident", -entry.nbytes)
            self._ledger.count(entry.group.path, "evicted_bytes", entry.nbytes)

    # ---- the copy

    def launch(self, entry: SwapTensor) -> None:
        """The user wants it: load it, whatever the window says."""
        entry.error = None
        entry.is_wanted = True
        self._load(entry, urgent=False)

    def _load(self, entry: SwapTensor, urgent: bool) -> None:
        entry.move(SwapState.LOADING)
        self._ledger.move("window", entry.nbytes)
        self._ledger.move("resident", entry.nbytes)
        self._thread.submit(entry, self._read, urgent=urgent)

    def cancel(self, entry: SwapTensor) -> None:
        """Nobody will read it any more."""
        if entry.state is SwapState.LOADING and not entry.busy and self._thread.cancel(entry):
            self._ledger.move("window", -entry.nbytes)
        self._loaded.pop(id(entry), None)
        self._ledger.move("resident", -entry.nbytes)
        entry.buffer = entry.tensor = None

    def _read(self, entry: SwapTensor) -> None:
        """On the copy thread, called with the lock held."""
        assert entry.state is SwapState.LOADING
        entry.busy = True
        begin = time.perf_counter()
        self._changed.release()
        error, buffer, tensor = None, None, None
        try:
            buffer = np.empty(entry.span, np.uint8)
            assert entry.slot is not None
            self._tier.read(entry.slot, buffer)
            if entry.checksum is not None and zlib.crc32(buffer.data) != entry.checksum:
                raise OSError("its bytes aren't those that left")
            if len(entry.pieces) == 1 and entry.first.strides is None:
                tensor = tensor_over(buffer, entry.first)
        except BaseException as caught:
            error, buffer, tensor = caught, None, None
        finally:
            self._changed.acquire()
        entry.busy = False
        if buffer is None or entry.state is SwapState.RELEASED:
            self._ledger.move("window", -entry.nbytes)
        if entry.state is SwapState.RELEASED:
            self._offloads.free_slot(entry)
        elif buffer is None:
            entry.error = error
            entry.move(SwapState.ON_HOST)
            self._ledger.move("resident", -entry.nbytes)
        else:
            self._follow(buffer, entry)
            entry.buffer, entry.tensor, entry.was_read = buffer, tensor, False
            self._loaded[id(entry)] = entry
            entry.move(SwapState.LOADED)
            self._ledger.count(entry.group.path, "loaded_bytes", entry.nbytes)
        if self._ledger.trace is not None:
            arrived = entry.nbytes if entry.state is SwapState.LOADED else 0
            self._ledger.trace.span(
                "load", entry.label, begin, time.perf_counter(), bytes=arrived, cell=entry.group.path
            )
        self._reap()
        for reader in list(self._readers.values()):
            self._prefetch(reader)
        self._changed.notify_all()

    # ---- memory that is given up

    def _follow(self, buffer: np.ndarray, entry: SwapTensor) -> None:
        key = self._count = self._count + 1
        given_up = self._given_up
        self._buffers[key] = (weakref.ref(buffer, lambda _: given_up.append(key)), entry.nbytes, entry)

    def take_back(self) -> None:
        """Count what has been given up since."""
        nbytes = 0
        while self._given_up:
            found = self._buffers.pop(self._given_up.popleft(), None)
            if found is not None:
                nbytes += found[1]
        if nbytes:
            self._ledger.move("window", -nbytes)

    def forget(self, group: Any) -> None:
        """Nothing of the group is left."""
        for thread, reader in list(self._readers.items()):
            if reader.group is group:
                del self._readers[thread]
