"""A back end: how swapped bytes leave the device and come back. Two of them: `ms_ops.cpu`, `ms_ops.ascend`.

The swap engine decides what moves, when, and within which limits. How bytes move, and what "it has moved" means, is the
back end's. What one must promise, and why:

1.  **Nothing changes hands early.** `sent` is called when the device memory of a transfer may be used for something
    else, `arrived` when whoever reads next gets the right bytes: the engine drops storages and hands out tensors in
    these calls. On a CPU both mean that the bytes have been copied. On a device with streams they mean that whatever is
    queued from now on comes after the copy.
2.  **A transfer is `busy` from its launch until it has ended**: its slot isn't given to another one meanwhile, although
    nobody may need its bytes any more. What a copy reads or writes stays what it is for so long.
3.  **A step costs no host synchronisation**, as far as the device can order by itself: only `wait` and
    `wait_for_readers` may block, and are asked when there is no other way.
4.  **One call may launch many transfers**, and asks for one event, one wake-up or one wait for all of them.
5.  **Everything is called with the engine's lock held**, which the back end may give up while it copies or waits;
    `sent` and `arrived` are called with it, on any thread.
6.  **A failed copy loses nothing.** `sent` and `arrived` are given the error instead of an exception being raised.
7.  **Its operators are nobody's**: they are recorded for no gradient and cast by no mixed precision.
8.  **It costs nothing until it is needed**: no thread, no stream and no memory before the first transfer.

What the two differ in is said by attributes, not asked by the device's name: `frees_in_order`, `copies_by_itself`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mindspore import Tensor

from ms_ops.host import Slot, Tier
from ms_ops.storage import Layout, ask


class NotSupported(RuntimeError):
    """This device, or this MindSpore, has no way to swap: says what is missing."""


class DeviceStorage(Protocol):
    """The bytes behind tensors on the device, held: their memory stays while this object lives."""

    address: int
    """Where it begins, which tells storages apart while they are held."""
    nbytes: int
    alias: Tensor
    """The tensor for which it was asked, without its history."""
    layout: Layout
    """How that tensor lies in it."""

    def tensor(self, layout: Layout, piece: Any) -> Tensor:
        """A tensor without history over these bytes, which are those of the piece."""


class Loaded(Protocol):
    """The bytes of a transfer, on the device again."""

    def tensor(self, layout: Layout, piece: Any) -> Tensor:
        """A tensor without history over the bytes of a piece of the transfer."""


class Piece(Protocol):
    """One storage in a transfer."""

    storage: Any
    """A `DeviceStorage`, as long as the bytes are on the device."""
    offset: int
    nbytes: int


class Transfer(Protocol):
    """What moves at once: storages that lie one after the other in a slot."""

    pieces: Sequence[Any]
    nbytes: int
    """Of the pieces."""
    span: int
    """Bytes on host."""
    slot: Slot | None
    first: Layout
    """Of a tensor in the first storage."""
    busy: bool
    checksum: int | None
    """Of what left, if what comes back is to be compared with it."""
    ready: Any
    """What `BackEnd.ready` gave when its tensors were there."""

    @property
    def is_needed(self) -> bool:
        """Whether somebody will read it, as far as is known."""


class BackEnd(ABC):
    """How bytes move. The engine sets `sent`, `arrived`, `troubled` and `failed` before it launches anything."""

    tier: Tier
    """Where they wait on host."""
    frees_in_order: bool
    """Memory that is dropped is used again by what is queued afterwards, not by what runs now. So a tensor that
    backward has been given needs no room any more, as soon as the next one is asked for; otherwise only when its
    readers have run, which shows when it is collected."""
    ends_by_itself: bool
    """Transfers end without being asked to; otherwise they end in `advance`, the later the better: what is on its way
    keeps its memory, but nothing has to wait for it."""

    sent: Callable[[Any, BaseException | None, float], None]
    """`sent(transfer, error, begin)`: its bytes are on host; `begin` is when its copy began, by `time.perf_counter`."""
    arrived: Callable[[Any, Any, BaseException | None, float], None]
    """`arrived(transfer, loaded, error, begin)`: its bytes are on the device again, in `loaded`."""
    troubled: Callable[[Any, BaseException], None]
    """`troubled(transfer, error)`: the host can't keep it where it should be; it isn't lost, but the user must know."""
    failed: Callable[[BaseException], None]
    """Called with what nobody expects: a bug."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """The engine's, too."""

    def ask(self, tensors: Iterable[Tensor]) -> list[Any]:
        """What `storage_of` needs to know of tensors; waits until every dispatched operator has been launched."""
        return ask(tensors)

    @abstractmethod
    def storage_of(self, tensor: Tensor, asked: Any) -> Any:
        """The `DeviceStorage` in which a tensor lies; None if it isn't on the device, or its owner has freed it.

        Args:
            tensor: The tensor.
            asked: What `ask` gave for it.
        """

    @abstractmethod
    def ready(self, before: Any = None) -> Any:
        """A mark in the stream of computation: what was computed so far is what a transfer may read.

        Args:
            before: An earlier mark: the new one is for the same stream. None: for the calling thread's.
        """

    @abstractmethod
    def send(self, transfers: Sequence[Any]) -> None:
        """Begin to copy these to their slots."""

    @abstractmethod
    def load(self, transfers: Sequence[Any], urgent: bool = False) -> None:
        """Begin to copy these back; urgent ones before all others."""

    @abstractmethod
    def take_back(self, transfer: Any) -> bool:
        """Forget a transfer whose copy has not begun; False if it has."""

    @abstractmethod
    def forget(self, transfer: Any) -> None:
        """Its slot is about to be given back: nobody will read it any more."""

    @abstractmethod
    def hurry(self, transfer: Any) -> None:
        """Somebody waits for this load: make it the next one."""

    @abstractmethod
    def advance(self, condition: Callable[[], bool], *loads: Any) -> None:
        """End what can be ended without waiting on the host: these loads, then the oldest sends until the condition."""

    @abstractmethod
    def end_unneeded(self) -> bool:
        """End what can be ended without waiting on the host, and nobody needs any more; whether some is left."""

    @abstractmethod
    def wait(self, condition: Callable[[], bool], *loads: Any) -> None:
        """Block until the condition holds, which is about these loads if there are any."""

    @abstractmethod
    def wait_for_readers(self) -> None:
        """Block until memory that backward has been given, and has read, is free; where it isn't freed in order."""

    @abstractmethod
    def wake(self) -> None:
        """Let whoever blocks in `wait` look at the condition again."""

    @abstractmethod
    def follow(self, loaded: Any, given_up: Callable[[int], None], key: int) -> Any:
        """Call `given_up(key)`, on any thread, when the memory of `loaded` is free; as long as the result is held."""

    @abstractmethod
    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this in so many seconds, on any thread; replaces what was to be called before.

        Never, where nothing may be launched but from the thread that trains.
        """

    @abstractmethod
    def soon(self, function: Callable[[], None]) -> None:
        """Call this next, under the lock, on a thread that has time. Asked with the lock or without it.

        At once, where nothing may be launched but from the thread that trains.
        """

    def may_launch(self) -> bool:
        """Whether the calling thread may launch something and end it: on one that may not, nothing is tidied up."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End all of it, on any thread; called without the lock."""

    @abstractmethod
    def leave_to_the_parent(self) -> None:
        """In a forked child: threads and the device are the parent's."""
