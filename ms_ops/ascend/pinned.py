"""The pinned tier: slots in page-locked host memory, which the device reads and writes by itself.

Note: [Pinned memory in chunks]
Very large blocks of memory can't be pinned on real hosts, and pinning takes long. Memory is pinned in chunks of at most
256 MiB, from which slots are carved; a slot that is larger lies in several. A chunk is as large as what is needed now,
or a tenth of what is there already, so that hardly more is pinned than is used. Slots and chunks are used again: after
a first step nothing is pinned any more. MindSpore (2.10.0) pins 1 GiB at a time underneath, and keeps what is freed.

Note: [A slot's tensors begin at offset 0]
`copy_` between host and device takes its way through the device, and makes the host tensor one of the device's, if the
host tensor begins behind the begin of its storage (MindSpore 2.10.0, also for other types, shapes, strides). So the
tensors of a slot aren't slices of the chunk: they are made over the same memory by numpy, each a storage of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_ops.host import SLOT_ALIGNMENT, Slot, Tier, TierFull, slot_bytes
from ms_ops.memory import container_bytes
from ms_ops.storage import array_type
from ms_ops.tensors import address_of, over, view_of

CHUNK_BYTES = 256 * 2**20
_GROWTH = 10
"""A chunk has at least one of so many parts of what is pinned already."""
_MOST_VIEWS = 8


@dataclass(slots=True, eq=False)
class PinnedSlot(Slot):
    """A piece of pinned memory: `place` are its parts, arrays of uint8."""

    _tensors: dict[Any, Any] = field(default_factory=dict)
    """Over parts of it, by what they are: a step asks for the same ones as the step before."""

    def part(self, index: int, nbytes: int) -> Tensor:
        """The first bytes of a part, as a tensor of uint8."""
        key = (index, nbytes)
        found = self._tensors.get(key)
        return found if found is not None else self._remember(key, over(self.place[index][:nbytes]))

    def typed(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Tensor:
        """A tensor over bytes of a slot of one part, from an offset on."""
        key = (shape, dtype, offset)
        found = self._tensors.get(key)
        if found is None:
            kind = array_type(dtype)
            array = self.place[0][offset : offset + math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
            found = self._remember(key, over(array))
        return found

    def _remember(self, key: Any, value: Any) -> Any:
        if len(self._tensors) >= _MOST_VIEWS:
            self._tensors.clear()
        self._tensors[key] = value
        return value


class _Chunk:
    """A block of pinned memory."""

    def __init__(self, nbytes: int) -> None:
        # slots begin on pages: those of one are no other's, for files and for whoever watches over pages
        self._tensor = mint.empty((nbytes + SLOT_ALIGNMENT,), dtype=ms.uint8, device="CPU", pin_memory=True)
        array = view_of(self._tensor)
        begin = -address_of(array) % SLOT_ALIGNMENT
        self.array = array[begin : begin + nbytes]
        self.nbytes = nbytes
        self.given = 0


class PinnedTier(Tier):
    """Slots in pinned memory.

    Args:
        limit: Most bytes.
        before_unpinning: Called before memory goes back to the system: waits until no copy is in flight.

    Raises:
        TierFull: The limit is more than the machine has.
    """

    name = "host"

    def __init__(self, limit: int, before_unpinning: Callable[[], None]) -> None:
        super().__init__(limit)
        self._before_unpinning = before_unpinning
        self._may_pin = True
        there = container_bytes()
        if limit > there:
            raise TierFull(
                f"host_budget is {limit} bytes of pinned memory, but this machine (or container) has {there} in all"
            )
        self._chunks: list[_Chunk] = []

    def take(self, nbytes: int) -> PinnedSlot:
        slot = super().take(nbytes)
        assert isinstance(slot, PinnedSlot)
        return slot

    def take_pinned(self, nbytes: int) -> PinnedSlot:
        """As `take`, of what is pinned already: pinning dispatches an operator, which not every thread may.

        Raises:
            TierFull: There is none.
        """
        self._may_pin = False
        try:
            return self.take(nbytes)
        finally:
            self._may_pin = True

    def _grow(self, size: int) -> Slot:
        parts = self._carve(size)
        if parts is None:
            if not self._may_pin:
                raise TierFull(f"of the {self.allocated} bytes that are pinned, no {size} are free")
            self._check_limit(size)
            chunk = max(size % CHUNK_BYTES or CHUNK_BYTES, min(CHUNK_BYTES, slot_bytes(self.allocated // _GROWTH)))
            room = self.limit - self.allocated - (size // CHUNK_BYTES) * CHUNK_BYTES
            for nbytes in [CHUNK_BYTES] * (size // CHUNK_BYTES) + [min(chunk, room)] * bool(size % CHUNK_BYTES):
                self._pin(nbytes)
            parts = self._carve(size)
            assert parts is not None
        return PinnedSlot(size, parts)

    def _pin(self, nbytes: int) -> None:
        try:
            self._chunks.append(_Chunk(nbytes))
        except (RuntimeError, MemoryError) as error:
            raise TierFull(
                f"the system pins no further {nbytes} bytes of host memory; {self.allocated} bytes are pinned "
                f"({str(error).strip().splitlines()[0]})"
            ) from error
        self.allocated += nbytes
        self.allocations += 1

    def _carve(self, size: int) -> list[np.ndarray] | None:
        """Parts of chunks that are free from their end on; None if there aren't enough."""
        parts: list[np.ndarray] = []
        taken: list[tuple[_Chunk, int]] = []
        for nbytes in [CHUNK_BYTES] * (size // CHUNK_BYTES) + [size % CHUNK_BYTES] * bool(size % CHUNK_BYTES):
            chunk = next((each for each in self._chunks if each.nbytes - each.given >= nbytes), None)
            if chunk is None:
                for each, some in taken:
                    each.given -= some
                return None
            parts.append(chunk.array[chunk.given : chunk.given + nbytes])
            taken.append((chunk, nbytes))
            chunk.given += nbytes
        return parts

    def _begin_anew(self) -> None:
        # nothing is in use, but copies may be in flight: memory goes to other slots, but not back to the system
        self._free.clear()
        for chunk in self._chunks:
            chunk.given = 0

    def trim(self) -> None:
        if self.used == 0:
            self.close()

    def close(self) -> None:
        self._before_unpinning()
        self._free.clear()
        self._chunks.clear()
        self.allocated = 0


assert CHUNK_BYTES % SLOT_ALIGNMENT == 0
