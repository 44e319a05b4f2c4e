"""A tier that can be stopped, made to fail, and that checks how it is used."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from ms_ops.host import Slot, Tier


class FakeTier(Tier):
    """RAM; `gate` closed stops every copy before it begins, `failure` makes it raise."""

    name = "fake"

    def __init__(self, limit: int = 2**30) -> None:
        super().__init__(limit)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.log: list[tuple[str, int]] = []
        """What was done, with the first value of the array: which tensor it was."""
        self.broken_rules: list[str] = []
        self._taken: set[int] = set()
        self._count = 0

    def take(self, nbytes: int) -> Slot:
        slot = super().take(nbytes)
        if slot.offset in self._taken:
            self.broken_rules.append(f"slot {slot.offset} was handed out twice")
        self._taken.add(slot.offset)
        return slot

    def give_back(self, slot: Slot) -> None:
        if slot.offset not in self._taken:
            self.broken_rules.append(f"slot {slot.offset} was given back twice")
        self._taken.discard(slot.offset)
        super().give_back(slot)

    def _grow(self, size: int) -> Slot:
        self._check_limit(size)
        self.allocated += size
        self._count += 1
        return Slot(size, np.zeros(size, np.uint8), self._count)

    def _copy(self, what: str, slot: Slot) -> None:
        if not self.gate.wait(20):
            self.broken_rules.append("a copy waited for 20 seconds")
        if slot.offset not in self._taken:
            self.broken_rules.append(f"{what} in slot {slot.offset}, which is free")
        if self.failure is not None:
            raise self.failure

    def write(self, slot: Slot, array: np.ndarray) -> None:
        self._copy("write", slot)
        slot.place[: array.nbytes] = array.reshape(-1).view(np.uint8)
        self.log.append(("write", int(array.reshape(-1)[0])))

    def read(self, slot: Slot, array: np.ndarray) -> None:
        self._copy("read", slot)
        array.reshape(-1).view(np.uint8)[:] = slot.place[: array.nbytes]
        self.log.append(("read", int(array.reshape(-1)[0])))

    def trim(self) -> None:
        self._free.clear()
        self.allocated = self.used

    def close(self) -> None:
        self.trim()

    def first_values(self, what: str) -> list[int]:
        """Which tensors were written or read, in order."""
        return [value for done, value in self.log if done == what]


@contextmanager
def engine_with(tier: Tier, **settings: Any) -> Iterator[SwapEngine]:
    """An engine of its own, stopped afterwards."""
    engine = SwapEngine(SwapSettings(min_bytes=0, **settings), tier)
    try:
        yield engine
    finally:
        if isinstance(tier, FakeTier):
            tier.gate.set()
        engine.close()


def tensor_of(value: int, size: int = 1024) -> Tensor:
    """`size` float32 numbers that tell which tensor this is."""
    return Tensor(np.full(size, value, np.float32))


def group_of(engine: SwapEngine, *tensors: Tensor, path: str = "layer") -> list[SwapHandle]:
    """Close a group with these tensors."""
    group = engine.open_group(path)
    with group:
        handles = [group.add(tensor) for tensor in tensors]
    return handles
