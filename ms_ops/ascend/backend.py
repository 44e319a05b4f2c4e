"""`AscendBackEnd`: transfers as copies on streams of their own, ordered by events; see `ms_ops.ascend.order`.

Note: [Batches]
What one call launches is a batch or several: one event each, and one wait when it ends. A batch is a quarter of what is
launched at once: memory is given back piece by piece while the next region computes, and who reads the first of what is
loaded doesn't wait for the last.

Note: [Who ends a transfer]
Nobody is told when a copy has run, and nobody needs to be: a transfer has ended when the owner's stream was told to
wait for it. The later that is, the longer the copy may overlap with computation, and the longer its memory is taken.
The engine asks for it (`wait`, `let`) when a limit says so; a load ends when its tensor is read.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor

from ms_ops.ascend import copies, order
from ms_ops.ascend.events import Mark
from ms_ops.ascend.pinned import PinnedSlot, PinnedTier
from ms_ops.autograd import without_history, without_precision
from ms_ops.backend import BackEnd, NotSupported
from ms_ops.storage import Layout

_NEEDED = ("Stream", "Event", "StreamCtx", "current_stream", "synchronize")
_BATCHES = 4
_SMALLEST_BATCH = 2**16


def check_runtime() -> None:
    """Raise NotSupported if MindSpore lacks something, naming it."""
    runtime = getattr(ms, "runtime", None)
    missing = [f"mindspore.runtime.{name}" for name in _NEEDED if not hasattr(runtime, name)]
    storage = getattr(Tensor, "untyped_storage", None)
    if storage is None:
        missing.append("Tensor.untyped_storage")
    if missing:
        raise NotSupported(f"MindSpore {ms.__version__} lacks what swapping on Ascend needs: {', '.join(missing)}")


class _Ready(Mark):
    """A place in the owner's stream."""

    __slots__ = ("is_waited_for", "owner")

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner
        self.is_waited_for = False
        """By the stream that copies to host."""


class Batch:
    """Transfers that end together."""

    __slots__ = ("begin", "end", "loaded", "owner", "transfers")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.transfers: list[Any] = []
        self.loaded: list[Tensor] = []
        """What the copies write, as long as it hasn't been handed out."""
        self.end = Mark()
        self.begin = time.perf_counter()


