"""`Invocation`: one call of a replayed region, from its forward until backward has read what the replay produced.

Note: [Who holds whom]
Autograd's nodes hold placeholders, a placeholder holds its invocation, the invocation holds the region's inputs and
tape, and knows its placeholders only weakly. Nothing it holds leads forward to the region's own nodes, so that a graph
that is dropped without a backward takes all of it along. MindSpore drops a node's placeholders as soon as backward has
passed the node, and with them the values of the replay; one replay therefore serves every reader there is.
"""

import weakref
from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.scopes import Kept, Scope, entered
from hyper_parallel.core.activation_memory.tape import Tape, TapeReader
from hyper_parallel.core.activation_memory.trees import map_leaves
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import Ambient, alias, is_parameter, replay_recording, requires_grad
from ms_ops.dispatch import (
    NO_ANSWER,
    NORMALISATION_WITH_STATE,
    is_old_primitive,
    must_run_once,
    on_copies_of_state,
)

_REMEDY = "the region must do the same each time it runs with the same inputs, or carry the policy MUST_SAVE"


class Placeholder:
    """What autograd holds instead of a saved tensor of a replayed region."""

    __slots__ = ("__weakref__", "_invocation", "dtype", "shape", "value")

    def __init__(self, invocation: "Invocation", tensor: Tensor) -> None:
        self._invocation = invocation
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        """The saved tensor; the first one asked for replays the region."""
        if self.value is None:
            self._invocation.replay()
        assert self.value is not None
        return self.value


class _Input:
    """A tensor input that doesn't wait as itself: on host, or replayed by an enclosing region."""

    __slots__ = ("packed", "tracked")

    def __init__(self, packed: Any, tracked: bool) -> None:
        self.packed = packed
        self.tracked = tracked

    def get(self) -> Tensor:
        return alias(self.packed.get(), self.tracked)


def offer_inputs(pack: Callable[[Tensor], Any] | None, args: tuple, kwargs: dict) -> Any:
    """The arguments as they wait for a replay: `pack` says what waits instead of each tensor that is no parameter.

    Containers are copied: a list or dict that the region, or code after it, appends to waits as it was.
    """

    def waits(leaf: Any) -> Any:
        if pack is None or not isinstance(leaf, Tensor) or is_parameter(leaf):
            return leaf
        packed = pack(leaf)
        return leaf if isinstance(packed, Kept) else _Input(packed, requires_grad(leaf))

    return map_leaves(waits, (args, kwargs))


class Invocation:
    """One call of a replayed region."""

    def __init__(self, body: Callable[..., Any], path: str, tape: Tape, contexts: tuple[Any, Any]) -> None:
        self.path = path
        self.tape = tape
        self.placeholders: list[weakref.ref[Placeholder]] = []
        self._body = body
        self._inputs: Any = None
        self._ambient = Ambient()
        self._forward_context, self._replay_context = contexts
        self._replayed = False

    def forward(self, args: tuple, kwargs: dict, pack_input: Callable[[Tensor], Any] | None) -> Any:
        """Run the region; `pack_input` says what waits instead of a tensor input (the tensor itself: it waits)."""
        self._inputs = offer_inputs(pack_input, args, kwargs)
        with entered(_Recording(self)), self._forward_context:
            return self._body(*args, **kwargs)

    def replay(self) -> None:
        """Run the region again and give every placeholder that is still held its value."""
        if self._replayed:
            raise ReplayMismatchError(
                f"{self.path}: backward reads a saved tensor that the replay did not produce; {_REMEDY}"
            )
        scope = Replaying(self)
        with replay_recording(), self._ambient.restored():
            args, kwargs = map_leaves(lambda leaf: leaf.get() if isinstance(leaf, _Input) else leaf, self._inputs)
            with entered(scope), self._replay_context:
                self._body(*args, **kwargs)
        scope.finish()
        self._replayed = True
        self._inputs = self._replay_context = None


class _Recording(Scope):
    """The forward of a replayed region: saved tensors become placeholders, what runs once goes onto the tape."""

    records = True

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self.tape = invocation.tape
        self._keeps = False

    def pack(self, tensor: Tensor) -> Any:
        if self._keeps:
            return Kept(tensor)
        placeholder = Placeholder(self._invocation, tensor)
        self._invocation.placeholders.append(weakref.ref(placeholder))
        return placeholder

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        if not must_run_once(name, args):
            return run(*args)
        self._keeps = is_old_primitive(args)  # what the replay won't save again is kept as it is
        try:
            result = run(*args)
        finally:
            self._keeps = False
        self.tape.write_operator(name, result)
        return result


class _Repeating(Scope):
    """Runs operators again, reading from a tape what ran once."""

    replays = True

    def __init__(self, tape: Tape, path: str) -> None:
        self.reader = TapeReader(tape, path)

    def answer(self, name: str, args: tuple) -> Any:
        return self.reader.operator(name) if must_run_once(name, args) else NO_ANSWER

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        if must_run_once(name, args):
            return self.reader.operator(name)
        if name in NORMALISATION_WITH_STATE:
            return run(*on_copies_of_state(name, args))
        return run(*args)


class Repeated(_Repeating):
    """A nested region inside the replay of an enclosing one: only its output is needed, nothing of it is saved."""

    def pack(self, tensor: Tensor) -> Any:
        return None


class Replaying(_Repeating):
    """The replay of a region: what autograd saves now is what the placeholders of the forward stand for."""

    def __init__(self, invocation: Invocation) -> None:
        super().__init__(invocation.tape, invocation.path)
        self._invocation = invocation
        self._next = 0
        self._values: list[tuple[Placeholder, Tensor]] = []

    def pack(self, tensor: Tensor) -> Any:
        placeholders, index = self._invocation.placeholders, self._next
        self._next += 1
        if index >= len(placeholders):
            raise ReplayMismatchError(
                f"{self._invocation.path}: the replay saves more than the {len(placeholders)} tensors that the forward "
                f"saved; the first one too many has shape {tensor.shape} and dtype {tensor.dtype}; {_REMEDY}"
            )
        placeholder = placeholders[index]()
        if placeholder is not None:
            if placeholder.shape != tensor.shape or placeholder.dtype != tensor.dtype:
                raise ReplayMismatchError(
                    f"{self._invocation.path}: saved tensor {index + 1} of {len(placeholders)} has shape "
                    f"{tensor.shape} and dtype {tensor.dtype} in the replay, but shape {placeholder.shape} and dtype "
                    f"{placeholder.dtype} in the forward; {_REMEDY}"
                )
            self._values.append((placeholder, alias(tensor, tracked=False) if requires_grad(tensor) else tensor))
        return None  # the replay's own graph is dropped unread; holding the tensor there would keep all of them

    def finish(self) -> None:
        """Check that the replay did all that the forward did; only then are its values given out."""
        count = len(self._invocation.placeholders)
        if self._next != count:
            raise ReplayMismatchError(
                f"{self._invocation.path}: the replay saved {self._next} tensors, but the forward saved {count}; "
                f"{_REMEDY}"
            )
        self.reader.finish()
        for placeholder, value in self._values:
            placeholder.value = value
        self._values.clear()
