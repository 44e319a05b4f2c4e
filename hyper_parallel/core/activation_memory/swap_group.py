"""`SwapGroup`: what one call of a region sends to host, closed as a whole when the region ends.

A group only collects while its region runs; see Note: [One wait per group].
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory import marks
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy, no_policy
from hyper_parallel.core.activation_memory.scopes import Kept, Scope, Watched, unseen, why
from hyper_parallel.core.activation_memory.surroundings import Surroundings
from hyper_parallel.core.activation_memory.swap_tensor import Piece, SwapState, SwapTensor
from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import PolicyError, ReplayMismatchError
from ms_ops.autograd import alias, comes_from_a_parameter, data_of, is_parameter
from ms_ops.catalogue import VIEWS
from ms_ops.storage import Layout
from ms_ops.tensors import nbytes_of, storage_of

VIEWS_AND_CASTS = VIEWS | {"Cast"}
"""What may lie between a parameter and a tensor that counts as it."""


class SwapHandle:
    """What holds one saved tensor's place; many may share one `SwapTensor`."""

    __slots__ = ("__weakref__", "entry", "group", "layout", "may_be_written", "nbytes", "piece", "tensor")

    entry: SwapTensor
    piece: Piece
    layout: Layout
    tensor: Tensor | None
    """The tensor itself, until its group has taken it over."""

    def __init__(self, group: "SwapGroup", tensor: Tensor, nbytes: int, may_be_written: bool) -> None:
        self.tensor = tensor  # first, since `__del__` asks for it however early this ends
        self.group, self.nbytes, self.may_be_written = group, nbytes, may_be_written

    def get(self) -> Tensor:
        """The tensor, loaded if it has to be."""
        group = self.group
        if group.changed:
            group.check_handle(self)
        tensor = self.tensor
        if tensor is not None:
            if not group.is_noted:
                return tensor  # kept, or its group is still open
            if group.is_served or group.is_reached_now():
                return data_of(tensor)  # not taken over yet: it is here
            group.engine.settle()
            if self.tensor is not None:
                return self.tensor
        entry = self.entry
        found = None
        if group.is_served or group.is_reached_now():  # Note: [Served]
            found = entry.loaded
            if found is None and entry.state is SwapState.RESIDENT:
                found = self.piece.storage
        if found is not None:
            entry.was_read = True
        else:
            found = group.engine.fetch(self)
            if isinstance(found, Tensor):
                return found
        if self.layout.strides is None and not group.is_smoothed:
            return found.tensor(self.layout, self.piece)
        with unseen():
            return found.tensor(self.layout, self.piece)

    def leave(self) -> None:
        """Its tensor stays; see Note: [Never hand a saved tensor back]."""
        self.tensor = Kept(self.tensor).get()

    def wrote(self, written: Written) -> bool:
        """A tensor is about to be written; whether it is this one."""
        tensor = self.tensor
        if tensor is None:
            storage = self.piece.storage
            return storage is not None and written.reaches_storage(storage.address)
        if written.rebinds and written.tensor is tensor:
            self.tensor = alias(written.tensor, tracked=False)  # the object is about to be another tensor
            return False
        return written.reaches(tensor)

    def __del__(self) -> None:
        # runs on MindSpore's threads: appending to a deque is all that is safe here
        if self.tensor is None:
            self.group.engine.dead.append(self.entry)


