"""`SwapGroup`: what one call of a region sends to host, closed as a whole when the region ends.

Note: [One wait per group]
Data is not ready when autograd saves a tensor, since operators run asynchronously; asking for a tensor's address waits
for every dispatched operator. A group only collects while its region runs. When the region ends, the first address
waits, the others are there.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.scopes import Kept, Scope, Watched
from hyper_parallel.core.activation_memory.swap_tensor import SwapTensor
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import PolicyError
from ms_ops.autograd import alias, is_parameter
from ms_ops.tensors import address_of


class SwapHandle(Watched):
    """What holds one saved tensor's place; many may share one `SwapTensor`."""

    __slots__ = ("engine", "entry", "tensor")

    def __init__(self, engine: Any, tensor: Tensor) -> None:
        super().__init__()
        self.engine = engine
        self.tensor: Tensor | None = tensor
        self.entry: SwapTensor | None = None

    def get(self) -> Tensor:
        """The tensor, loaded if it has to be."""
        self.check()
        if self.entry is None:
            assert self.tensor is not None
            return self.tensor  # kept, or its group is still open
        return self.engine.fetch(self.entry)

    def wrote(self, written: Written) -> None:
        if written.rebinds and written.tensor is self.tensor:
            self.tensor = alias(written.tensor, tracked=False)  # the object is about to be another tensor
        else:
            super().wrote(written)

    def is_reached(self, written: Written) -> bool:
        if self.tensor is not None:
            return written.reaches(self.tensor)
        array = self.entry.array_to_copy if self.entry is not None else None
        return array is not None and written.reaches_storage(address_of(array))

    def __del__(self) -> None:
        # runs on MindSpore's threads: appending to a deque is all that is safe here
        if self.entry is not None:
            self.engine.dead.append(self.entry)


class SwapGroup:
    """The tensors of one call of one region."""

    def __init__(
        self, engine: Any, path: str, index: int, tensor_policy: Any = None, layers: tuple[int, ...] = ()
    ) -> None:
        self.path = path
        self.index = index
        self.layers = layers
        """The layers in which it runs, of those that `set_forward_prefetch_layer` has named."""
        self.entries: list[SwapTensor] = []
        self.live = 0
        self.left_alone: list[Tensor] = []
        """Aliases of tensors that were marked inside the region, see `keep_on_device`."""
        self.registered: list[Tensor] = []
        """Aliases of tensors that go to host whatever the tensor policy says, see `swap_tensor_wrapper`."""
        self._engine = engine
        self._tensor_policy = tensor_policy
        self._handles: list[weakref.ref[SwapHandle]] = []
        self._min_bytes = engine.settings.min_bytes

    def add(self, tensor: Tensor) -> Any:
        """What stands for `tensor` from now on: a handle, or something that keeps it if it is exempt."""
        if is_parameter(tensor):
            self._engine.count_exempt(tensor, "parameter")
            return Kept(tensor)
        if tensor.nbytes < self._min_bytes or not tensor.nbytes:
            self._engine.count_exempt(tensor, "small")
            return Kept(tensor)
        handle = SwapHandle(self._engine, tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def wants(self, tensor: Tensor) -> bool:
        """Ask the tensor policy, if there is one."""
        if self._tensor_policy is None:
            return True
        answer = self._tensor_policy(tensor)
        if answer is CheckpointPolicy.MUST_SWAP:
            return True
        if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            return False
        raise PolicyError(
            f"{self.path}: the tensor policy must answer MUST_SWAP, MUST_SAVE or PREFER_SAVE for a tensor of shape "
            f"{tensor.shape} and dtype {tensor.dtype}, but answered {answer!r}"
        )

    def __enter__(self) -> "SwapGroup":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        handles = [handle for ref in self._handles if (handle := ref()) is not None]
        self._handles.clear()
        try:
            if error is None and handles:
                self._engine.close_group(self, handles)
        finally:
            for handle in handles:
                if handle.entry is None and handle.tensor is not None:
                    handle.tensor = Kept(handle.tensor).get()  # Note: [Never hand a saved tensor back]


class SwapScope(Scope):
    """The forward of a swapped region: saved tensors join its group."""

    def __init__(self, group: SwapGroup) -> None:
        self.group = group

    def pack(self, tensor: Tensor) -> Any:
        return self.group.add(tensor)


class HostSide:
    """The group of one call of a replayed region, opened when the first tensor goes to host.

    Args:
        open_group: Opens it.
        groups: Closes it when the region ends.
    """

    def __init__(self, open_group: Callable[[], SwapGroup], groups: ExitStack) -> None:
        self._open_group = open_group
        self._groups = groups
        self._group: SwapGroup | None = None

    def add(self, tensor: Tensor) -> Any:
        """What stands for `tensor`; see `SwapGroup.add`."""
        if self._group is None:
            self._group = self._groups.enter_context(self._open_group())
        return self._group.add(tensor)
