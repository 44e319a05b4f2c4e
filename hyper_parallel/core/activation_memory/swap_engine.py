"""`SwapEngine`: moves swapped tensors between the device and a tier, on a thread of its own.

Note: [What has no computation after it never leaves]
A closed group waits until the next region begins, or for a short grace, before its copies are launched. If backward
arrives first, which is how a step's last region ends, they are never launched.

Note: [Prefetch]
Backward reads nodes in reverse, so that entries are loaded from the group that is being read, then from the groups
before it, latest entry first, as long as the bytes loaded and not yet given up fit into the window.
"""

import dataclasses
import threading
import time
from collections import deque
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory import marks, prefetch_layers
from hyper_parallel.core.activation_memory.swap_group import SwapGroup, SwapHandle
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from hyper_parallel.core.activation_memory.swap_tensor import SwapState, SwapTensor
from hyper_parallel.core.errors import HostMemoryError
from ms_ops.copy_thread import CopyThread
from ms_ops.host import Tier, TierFull
from ms_ops.tensors import address_of, over, storage_of, view_of

_GRACE_SECONDS = 0.02
_GROUPS_AHEAD = 2
_COUNTERS = tuple(
    field.name
    for field in dataclasses.fields(SwapStats)
    if field.name not in ("live_bytes", "host_live_bytes", "allocated_bytes")
)
_ON_DEVICE = (SwapState.RESIDENT, SwapState.OFFLOADING)