class SwapGroup(Watched):
    """The tensors of one call of one region. It hears of writes for all its handles.

    Args:
        engine: Moves them.
        path: The region.
        index: Tells the groups apart, in the order of their forwards.
        tensor_policy: Asked for every tensor, see `RegionSpec`.
        layers: The layers in which it runs, of those that `set_forward_prefetch_layer` has named.
        name: By which the user moves it; empty: the engine does.
        owner: The cell or function whose code runs.
    """

    live = 0
    is_noted = False
    """Whether it is closed, but not taken over yet: see Note: [Settled later]."""
    is_served = False
    """Whether what is there may be read without asking the engine: see Note: [Served]."""
    saved = 0
    """Bytes, however often each was saved."""

    def __init__(
        self,
        engine: Any,
        path: str,
        index: int,
        tensor_policy: Any = None,
        layers: tuple[int, ...] = (),
        name: str = "",
        owner: Any = None,
    ) -> None:
        self.engine, self.path, self.index, self.layers, self.name = engine, path, index, layers, name
        self.thread = threading.get_ident()
        self.entries: list[SwapTensor] = []
        self.is_unread = not (name or engine.back_end.frees_in_order)
        """Whether the engine need not be asked when backward comes to it, and has not been told that it has."""
        self.left_alone: list[Tensor] = []
        """Aliases of tensors that were marked inside the region, see `keep_on_device`."""
        self.registered: list[Tensor] = []
        """Aliases of tensors that go to host whatever the tensor policy says, see `swap_tensor_wrapper`."""
        self.left: defaultdict[str, int] = defaultdict(int)
        """Bytes of what has been left alone so far, by why."""
        self.surroundings = Surroundings(owner)
        self._cast_weights: list[Tensor] = []
        self._passed: list[weakref.ref[Tensor]] = []
        self._tensor_policy = tensor_policy
        self._handles: list[weakref.ref[SwapHandle]] = []
        self._written: dict[int, str] = {}
        """Why a handle can't be read any more, by its id: its tensor was written."""
        self._min_bytes = engine.settings.min_bytes
        self.is_smoothed = not engine.back_end.ends_by_itself
        """Whether what is on its way makes room for what is saved meanwhile, see `SwapEngine.makes_way`."""
        super().__init__()  # from here on it hears of writes

    @property
    def is_manual(self) -> bool:
        """Whether the user says when it is moved."""
        return bool(self.name)

    def is_given(self, values: Iterable[Any]) -> None:
        """The region is called with these: other code may hold them, too, and what is in objects among them."""
        for value in values:
            for leaf in leaves(value):
                if isinstance(leaf, Tensor):
                    self._passed.append(weakref.ref(leaf))
                else:
                    self.surroundings.take(leaf)

    def passes(self, tree: Any) -> None:
        """The region gives these: other code may hold them, too."""
        self._passed += [weakref.ref(leaf) for leaf in leaves(tree) if isinstance(leaf, Tensor)]

    def casts(self, weight: Tensor) -> None:
        """A weight was cast inside the region."""
        self._cast_weights.append(weight)

    def owned_elsewhere(self) -> dict[int, str]:
        """Where storages that others own begin, and what a tensor in each of them counts as; waits for the queue."""
        found = self.surroundings.storages()
        if self._cast_weights:
            found.update((storage_of(weight), "parameter_bytes") for weight in self._cast_weights)
            self._cast_weights.clear()
        return found

    def held_elsewhere(self) -> dict[int, list[Callable[[], Any]]]:
        """Where storages begin that other code may hold, with weak references to what it holds; waits for the queue."""
        found: dict[int, list[Callable[[], Any]]] = {}
        for holder in self._passed:
            tensor = holder()
            if tensor is not None:
                found.setdefault(storage_of(tensor), []).append(holder)
        self._passed.clear()
        return found

    def add(self, tensor: Tensor, may_be_written: bool = False) -> Any:
        """What stands for `tensor` from now on: a handle, or something that keeps it if it is exempt.

        Args:
            tensor: The tensor.
            may_be_written: A write before it is read back is the user's business.
        """
        if comes_from_a_parameter(tensor, VIEWS_AND_CASTS):
            self.left["parameter_bytes"] += tensor.nbytes
            return Kept(tensor)
        return self.save(tensor, may_be_written)

    def save(self, tensor: Tensor, may_be_written: bool = False) -> Any:
        """As `add`, but whether it comes from a parameter is looked at when the group is closed."""
        nbytes = nbytes_of(tensor)
        if nbytes < self._min_bytes or not nbytes or is_parameter(tensor):
            self.left["parameter_bytes" if is_parameter(tensor) else "small_bytes"] += nbytes
            return Kept(tensor)
        self.saved += nbytes
        if self.is_smoothed:
            self.engine.makes_way(self)
        handle = SwapHandle(self, tensor, nbytes, may_be_written)
        self._handles.append(weakref.ref(handle))
        return handle

    def wrote(self, written: Written) -> None:
        if self.is_noted and self.engine.ledger.broken is None:
            self.engine.settle(tells=False)  # else a handle might change while it is looked at
        for ref in self._handles:
            handle = ref()
            if handle is None or not handle.wrote(written) or handle.may_be_written:
                continue
            if id(handle) not in self._written:
                self._written[id(handle)] = self.changed = why(written)

    def check_handle(self, handle: SwapHandle) -> None:
        """Raise ReplayMismatchError if what the handle stands for was written."""
        if id(handle) in self._written:
            raise ReplayMismatchError(self._written[id(handle)])

    @property
    def has_tensor_policy(self) -> bool:
        """Whether there is one to ask."""
        return self._tensor_policy is not None

    def is_reached_now(self) -> bool:
        """Whether backward comes to it with this read, and the engine need only be told."""
        return self.is_unread and self.engine.is_told(self)

    def wants(self, tensor: Tensor) -> bool:
        """Ask the tensor policy."""
        try:
            answer = self._tensor_policy(tensor)
        except Exception as error:  # whatever the user's function raises
            raise PolicyError(
                f"{self.path}: the tensor policy raised {type(error).__name__}: {error}, asked about a tensor of "
                f"shape {tensor.shape} and dtype {tensor.dtype}"
            ) from error
        if answer is CheckpointPolicy.MUST_SWAP:
            return True
        if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            return False
        raise PolicyError(
            f"{self.path}: the tensor policy must answer MUST_SWAP, MUST_SAVE or PREFER_SAVE for a tensor of shape "
            f"{tensor.shape} and dtype {tensor.dtype}, but answered "
            f"{answer if isinstance(answer, CheckpointPolicy) else no_policy(answer)}"
        )

    def why_nothing_left(self) -> Mapping[str, int] | None:
        """When it is closed: bytes of what stays on the device, by why, if that is all of it; else None."""
        if self.is_noted:
            self.engine.settle()
        handles = [ref() for ref in self._handles]
        return None if any(handle is not None and handle.tensor is None for handle in handles) else self.left

    def __enter__(self) -> "SwapGroup":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        handles = [handle for ref in self._handles if (handle := ref()) is not None]
        try:
            if error is None:
                self.engine.close_group(self, handles)
                handles = []  # the engine's, from here on
        finally:
            for handle in handles if not self.is_noted else ():
                if handle.tensor is not None:
                    handle.leave()