class _Loaded:
    """What came back: a tensor of what left, or of uint8."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def tensor(self, layout: Layout, piece: Any) -> Tensor:
        loaded = self._tensor
        if layout.strides is None and loaded.shape == layout.shape and loaded.dtype == layout.dtype:
            return loaded
        with without_history():
            flat = loaded if loaded.dtype == ms.uint8 and loaded.ndim == 1 else loaded.view(-1).view(ms.uint8)
            if piece.nbytes != flat.nbytes:
                flat = flat[piece.offset : piece.offset + piece.nbytes]
            return copies.tensor_in(flat, layout, piece.offset)


class AscendBackEnd(BackEnd):
    """Copies by the device, one stream per direction.

    Args:
        limit: Most bytes of pinned memory.
        verify: Compare what comes back with what left; waits for the device for every transfer.

    Raises:
        NotSupported: MindSpore lacks something.
        TierFull: The limit is more than the machine has.
    """

    frees_in_order = True
    ends_by_itself = False

    def __init__(self, limit: int, verify: bool = False) -> None:
        super().__init__()
        check_runtime()
        self._pool = PinnedTier(limit, self._wait_on_host)
        self.tier = self._pool
        self._verify = verify
        self._streams: tuple[Any, Any] | None = None
        self._launcher: threading.Thread | None = None
        """The thread whose group has closed last."""
        self._sends: deque[Batch] = deque()
        self._loads: deque[Batch] = deque()
        self._owners: set[int] = set()

    # ---- what the engine asks

    def storage_of(self, tensor: Tensor, asked: Any) -> "copies.DeviceStorage | None":
        return copies.DeviceStorage.of(tensor, asked)

    def ready(self, before: Any = None) -> _Ready:
        owner = ms.runtime.current_stream() if before is None else before.owner
        self._owners.add(owner.id)
        self._launcher = threading.current_thread()
        ready = _Ready(owner)
        order.record_ready(ready.event, owner)
        return ready

    def send(self, transfers: Sequence[Any]) -> None:
        to_host, _ = self._both()
        self._order_directions(*self._both())
        with ms.runtime.StreamCtx(to_host), without_precision():
            for owner, own in itertools.groupby(transfers, key=lambda transfer: transfer.ready.owner):
                for part in _parts(list(own)):
                    batch = Batch(owner)
                    for transfer in part:
                        if not transfer.ready.is_waited_for:
                            order.wait_until_ready(to_host, transfer.ready.event)
                            transfer.ready.is_waited_for = True
                        self._send(batch, transfer)
                    self._is_sent_by(batch, to_host)

    def _send(self, batch: Batch, transfer: Any) -> None:
        order.begin_use_of_slot(transfer)
        batch.transfers.append(transfer)
        if self._verify:
            transfer.checksum = _checksum_of(transfer.pieces)
        for piece in transfer.pieces:
            piece.storage.send(self._pinned(transfer), piece.offset)

    def _is_sent_by(self, batch: Batch, to_host: Any) -> None:
        order.record_sent(batch.end.event, to_host)
        self._sends.append(batch)
        self._recorded(batch, to_host)

    def _recorded(self, batch: Batch, to_host: Any) -> None:
        """Its copies are queued."""

    def load(self, transfers: Sequence[Any], urgent: bool = False) -> None:
        to_host, to_device = self._both()
        owner = ms.runtime.current_stream()
        self._owners.add(owner.id)
        self._order_directions(to_device, to_host)
        with without_history():
            batches = [self._destinations(owner, part) for part in _parts(transfers)]
            allocated = Mark()
            order.record_allocated(allocated.event, owner)
            order.wait_until_allocated(to_device, allocated.event)
            for batch in batches:
                with ms.runtime.StreamCtx(to_device):
                    for transfer, tensor in zip(batch.transfers, batch.loaded, strict=True):
                        copies.load(tensor, self._pinned(transfer))
                order.record_loaded(batch.end.event, to_device)
                self._loads.append(batch)
                self._load_recorded(batch, to_device)

    def _destinations(self, owner: Any, transfers: Sequence[Any]) -> Batch:
        """A batch of loads with the memory into which they copy."""
        batch = Batch(owner)
        for transfer in transfers:
            order.begin_use_of_slot(transfer)
            batch.transfers.append(transfer)
            batch.loaded.append(self._allocate(transfer))
        return batch

    def _load_recorded(self, batch: Batch, to_device: Any) -> None:
        """Its copies are queued."""

    def _pinned(self, transfer: Any) -> PinnedSlot:
        """Where its bytes are copied to and from."""
        return transfer.slot

    def _allocate(self, transfer: Any) -> Tensor:
        if len(transfer.pieces) == 1 and copies.is_plain(transfer.first, self._pinned(transfer)):
            return copies.allocate(transfer.first)
        return copies.allocate_bytes(transfer.span)

    def take_back(self, transfer: Any) -> bool:
        return False  # the copy is queued

    def forget(self, transfer: Any) -> None:
        """Nothing: there is nothing but the slot."""

    def hurry(self, transfer: Any) -> None:
        """Loads run in the order in which they were launched."""

    def advance(self, condition: Callable[[], bool], *loads: Any) -> None:
        for transfer in loads:
            self._end_load(transfer)
        while self._sends and not condition():
            self._end_send(self._sends.popleft())

    def end_unneeded(self) -> bool:
        for batches, end in ((self._sends, self._end_send), (self._loads, self._end_loads)):
            for batch in list(batches):
                if not any(transfer.is_needed for transfer in batch.transfers):
                    batches.remove(batch)
                    end(batch)
        return any(not each.is_needed for batch in (*self._sends, *self._loads) for each in batch.transfers)

    def wait(self, condition: Callable[[], bool], *loads: Any) -> None:
        if not condition():
            raise RuntimeError("nothing is on its way that could make true what is waited for")

    def wait_for_readers(self) -> None:
        """Nothing: memory is freed in order."""

    def wake(self) -> None:
        """Nothing: nobody blocks."""

    def follow(self, loaded: Any, given_up: Callable[[int], None], key: int) -> None:
        """Nothing: memory is freed in order."""

    def _end_send(self, batch: Batch) -> None:
        order.wait_until_sent(batch.owner, batch.end.event)
        for transfer in batch.transfers:
            order.end_use_of_slot(transfer)
            self.sent(transfer, None, batch.begin)

    def _end_load(self, transfer: Any) -> None:
        """The reader waits for this load; those before it have run by then, too."""
        for index, batch in enumerate(self._loads):
            if any(each is transfer for each in batch.transfers):
                self._end_loads(*[self._loads.popleft() for _ in range(index + 1)])
                return

    def _end_loads(self, *batches: Batch) -> None:
        streams = {stream.id: stream for stream in (ms.runtime.current_stream(), *(batch.owner for batch in batches))}
        for stream in streams.values():
            order.wait_until_loaded(stream, batches[-1].end.event)
        for batch in batches:
            for transfer, tensor in zip(batch.transfers, batch.loaded, strict=True):
                order.end_use_of_slot(transfer)
                self.arrived(transfer, _Loaded(tensor), self._compared(transfer, tensor), batch.begin)

    def _compared(self, transfer: Any, tensor: Tensor) -> BaseException | None:
        if transfer.checksum is None or _checksum_in(tensor, transfer) == transfer.checksum:
            return None
        return OSError("its bytes aren't those that left")

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Nothing: copies are operators, and MindSpore's queue takes operators of one thread at a time.

        Launched from a thread of its own beside the training thread's operators, a copy made the queue lose tasks:
        wrong numbers that no order of streams explains, or "The pointer[task] is null" (2.10.0).
        """

    def soon(self, function: Callable[[], None]) -> None:
        with self.lock:
            function()

    def may_launch(self) -> bool:
        thread = self._launcher
        return thread is None or thread is threading.current_thread() or not thread.is_alive()

    def close(self) -> None:
        self._wait_on_host()
        self._sends.clear()
        self._loads.clear()
        self.tier.close()

    def leave_to_the_parent(self) -> None:
        """Nothing can be given back: the device is the parent's."""

    # ---- streams and events

    def _both(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = ms.runtime.Stream(), ms.runtime.Stream()
        return self._streams

    def _order_directions(self, later: Any, earlier: Any) -> None:
        if len(self._owners) > 1:
            done = Mark()
            order.let_copies_wait(later, earlier, done.event)

    def _wait_on_host(self) -> None:
        if self._streams is not None:
            order.wait_on_host(*self._streams)


def _parts(transfers: Sequence[Any]) -> Iterator[list[Any]]:
    """What is launched at once, batch by batch; see Note: [Batches]."""
    largest = max(_SMALLEST_BATCH, sum(transfer.nbytes for transfer in transfers) // _BATCHES)
    part: list[Any] = []
    nbytes = 0
    for transfer in transfers:
        if nbytes >= largest:
            yield part
            part, nbytes = [], 0
        part.append(transfer)
        nbytes += transfer.nbytes
    if part:
        yield part


def _checksum_of(pieces: Sequence[Any]) -> int:
    total = 0
    for piece in pieces:
        total = piece.storage.checksum(total)
    return total


def _checksum_in(tensor: Tensor, transfer: Any) -> int:
    """Of what came back."""
    if len(transfer.pieces) == 1:
        return copies.checksum(tensor)
    total = 0
    for piece in transfer.pieces:
        total = copies.checksum(tensor[piece.offset : piece.offset + piece.nbytes], total)
    return total
