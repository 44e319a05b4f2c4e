"""Groups that the user moves: `launch_offload`, `wait_offload`, `launch_load`, `wait_load`.

They follow the same table of states as what the engine moves; a call that is out of turn raises.
"""

import threading
from typing import Any

from hyper_parallel.core.activation_memory.swap_group import SwapGroup
from hyper_parallel.core.activation_memory.swap_in import Loads
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_out import Offloads
from hyper_parallel.core.activation_memory.swap_tensor import SwapState, SwapTensor
from hyper_parallel.core.errors import SwapStateError
from ms_ops.backend import BackEnd

_HOST_STATES = {SwapState.ON_HOST, SwapState.LOADING, SwapState.LOADED}
_NEEDS: dict[str, tuple[set[SwapState], str]] = {
    "launch_offload": ({SwapState.RESIDENT}, "so that its offload has been launched already"),
    "wait_offload": (
        {SwapState.OFFLOADING, *_HOST_STATES},
        "so that there is nothing to wait for; call launch_offload first",
    ),
    "launch_load": ({SwapState.ON_HOST}, "and only what is on host can be loaded; wait_offload comes before"),
    "wait_load": (
        {SwapState.LOADING, SwapState.LOADED},
        "so that there is nothing to wait for; call launch_load first",
    ),
}
"""What each call needs, and what is wrong otherwise."""


class ByHand:
    """What the engine does for a user who says when. Used under its lock.

    Args:
        ledger: Counts.
        back_end: Moves bytes.
        offloads: The way out.
        loads: The way back.
        groups: The live groups, by their index.
    """

    def __init__(
        self,
        ledger: Ledger,
        back_end: BackEnd,
        offloads: Offloads,
        loads: Loads,
        groups: dict[int, SwapGroup],
    ) -> None:
        self._ledger, self._back_end, self._offloads, self._loads = ledger, back_end, offloads, loads
        self._groups = groups

    def run(self, name: str, action: str, newest: int) -> None:
        """Do what the call `action` asks for the group `name`.

        Args:
            name: The group.
            action: The name of the call.
            newest: The index of the newest group, see `Offloads.raise_failure`.

        Raises:
            SwapStateError: The group isn't there, or the call is out of turn.
            HostMemoryError: A copy has failed.
        """
        needed, wrong = _NEEDS[action]
        self._offloads.raise_failure(newest)
        entries = [
            entry
            for group in self._named(name)
            for entry in group.entries
            if not entry.stays and entry.state is not SwapState.RELEASED
        ]
        for entry in entries:
            is_deferred = self._offloads.is_deferred(entry)
            if entry.state not in needed if not is_deferred else action != "wait_offload":
                state = f"{entry.state.value}{', and launched' if is_deferred else ''}"
                raise SwapStateError(f"{action}({name!r}): {entry} is {state}, {wrong}")
        if action == "launch_offload":
            self._offloads.launch(entries)
        elif action == "wait_offload":
            self._offloads.launch_deferred(entries)
            self._wait(entries, SwapState.OFFLOADING, action)
            self._offloads.raise_failure(newest)
        elif action == "launch_load":
            self._loads.launch(list(reversed(entries)))
        else:
            self._wait(entries, SwapState.LOADING, action)
            for entry in entries:
                self._loads.check(entry)

    def is_last(self, name: str) -> bool:
        """Whether the newest group of this thread that holds swapped tensors has this name."""
        named = self._named(name)
        return max(group.index for group in named) == max(group.index for group in self._own())

    def _own(self) -> list[SwapGroup]:
        return [group for group in self._groups.values() if group.thread == threading.get_ident()]

    def _named(self, name: str) -> list[SwapGroup]:
        """The groups of this name whose tensors this thread has swapped, and still needs."""
        own = self._own()
        found = [group for group in own if name in (group.name, group.path)]
        if not found:
            names = sorted({group.name or group.path for group in own})
            raise SwapStateError(
                f"no group {name!r} holds swapped tensors; there are {', '.join(map(repr, names)) or 'none'}. A group "
                f"is there from the end of its region's forward until backward has read it"
            )
        return found

    def _wait(self, entries: list[SwapTensor], state: SwapState, action: str) -> None:
        path = entries[0].group.path if entries else ""
        loads = entries if state is SwapState.LOADING else ()
        self._ledger.wait(
            self._back_end, lambda: not any(entry.state is state for entry in entries), path, action, *loads
        )


class GroupName(threading.local):
    """The name that `set_current_group_name` gave on a thread; empty: none."""

    value = ""


class SwapByHand:
    """The calls by which a user moves groups; the part of `SwapManager` that is about them."""

    _group_name: GroupName
    engine: Any

    def set_current_group_name(self, name: str | None) -> None:
        """Move by hand what regions swap that begin on this thread from now on; None: let the engine do it again.

        What they swap is the group `name`, for `launch_offload` and the other calls. It stays on the device until its
        offload is launched. Backward finds it in any case: what is on host then is loaded on demand, and counted as
        `late_loads`.

        Args:
            name: The name of the group, or None.

        Raises:
            TypeError: The name is no string.
            ValueError: It is empty.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from hyper_parallel import SwapManager
            >>> SwapManager().set_current_group_name("micro batch 0")
            >>> SwapManager().get_current_group_name()
            'micro batch 0'
            >>> SwapManager().set_current_group_name(None)
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a group must be a string, or None, but got {name!r} of {type(name).__name__}")
        if name == "":
            raise ValueError("the name of a group must not be empty; None lets the engine move what is swapped")
        self._group_name.value = name or ""

    def get_current_group_name(self) -> str | None:
        """The name that `set_current_group_name` gave on this thread, or None.

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        return self._group_name.value or None

    def launch_offload(self, group_name: str) -> None:
        """Send what a group holds to host; returns at once.

        Args:
            group_name: The name that was current when the region began, or the path of a region.

        Raises:
            SwapStateError: No such group holds swapped tensors, or its offload has been launched already.
            HostMemoryError: The host is exhausted.

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        self.engine.by_hand(group_name, "launch_offload")

    def wait_offload(self, group_name: str) -> None:
        """Wait until what `launch_offload` sent is on host.

        Args:
            group_name: As for `launch_offload`.

        Raises:
            SwapStateError: No such group holds swapped tensors, or its offload was not launched.
            HostMemoryError: A copy failed; the tensors are on the device.

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        self.engine.by_hand(group_name, "wait_offload")

    def launch_load(self, group_name: str) -> None:
        """Load what a group has on host, beyond the setting `window` if need be; returns at once.

        Args:
            group_name: As for `launch_offload`.

        Raises:
            SwapStateError: No such group holds swapped tensors, or they aren't on host (yet).

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        self.engine.by_hand(group_name, "launch_load")

    def wait_load(self, group_name: str) -> None:
        """Wait until what `launch_load` wanted is on the device.

        Args:
            group_name: As for `launch_offload`.

        Raises:
            SwapStateError: No such group holds swapped tensors, or their load was not launched.
            HostMemoryError: A tensor can't be read.

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        self.engine.by_hand(group_name, "wait_load")

    def is_last_group(self, group_name: str) -> bool:
        """Whether this is the newest group that holds swapped tensors: the one that backward reads first.

        Args:
            group_name: As for `launch_offload`.

        Raises:
            SwapStateError: No such group holds swapped tensors.

        Supported Platforms:
            ``Ascend`` ``CPU``
        """
        return self.engine.is_last(group_name)