class SwapScope(Scope):
    """The forward of a swapped region: saved tensors join its group."""

    def __init__(self, group: SwapGroup) -> None:
        self.group = group
        self.intercepts = group.surroundings.casts_frozen_weights

    def pack(self, tensor: Tensor) -> Any:
        return self.group.save(tensor)

    def leave_alone(self, tensor: Tensor) -> None:
        self.group.left_alone.append(alias(tensor, tracked=False))

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        result = run(*args)
        if name == "Cast" and isinstance(args[0], Tensor) and is_parameter(args[0]):
            self.group.casts(result)
        return result


class HostSide:
    """The group of one call of a replayed region, opened when the first tensor goes to host.

    Args:
        open_group: Opens it.
        groups: Closes it when the region ends.
        passed: What the region is called with.
    """

    def __init__(self, open_group: Callable[[], SwapGroup], groups: ExitStack, passed: tuple[Any, ...]) -> None:
        self._open_group = open_group
        self._groups = groups
        self._passed = passed
        groups.callback(self._end)
        self.group: SwapGroup | None = None
        """Until the region ends."""
        self._marked: list[Tensor] = []

    def add(self, tensor: Tensor, may_be_written: bool = False) -> Any:
        """What stands for `tensor`; see `SwapGroup.add`."""
        if self.group is None:
            self.group = self._groups.enter_context(self._open_group())
            self.group.is_given(self._passed)
            self._passed = ()
        return self.group.add(tensor, may_be_written)

    def leave_alone(self, tensor: Tensor) -> None:
        """Leave a tensor on the device that was marked inside the region; see `keep_on_device`."""
        self._marked.append(alias(tensor, tracked=False))
        marks.mark(self._marked[-1])

    def _end(self) -> None:
        self._passed, self.group = (), None  # a replay may hold this object for long
        self._marked.clear()
