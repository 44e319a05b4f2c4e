"""A tier that can be stopped, made to fail, and that checks how it is used."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_tensor import SwapState
from ms_ops.cpu import CpuBackEnd
from ms_ops.host import Slot, WrittenTier


class FakeTier(WrittenTier):
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

    def write(self, slot: Slot, buffers: Sequence[Any]) -> None:
        self._copy("write", slot)
        whole = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in buffers])
        slot.place[: whole.nbytes] = whole
        self.log.append(("write", _first_value(whole)))

    def read(self, slot: Slot, array: np.ndarray) -> None:
        self._copy("read", slot)
        array[:] = slot.place[: array.nbytes]
        self.log.append(("read", _first_value(array)))

    def trim(self) -> None:
        self._free.clear()
        self.allocated = self.used

    def close(self) -> None:
        self.trim()

    def first_values(self, what: str) -> list[int]:
        """Which tensors were written or read, in order."""
        return [value for done, value in self.log if done == what]


def _first_value(whole: np.ndarray) -> int:
    return int(whole[:4].view(np.float32)[0]) if whole.nbytes >= 4 else 0


@contextmanager
def engine_with(tier: WrittenTier, **settings: Any) -> Iterator[SwapEngine]:
    """An engine of its own, stopped afterwards."""
    chosen = SwapSettings(**{"min_bytes": 0, "fuse_below": 0, **settings})
    engine = SwapEngine(chosen, CpuBackEnd(tier, chosen.verify))
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
    engine.settle()
    return handles


SIZE = 1024 * 4
"""Bytes of one tensor of these tests."""


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited for 10 seconds"
        time.sleep(0.001)


def on_host(handles: list[SwapHandle]) -> None:
    wait_for(lambda: all(handle.entry.state is SwapState.ON_HOST for handle in handles))


def value_of(handle: Any) -> int:
    array = handle.get().asnumpy()
    assert (array == array[0]).all()
    return int(array[0])


def three_layers(engine: SwapEngine, per_layer: int = 2) -> list[SwapHandle]:
    """Three groups on host: tensors 10, 11, then 20, 21, then 30, 31."""
    handles = []
    for layer in (1, 2, 3):
        handles += group_of(
            engine, *(tensor_of(10 * layer + index) for index in range(per_layer)), path=f"layers.{layer}"
        )
        engine.region_begins()
    on_host(handles)
    return handles
