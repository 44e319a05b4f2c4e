"""Where swapped tensors wait: tiers, and the host tier.

A tier hands out slots of a size and takes them back; one that isn't filled by the device writes bytes into a slot, and
reads a slot into an array. Slots are reused, so that after a first step nothing is allocated any more. A tier is not
thread-safe: `write` and `read` may run on a copy thread, everything else under its owner's lock.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SLOT_ALIGNMENT = 4096


class TierFull(Exception):
    """No slot of the asked size fits: `reason` says which limit, how full."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def slot_bytes(nbytes: int) -> int:
    """The size of the slot that so many bytes take."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


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
        self.allocations = 0
        """How often the system was asked for more."""
        self.used = 0
        """Bytes of the slots that are in use."""
        self._free: dict[int, list[Slot]] = defaultdict(list)

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes` bytes: a free one of that size, else a new one, else a larger free one.

        Raises:
            TierFull: The limit, or the disk, leaves no room.
        """
        size = slot_bytes(nbytes)
        if not self.used and not self._free.get(size):
            self._begin_anew()
        slot = self._free[size].pop() if self._free.get(size) else self._new_or_larger(size)
        self.used += slot.nbytes
        return slot

    def _begin_anew(self) -> None:
        """Nothing is in use, and this step begins with another size than those before: don't keep slots of theirs."""
        self.trim()

    def _new_or_larger(self, size: int) -> Slot:
        try:
            return self._grow(size)
        except TierFull:
            larger = min((free for free, slots in self._free.items() if free > size and slots), default=None)
            if larger is None:
                raise
            return self._free[larger].pop()

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
    def trim(self) -> None:
        """Give back to the system what is free, where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system."""


class WrittenTier(Tier):
    """A tier that is written and read by the processor, on a copy thread."""

    @abstractmethod
    def write(self, slot: Slot, buffers: Sequence[Any]) -> None:
        """Copy the bytes of the buffers into the slot, one after the other."""

    @abstractmethod
    def read(self, slot: Slot, array: np.ndarray) -> None:
        """Copy the slot's first bytes into the array of uint8."""


class HostTier(WrittenTier):
    """Slots in RAM, which host and device share on the CPU backend: it saves nothing there; tests, accounting."""

    name = "host"

    def _grow(self, size: int) -> Slot:
        self._check_limit(size)
        try:
            buffer = np.empty(size, np.uint8)
        except MemoryError as error:
            raise TierFull(f"there is no RAM for another {size} bytes; {self.allocated} bytes are allocated") from error
        self.allocated += size
        self.allocations += 1
        return Slot(size, buffer)

    def write(self, slot: Slot, buffers: Sequence[Any]) -> None:
        end = 0
        for buffer in buffers:
            begin, end = end, end + memoryview(buffer).nbytes
            slot.place[begin:end] = np.frombuffer(buffer, np.uint8)

    def read(self, slot: Slot, array: np.ndarray) -> None:
        array[:] = slot.place[: array.nbytes]

    def trim(self) -> None:
        self._free.clear()
        self.allocated = self.used

    def close(self) -> None:
        self._free.clear()
        self.allocated = 0
