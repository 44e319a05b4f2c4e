"""`SwapTensor`: one saved storage on its way to host and back, as a state machine.

           launch                 written
RESIDENT ----------> OFFLOADING ----------> ON_HOST <---------+
   ^                     |                     | want          | failed
   +---------------------+                     v               |
      cancelled, failed                     LOADING -----------+
                                               | read
every state ---> RELEASED                      v
(nobody will read it any more)               LOADED
"""

import enum
from typing import Any

import numpy as np

from hyper_parallel.core.errors import SwapStateError
from ms_ops.host import Slot


class SwapState(enum.Enum):
    """Where a swapped tensor is."""

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
    SwapState.LOADED: {SwapState.RELEASED},
    SwapState.RELEASED: set(),
}
"""The one table of transitions."""


class SwapTensor:
    """One storage, however many saved tensors share it."""

    __slots__ = (
        "array",
        "busy",
        "dtype",
        "error",
        "group",
        "handles",
        "key",
        "nbytes",
        "shape",
        "slot",
        "state",
    )

    def __init__(self, array: np.ndarray, key: tuple, group: Any) -> None:
        self.array: np.ndarray | None = array
        """The bytes on the device; no tensor, since a tensor may hold its history."""
        self.key: tuple | None = key
        """What tells this storage from another one while `array` holds it."""
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.group = group
        self.state = SwapState.RESIDENT
        self.slot: Slot | None = None
        self.handles = 0
        self.busy = False
        """A copy thread works on it: the slot stays taken until it is done."""
        self.error: BaseException | None = None

    @property
    def array_to_copy(self) -> np.ndarray | None:
        """The bytes on the device that are, or are not yet, on their way to host."""
        return self.array if self.state in (SwapState.RESIDENT, SwapState.OFFLOADING) else None

    def move(self, to: SwapState) -> None:
        """Change the state.

        Raises:
            SwapStateError: The table has no such transition.
        """
        if to not in LEGAL[self.state]:
            legal = ", ".join(sorted(state.value for state in LEGAL[self.state])) or "nothing"
            raise SwapStateError(f"{self}: {self.state.value} can't become {to.value}; legal from here: {legal}")
        self.state = to

    def __str__(self) -> str:
        return f"a saved tensor of {self.group.path}, shape {self.shape}, dtype {self.dtype}, {self.nbytes} bytes"
