"""`Watch`: what one invocation reads again in its replay, and who writes into it meanwhile.

Note: [Changed underneath]
A replay reads what its forward read: inputs, attributes, closed-over tensors, parameters, results on its tape. Whoever
writes into one of them from Python is heard before it happens (`ms_ops.writes`). Inside the region that is being
recorded, what the write would destroy is copied first, and the replay begins with the copy. From anywhere else the
write makes the replay wrong: the invocation remembers who it was, and raises instead of replaying.
A tensor is found by identity, a parameter by its `param_info`, a view by its storage; asking for the storage waits for
the queue, which is why only writes ask. A numpy array over a tensor's bytes is written unheard: while there is one, a
checksum is taken when it is given out, or when the forward begins, and compared when the replay begins.
"""

import weakref
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.core.activation_memory.call_site import call_site
from hyper_parallel.core.activation_memory.scopes import current, open_scopes, watched
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import is_parameter
from ms_ops.tensors import checksum, storage_of
from ms_ops.writes import is_exposed, observe


class Watch:
    """What one invocation reads again.

    Args:
        path: The region.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._changed = ""
        self._tensors: list[tuple[str, weakref.ref[Tensor]]] = []
        self.parameters: dict[int, tuple[Any, Tensor]] = {}
        """Parameters that are read, by the id of their `param_info`: that, so that the id stays taken, and an alias."""
        self._updated: dict[int, Any] = {}
        self._checks: dict[int, tuple[str, weakref.ref[Tensor], int]] = {}

    def add(self, what: str, tensor: Tensor) -> None:
        """Watch a tensor that the region can reach; `what` names it in messages."""
        if not is_parameter(tensor):
            self._tensors.append((what, weakref.ref(tensor)))
        if is_exposed(tensor):
            self.check(what, tensor)

    def add_parameter(self, alias: Tensor) -> None:
        """Watch a parameter that an operator has read."""
        info = alias.param_info
        self.parameters.setdefault(id(info), (info, alias))

    def include(self, inner: "Watch") -> None:
        """A region inside has run: what it reads and changes, its replay inside this one's does, too."""
        self.parameters.update(inner.parameters)
        self._updated.update(inner._updated)

    def updates(self, info: Any) -> None:
        """The region itself changes this parameter."""
        self._updated[id(info)] = info

    def finds(self, written: Written) -> str | None:
        """What the written tensor is for the region, if it is watched."""
        if written.parameter is not None:
            return "a weight" if id(written.parameter) in self.parameters else None
        for what, ref in self._tensors:
            tensor = ref()
            if tensor is not None and written.reaches(tensor):
                return what
        if any(written.reaches_storage_of(alias) for _, alias in self.parameters.values()):
            return "a weight"  # through its `data`, a view, or another alias that doesn't know
        return None

    def write(self, what: str, written: Written) -> None:
        """Remember a write that makes the replay wrong."""
        if not self._changed:
            self._changed = (
                f"{self._path}: {what} {written} was written by {written.how}{call_site()} between the region's "
                f"forward and its replay, which would read the new value; write before the forward or after the "
                f"backward, write into a copy, or give the cell the policy MUST_SAVE"
            )

    def expose(self, exposed: Tensor) -> None:
        """An array over the bytes of a tensor is given out."""
        if is_parameter(exposed):
            if id(exposed.param_info) in self.parameters:
                self.check("a weight", exposed)
            return
        storage = storage_of(exposed)
        for what, ref in self._tensors:
            tensor = ref()
            if tensor is not None and (tensor is exposed or (storage and storage_of(tensor) == storage)):
                self.check(what, tensor)

    def verify(self) -> None:
        """Check that nothing was written since the forward.

        Raises:
            ReplayMismatchError: Something was.
        """
        if self._changed:
            raise ReplayMismatchError(self._changed)
        for what, ref, before in self._checks.values():
            tensor = ref()
            if tensor is None or (is_parameter(tensor) and not self._reads_only(tensor.param_info)):
                continue
            if checksum(tensor) != before:
                raise ReplayMismatchError(
                    f"{self._path}: {what} {Written(tensor, '', False)} was written through a numpy array over its "
                    f"bytes (asnumpy() and from_numpy() share memory) between the region's forward and its replay, "
                    f"which would read the new value; write into a copy of the array"
                )

    def _reads_only(self, info: Any) -> bool:
        return id(info) in self.parameters and id(info) not in self._updated

    def check(self, what: str, tensor: Tensor) -> None:
        """Take a checksum, to be compared when the replay begins."""
        if tensor.nbytes and id(tensor) not in self._checks:
            self._checks[id(tensor)] = what, weakref.ref(tensor), checksum(tensor)


class _Live:
    """The invocations that wait for a replay; hears of writes."""

    def __init__(self) -> None:
        self._invocations: dict[int, weakref.ref[Any]] = {}

    def add(self, invocation: Any) -> None:
        """From now on, writes concern this invocation."""
        key = id(invocation)
        self._invocations[key] = weakref.ref(invocation, lambda _: self._invocations.pop(key, None))

    def remove(self, invocation: Any) -> None:
        """It has been replayed."""
        self._invocations.pop(id(invocation), None)

    def invocations(self) -> list[Any]:
        """Those that wait; finalizers on MindSpore's threads may remove some meanwhile."""
        return [invocation for ref in list(self._invocations.values()) if (invocation := ref()) is not None]

    # ---- what `ms_ops.writes` calls

    @property
    def active(self) -> bool:
        return bool(self._invocations) or bool(watched)

    def writes(self, tensor: Tensor, how: str, rebinds: bool) -> None:
        written = Written(tensor, how, rebinds)
        if current().replays:
            current().wrote(written)
            return
        inside = []
        for scope in list(open_scopes()):
            scope.wrote(written)
            inside.append(getattr(scope, "invocation", None))
        for invocation in self.invocations():
            if not any(invocation is other for other in inside):
                what = invocation.finds(written)
                if what is not None:
                    invocation.watch.write(what, written)
        for ref in list(watched.values()):
            one = ref()
            if one is not None:
                one.wrote(written)

    def exposes(self, tensor: Tensor, array: np.ndarray) -> None:
        for invocation in self.invocations():
            invocation.watch.expose(tensor)
            for what, result in invocation.tape.over(tensor):
                invocation.watch.check(what, result)

    def reads(self) -> None:
        for scope in open_scopes():
            scope.reads_on_host()

    def recalls(self, site: Any) -> Any:
        return current().recalls(site)

    def remembers(self, site: Any, value: Any) -> None:
        current().remembers(site, value)


live = _Live()
observe(live)
