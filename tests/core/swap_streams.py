"""A back end whose copies run late, in any order that its streams leave open, and that checks what is ordered.

Every access to a slot has a vector clock. Two accesses of which one writes must be ordered: the second comes from
something that has heard of the first one's end. Whether a schedule does harm doesn't matter.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ms_ops.cpu import CpuBackEnd
from ms_ops.host import HostTier, Slot

HOST, OUT, IN = "host", "out", "in"
"""Who does something: the thread that trains, and the streams of copies to host and back."""


class Clock(Counter[str]):
    """How much of what everybody has done is known."""

    def hears(self, other: "Clock") -> None:
        for who, count in other.items():
            self[who] = max(self[who], count)

    def knows(self, access: tuple[str, int]) -> bool:
        who, count = access
        return self[who] >= count


@dataclass
class Place:
    """A slot: who has written it with what, and who has read that since."""

    slot: Slot
    written: tuple[str, int] | None = None
    content: Any = None
    readers: list[tuple[str, int]] = field(default_factory=list)


class LateStreams(CpuBackEnd):
    """Copies run when somebody waits for one, or when the test lets some run.

    Args:
        seed: Of the schedule.
        tier: Where tensors go; RAM by default.
        poison: Fill the memory that the engine has let go of, as others might that get it next.
    """

    def __init__(self, seed: int = 0, tier: Any = None, poison: bool = False) -> None:
        super().__init__(tier or HostTier(2**30))
        self.rules: list[str] = []
        """What was broken."""
        self.copies = Counter[str]()
        self._random = random.Random(seed)
        self._poisons = poison
        self._next: Callable[[], None] | None = None
        self._queues: dict[str, deque[tuple[Any, Clock, list[np.ndarray]]]] = {OUT: deque(), IN: deque()}
        self._clocks = {who: Clock() for who in (HOST, OUT, IN)}
        self._places: dict[int, Place] = {}

    # ---- what the engine asks for

    def send(self, transfers: Sequence[Any]) -> None:
        for transfer in transfers:
            self._submit(OUT, transfer)

    def load(self, transfers: Sequence[Any], urgent: bool = False) -> None:
        for transfer in transfers:
            self._submit(IN, transfer)

    def take_back(self, transfer: Any) -> bool:
        return False  # as on a device: what is launched runs

    def hurry(self, transfer: Any) -> None:
        """Nothing: a stream keeps its order."""

    def wait(self, condition: Callable[[], bool], *loads: Any) -> None:
        while not condition():
            assert self._run_one(), "somebody waits for what was never launched"

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Never: nothing is launched but from the thread that trains."""

    def soon(self, function: Callable[[], None]) -> None:
        self._next = function
        self._perhaps_next(0.5)  # else it comes with the next copies, if nobody asks the engine before

    def _perhaps_next(self, likely: float) -> None:
        if self._next is not None and self._random.random() < likely:
            function, self._next = self._next, None
            function()

    def some_run(self, likely: float = 1.0) -> None:
        """Let copies that are launched run, each time as likely as this that there is another one; all by default."""
        with self.lock:
            self._perhaps_next(likely)
            while self._random.random() < likely and self._run_one():
                pass

    # ---- the streams

    def _submit(self, who: str, transfer: Any) -> None:
        transfer.busy = True
        self._tick(HOST)
        seen = Clock(self._clocks[HOST])
        sources = [piece.storage.array() for piece in transfer.pieces] if who == OUT else []  # which it holds
        self._queues[who].append((transfer, seen, sources))

    def _tick(self, who: str) -> tuple[str, int]:
        self._clocks[who][who] += 1
        return who, self._clocks[who][who]

    def _run_one(self) -> bool:
        ready = [who for who, queue in self._queues.items() if queue]
        if not ready:
            return False
        who = self._random.choice(ready)
        transfer, seen, sources = self._queues[who].popleft()
        self.copies[who] += 1
        self._clocks[who].hears(seen)
        access = self._tick(who)
        place = self._places.setdefault(id(transfer.slot), Place(transfer.slot))
        if who == OUT:
            self._check_write(place, transfer, access)
            self._copy_out(transfer, sources)
        else:
            self._check_read(place, transfer, access)
            self._read(transfer)
        return True

    def _copy_out(self, transfer: Any, sources: list[np.ndarray]) -> None:
        storages = [piece.storage for piece in transfer.pieces]
        if None in storages:  # nobody needs it any more
            transfer.busy = False
            self._clocks[HOST].hears(self._clocks[OUT])
            self.sent(transfer, None, 0.0)
            return
        del storages
        self._write(transfer)
        if self._poisons and all(piece.storage is None for piece in transfer.pieces):
            for source in sources:
                source[:] = 0xFF  # NaN

    def _check_write(self, place: Place, transfer: Any, access: tuple[str, int]) -> None:
        who, _ = access
        clock = self._clocks[who]
        before = [place.written] if place.written is not None else []
        if not all(clock.knows(each) for each in before + place.readers):
            self.rules.append(f"{transfer} is written into a slot that may still be written or read")
        place.written, place.content, place.readers = access, transfer, []

    def _check_read(self, place: Place, transfer: Any, access: tuple[str, int]) -> None:
        who, _ = access
        if place.written is None or place.content is not transfer:
            self.rules.append(f"{transfer} is read from a slot in which it isn't")
        elif not self._clocks[who].knows(place.written):
            self.rules.append(f"{transfer} is read before it is known to be written")
        place.readers.append(access)

    # the engine hears of the end of a copy in these: from here on the host knows of it

    def _write(self, transfer: Any) -> None:
        self._clocks[HOST].hears(self._clocks[OUT])
        super()._write(transfer)

    def _read(self, transfer: Any) -> None:
        self._clocks[HOST].hears(self._clocks[IN])
        super()._read(transfer)