class SwapEngine:
    """One engine per configuration; thread-safe, except that a group belongs to the thread that fills it."""

    def __init__(self, settings: SwapSettings, tier: Tier) -> None:
        self.settings = settings
        self.tier = tier
        self.dead: deque[SwapTensor] = deque()
        """Entries whose handle died, once per handle; filled by finalizers."""
        self.counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self.resident_bytes = 0
        self.host_bytes = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = CopyThread(self._lock)
        self._held: list[SwapTensor] = []
        self._in_flight = 0
        self._by_key: dict[tuple, SwapTensor] = {}
        self._groups: dict[int, SwapGroup] = {}
        self._group_count = 0
        self._last_bytes: dict[str, int] = {}
        self._reading: SwapGroup | None = None
        self._to_load: deque[SwapTensor] = deque()
        self._loaded_bytes = 0
        self._failure: BaseException | None = None

    # ---- forward

    def open_group(self, path: str, tensor_policy: Any = None, layers: tuple[int, ...] = ()) -> SwapGroup:
        """A group for one call of the region `path`, inside these layers."""
        with self._lock:
            self._group_count += 1
            return SwapGroup(self, path, self._group_count, tensor_policy, layers)

    def count_exempt(self, tensor: Any, why: str) -> None:
        """Count a tensor that is left alone."""
        self.counts[f"{why}_bytes"] += tensor.nbytes

    def has_room(self, path: str) -> bool:
        """Whether the tier can take what the region `path` sent last time (or the largest region, if it is new)."""
        with self._lock:
            self._reap()
            needed = self._last_bytes.get(path) or max(self._last_bytes.values(), default=1)
            return self.tier.used + needed <= self.tier.limit

    def region_begins(self) -> None:
        """There is computation after the group that is held: launch it."""
        # in flight, too: the grace may have launched what was held
        if self._held or self._failure is not None or self._in_flight > self.settings.pending:
            with self._lock:
                self._raise_failure()
                self._launch_held()
                self._wait_until(lambda: self._in_flight <= self.settings.pending)

    def close_group(self, group: SwapGroup, handles: list[SwapHandle]) -> None:
        """Take over what the region saved. The only wait for operators: Note [One wait per group]."""
        # without the lock: the copy thread must go on while this waits
        arrays = [view_of(handle.tensor) for handle in handles]
        keys = [(address_of(array), array.shape, array.strides, array.dtype.str) for array in arrays]
        marked, registered = marks.storages(group.left_alone), {storage_of(tensor) for tensor in group.registered}
        group.left_alone.clear()
        group.registered.clear()

        def wants(tensor: Tensor) -> bool:
            storage = storage_of(tensor) if marked or registered else 0
            return storage not in marked and (storage in registered or group.wants(tensor))

        # one question for each tensor, however often it was saved
        wanted = {key: wants(handle.tensor) for key, handle in dict(zip(keys, handles, strict=True)).items()}
        with self._lock:
            self._reap()
            self._raise_failure()
            self._launch_held()
            for handle, array, key in zip(handles, arrays, keys, strict=True):
                if not wanted[key]:
                    self.counts["kept_bytes"] += array.nbytes
                    continue
                entry = self._entry_for(key, array, group)
                if entry is None:
                    continue
                entry.handles += 1
                handle.entry, handle.tensor = entry, None
            if group.entries:
                self._groups[group.index] = group
                self._last_bytes[group.path] = sum(entry.nbytes for entry in group.entries)
            self._held = list(group.entries)
            if self._held:
                self._thread.later(_GRACE_SECONDS, self._launch_held)

    def _entry_for(self, key: tuple, array: np.ndarray, group: SwapGroup) -> SwapTensor | None:
        entry = self._by_key.get(key)
        if entry is not None:
            self.counts["duplicate_bytes"] += array.nbytes
            return entry
        entry = SwapTensor(array, key, group)
        try:
            entry.slot = self.tier.take(array.nbytes)
        except TierFull as full:
            if "keep" in self.settings.when_exhausted:
                self.counts["kept_bytes"] += array.nbytes
                return None
            raise HostMemoryError(
                f"{group.path}: no room on host for {entry}: {full.reason}; raise host_budget, give the file tier "
                f"another folder, swap fewer cells, or allow a fallback with when_exhausted=['recompute', 'keep']"
            ) from full
        self._by_key[key] = entry
        group.entries.append(entry)
        group.live += 1
        self._add_resident(entry.nbytes)
        return entry

    def _launch_held(self) -> None:
        for entry in self._held:
            if entry.state is SwapState.RESIDENT and entry.slot is not None:
                entry.move(SwapState.OFFLOADING)
                self._in_flight += entry.nbytes
                self._thread.submit(entry, self._write)
        self._held = []

    def _write(self, entry: SwapTensor) -> None:
        """On the copy thread, called with the lock held."""
        if entry.state is not SwapState.OFFLOADING:
            return
        array, entry.busy = entry.array, True
        self._lock.release()
        error = None
        try:
            assert array is not None and entry.slot is not None
            self.tier.write(entry.slot, array)
        except BaseException as caught:  # raised to the user by the next call on a thread of theirs
            error = caught
        finally:
            del array
            self._lock.acquire()
        entry.busy = False
        self._in_flight -= entry.nbytes
        if entry.state is SwapState.RELEASED:
            self._free_slot(entry)
        elif error is not None:
            entry.move(SwapState.RESIDENT)  # nothing is lost: the bytes are still on the device
            self._failure = error
        else:
            entry.move(SwapState.ON_HOST)
            self.counts["offloaded_bytes"] += entry.nbytes
            self._add_host(entry.nbytes)
            self._drop_array(entry)
        self._changed.notify_all()

    # ---- backward

    def fetch(self, entry: SwapTensor) -> Any:
        """The tensor that `entry` stands for, on the device."""
        with self._lock:
            self._reap()
            if entry.state is SwapState.OFFLOADING and not entry.busy and self._thread.cancel(entry):
                entry.move(SwapState.RESIDENT)
                self._in_flight -= entry.nbytes
            if entry.state is SwapState.RESIDENT and entry.slot is not None and not entry.busy:
                self.counts["cancelled_bytes"] += entry.nbytes
                self._free_slot(entry)
            if entry.group is not self._reading:
                self._read_group(entry.group)
            if entry.state is SwapState.ON_HOST:
                self.counts["late_loads"] += 1
                self._load(entry, urgent=True)
            elif entry.state is SwapState.LOADING:
                self._thread.hurry(entry)
            self._prefetch()
            self._wait_until(lambda: entry.state is not SwapState.LOADING)
            if entry.array is None:
                error = entry.error
                raise HostMemoryError(f"{entry} can't be read back from the {self.tier.name} tier: {error}") from error
            return over(entry.array)

    def _read_group(self, group: SwapGroup) -> None:
        self._reading = group
        self._held = [entry for entry in self._held if entry.group is not group]
        earlier = [self._groups[index] for index in sorted(self._groups, reverse=True) if index < group.index]
        first = prefetch_layers.first_of(group.layers)
        if first:
            earlier.sort(key=lambda other: first.isdisjoint(other.layers))  # stable: the rest stays in its order
        self._to_load = deque(entry for g in (group, *earlier[:_GROUPS_AHEAD]) for entry in reversed(g.entries))

    def _prefetch(self) -> None:
        while self._to_load:
            entry = self._to_load[0]
            if entry.state is SwapState.ON_HOST:
                if self._loaded_bytes and self._loaded_bytes + entry.nbytes > self.settings.window:
                    return
                self._load(entry, urgent=False)
            self._to_load.popleft()

    def _load(self, entry: SwapTensor, urgent: bool) -> None:
        entry.move(SwapState.LOADING)
        self._loaded_bytes += entry.nbytes
        self._add_resident(entry.nbytes)
        self._thread.submit(entry, self._read, urgent=urgent)

    def _read(self, entry: SwapTensor) -> None:
        """On the copy thread, called with the lock held."""
        if entry.state is not SwapState.LOADING:
            return
        entry.busy = True
        self._lock.release()
        error, array = None, None
        try:
            array = np.empty(entry.shape, entry.dtype)
            assert entry.slot is not None
            self.tier.read(entry.slot, array)
        except BaseException as caught:
            error, array = caught, None
        finally:
            self._lock.acquire()
        entry.busy = False
        if entry.state is SwapState.RELEASED:
            self._free_slot(entry)
        elif error is not None:
            entry.error = error
            entry.move(SwapState.ON_HOST)
            self._loaded_bytes -= entry.nbytes
            self.resident_bytes -= entry.nbytes
        else:
            entry.array = array
            entry.move(SwapState.LOADED)
            self.counts["loaded_bytes"] += entry.nbytes
        self._changed.notify_all()

    # ---- the end of an entry

    def _reap(self) -> None:
        """Release what nobody will read any more: the handles died."""
        while self.dead:
            entry = self.dead.popleft()
            entry.handles -= 1
            if entry.handles == 0:
                self._release(entry)

    def _release(self, entry: SwapTensor) -> None:
        was = entry.state
        if was is SwapState.OFFLOADING and not entry.busy and self._thread.cancel(entry):
            self._in_flight -= entry.nbytes
        entry.move(SwapState.RELEASED)
        if was in (SwapState.LOADING, SwapState.LOADED):
            self._loaded_bytes -= entry.nbytes
            self.resident_bytes -= entry.nbytes
            entry.array = None
        elif was in _ON_DEVICE:
            self._drop_array(entry)
        if was in (SwapState.ON_HOST, SwapState.LOADING, SwapState.LOADED):
            self.host_bytes -= entry.nbytes
        if not entry.busy:
            self._free_slot(entry)
        group = entry.group
        group.live -= 1
        if group.live == 0:
            self._groups.pop(group.index, None)
            if self._reading is group:
                self._reading = None

    def _drop_array(self, entry: SwapTensor) -> None:
        self.resident_bytes -= entry.nbytes
        entry.array = None
        if entry.key is not None and self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]  # the address may be used again from now on

    def _free_slot(self, entry: SwapTensor) -> None:
        if entry.slot is not None:
            self.tier.give_back(entry.slot)
            entry.slot = None

    # ---- accounting

    def _add_resident(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.counts["resident_peak_bytes"] = max(self.counts["resident_peak_bytes"], self.resident_bytes)

    def _add_host(self, nbytes: int) -> None:
        self.host_bytes += nbytes
        self.counts["host_peak_bytes"] = max(self.counts["host_peak_bytes"], self.host_bytes)

    def _wait_until(self, condition: Any) -> None:
        if not condition():
            begin = time.perf_counter()
            self._changed.wait_for(condition)
            self.counts["wait_seconds"] += time.perf_counter() - begin

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise HostMemoryError(f"a copy to the {self.tier.name} tier failed: {failure}") from failure

    def live_bytes(self) -> int:
        """Bytes held on the device, on host, or in flight."""
        with self._lock:
            self._reap()
            return self.resident_bytes + self.host_bytes

    def reset(self) -> None:
        """Begin to count anew, and give back what the tier has free."""
        with self._lock:
            self._reap()
            self.counts = dict.fromkeys(self.counts, 0)
            self.counts["resident_peak_bytes"] = self.resident_bytes
            self.counts["host_peak_bytes"] = self.host_bytes
            self.tier.trim()

    def close(self) -> None:
        """Stop the thread and give the tier's memory back."""
        self._thread.stop()
        self.tier.close()
