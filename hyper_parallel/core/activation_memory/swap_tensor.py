"""`SwapTensor`: what goes to host and back as one transfer, as a state machine.

           launch                 written
RESIDENT ----------> OFFLOADING ----------> ON_HOST <---------+---------+
   ^                     |                     | want         | failed  |
   +---------------------+                     v              |         |
      cancelled, failed                     LOADING ----------+         | evicted
                                               | read                   |
every state ---> RELEASED                      v                        |
(nobody will read it any more)               LOADED --------------------+
"""

import enum
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.errors import SwapStateError
from ms_ops.host import Slot
from ms_ops.storage import Layout


class SwapState(enum.Enum):
    """Where a swapped tensor is."""

    legal: "tuple[SwapState, ...]"
    """What may follow."""

    RESIDENT = "resident"
    """On the device only."""
    OFFLOADING = "offloading"
    """On the device, and waiting to be written, or being written."""
    ON_HOST = "on host"
    """On host only."""
    LOADING = "loading"
    """On host, and waiting to be read, or being read."""
    LOADED = "loaded"
    """On host, and on the device again."""
    RELEASED = "released"
    """Nobody will read it any more."""


LEGAL = {
    SwapState.RESIDENT: {SwapState.OFFLOADING, SwapState.RELEASED},
    SwapState.OFFLOADING: {SwapState.ON_HOST, SwapState.RESIDENT, SwapState.RELEASED},
    SwapState.ON_HOST: {SwapState.LOADING, SwapState.RELEASED},
    SwapState.LOADING: {SwapState.LOADED, SwapState.ON_HOST, SwapState.RELEASED},
    SwapState.LOADED: {SwapState.ON_HOST, SwapState.RELEASED},
    SwapState.RELEASED: set(),
}
"""The one table of transitions."""

for _state, _next in LEGAL.items():
    _state.legal = tuple(_next)  # members of an enum are slow to look up by their hash


class Piece:
    """One storage in a transfer."""

    __slots__ = ("address", "holders", "layout", "nbytes", "offset", "storage")

    def __init__(self, storage: Any, holders: list[Callable[[], Any]] | None) -> None:
        self.storage: Any = storage
        """The bytes on the device, while they are there."""
        self.address = storage.address
        """Where they began, while they were there."""
        self.layout: Layout = storage.layout
        """Of the tensor for which the storage was taken over."""
        self.nbytes = storage.nbytes
        self.offset = 0
        """Where its bytes begin in the transfer."""
        self.holders = holders
        """Weak references to what other code holds of this storage, if it holds something."""

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether other code holds the storage, so that moving it would free nothing."""
        return self.holders is not None and any(holder() is not None for holder in self.holders)


class SwapTensor:
    """One storage, however many saved tensors lie in it; or several small ones that travel together."""

    __slots__ = (
        "_holders",
        "begins_waited",
        "busy",
        "checksum",
        "error",
        "first",
        "group",
        "handles",
        "is_wanted",
        "loaded",
        "nbytes",
        "pieces",
        "readers",
        "ready",
        "slot",
        "span",
        "state",
        "stays",
        "unread",
        "was_read",
        "why_released",
    )

    def __init__(self, pieces: list[Piece], group: Any) -> None:
        first = pieces[0]
        self.pieces, self.group = pieces, group
        self.first = first.layout
        """Of the tensor for which its first storage was taken over."""
        self.nbytes, self._holders = first.nbytes, first.holders
        if len(pieces) > 1:
            self.nbytes = sum(piece.nbytes for piece in pieces)
            self._holders = None  # what other code holds doesn't travel with others
        self.span = pieces[-1].offset + pieces[-1].nbytes
        """Bytes on host, with what lies between the pieces."""
        self.state = SwapState.RESIDENT
        self.handles = 0
        self.slot: Slot | None = None
        self.busy = False
        """A copy is in flight: the slot stays taken until it has ended."""
        self.ready: Any = None
        """When its tensors were there, for the back end."""
        self.checksum: int | None = None
        """Of what left, if it is to be compared with what comes back."""
        self.begins_waited = 0
        """How many regions have begun while it could have left, but other code held it."""
        self.stays = False
        """On the device: backward has read it there already, or the host has no room."""
        self.loaded: Any = None
        """The bytes, on the device again."""
        self.was_read = False
        """Backward has read it, since it was loaded if it was."""
        self.is_wanted = False
        """The user has asked for it: it isn't given up for something else, until backward has read it."""
        self.readers: set[int] | None = None
        """Which handles have read it since; see Note: [Handed over]."""
        self.unread = 0
        """How many haven't."""
        self.error: BaseException | None = None
        self.why_released = "nobody held it any more"

    @property
    def is_needed(self) -> bool:
        """Whether somebody will read it, as far as is known."""
        return self.state is not SwapState.RELEASED

    @property
    def label(self) -> str:
        """What it is, for messages."""
        first = f"shape {self.first.shape}, dtype {str(self.first.dtype).lower()}"
        count = len(self.pieces)
        return first if count == 1 else f"{count} tensors that travel together, the first of {first}"

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether other code holds its bytes, so that moving them would free nothing."""
        return self._holders is not None and any(holder() is not None for holder in self._holders)

    def is_settled(self) -> bool:
        """Whether no load of it is on its way."""
        return self.state is not SwapState.LOADING

    def move(self, to: SwapState) -> None:
        """Change the state.

        Raises:
            SwapStateError: The table has no such transition.
        """
        if to not in self.state.legal:
            legal = ", ".join(sorted(state.value for state in self.state.legal)) or "nothing"
            raise SwapStateError(f"{self}: {self.state.value} can't become {to.value}; legal from here: {legal}")
        self.state = to

    def __str__(self) -> str:
        return f"a saved tensor of {self.group.path}, {self.label}, {self.nbytes} bytes"
