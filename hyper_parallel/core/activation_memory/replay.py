"""`Invocation`: one call of a replayed region, from its forward until backward has read what the replay produced.

Note: [Who holds whom]
Autograd's nodes hold placeholders, a placeholder holds its invocation, the invocation holds the region's inputs and
tape, and knows its placeholders only weakly. Nothing it holds leads forward to the region's own nodes, so that a graph
that is dropped without a backward takes all of it along. MindSpore drops a node's placeholders as soon as backward has
passed the node, and with them the values of the replay; one replay therefore serves every reader there is.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_memory.benefit import Benefit, check_whole_net
from hyper_parallel.core.activation_memory.changes import Watch, live
from hyper_parallel.core.activation_memory.operator_choice import OperatorChoice
from hyper_parallel.core.activation_memory.operator_log import REMEDY
from hyper_parallel.core.activation_memory.python_state import PythonState
from hyper_parallel.core.activation_memory.replay_scopes import Placeholder, Recording, Replaying
from hyper_parallel.core.activation_memory.scopes import Kept, entered, open_scopes, unseen
from hyper_parallel.core.activation_memory.state_providers import ProvidedState
from hyper_parallel.core.activation_memory.tape import Tape
from hyper_parallel.core.activation_memory.trees import leaves, map_leaves
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import Ambient, alias, gradients_begun, is_parameter, record_again, requires_grad, result_like
from ms_ops.tensors import copy_of, rebind


class _Input:
    """A tensor input that doesn't wait as itself: on host, replayed by an enclosing region, or a copy."""

    __slots__ = ("attributes", "is_written", "original", "packed", "tracked")

    def __init__(self, packed: Any, original: Tensor, is_written: bool = False) -> None:
        self.packed = packed
        self.original = weakref.ref(original)
        self.attributes = dict(vars(original))
        self.tracked = requires_grad(original)
        self.is_written = is_written

    def fetch(self) -> None:
        """Load the tensor, or replay the region that gives it: before a graph is begun that these must not be in."""
        self.packed = Kept(self.packed.get())

    def get(self) -> Tensor:
        """The tensor, as an input of the replay."""
        fetched = self.packed.get()
        tensor = result_like(fetched, self.tracked) if self.is_written else alias(fetched, self.tracked)
        for name, value in self.attributes.items():
            vars(tensor).setdefault(name, value)  # the user's own
        return tensor


def offer_inputs(pack: Callable[[Tensor], Any] | None, args: tuple, kwargs: dict) -> Any:
    """The arguments as they wait for a replay: `pack` says what waits instead of each tensor that is no parameter.

    Containers are copied: a list or dict that the region, or code after it, appends to waits as it was.
    """

    def waits(leaf: Any) -> Any:
        if pack is None or not isinstance(leaf, Tensor) or is_parameter(leaf):
            return leaf
        packed = pack(leaf)
        return leaf if isinstance(packed, Kept) else _Input(packed, leaf)

    return map_leaves(waits, (args, kwargs))


class Invocation:
    """One call of a replayed region.

    Args:
        owner: The cell or callable that the region is.
        body: What runs.
        path: The region's name, for messages.
        tape: Where results go that the replay reads.
        contexts: Of the forward, and of the replay.
        choice: What happens to the results of operators.
    """

    after_forward: ClassVar[list[Callable[["Invocation"], None]]] = []
    """Called when the forward of an outermost region has ended."""
    after_replay: ClassVar[list[Callable[["Invocation"], None]]] = []

    def __init__(
        self,
        owner: Any,
        body: Callable[..., Any],
        path: str,
        tape: Tape,
        contexts: tuple[Any, Any],
        choice: OperatorChoice,
    ) -> None:
        self.path = path
        self.tape = tape
        self.choice = choice
        self.is_outermost = len(open_scopes()) == 1
        self.benefit: Benefit | None = None
        self.placeholders: list[weakref.ref[Placeholder]] = []
        self.watch = Watch(path)
        self.overwritten: dict[int, tuple[Parameter, Tensor]] = {}
        """Parameters that the region writes (by the id of their `param_info`), and what they were before."""
        self._owner = owner
        self._body = body
        self._inputs: Any = None
        self.state: Any = None
        self.provided: ProvidedState | None = ProvidedState()
        self._ambient = Ambient()
        self._forward_context, self._replay_context = contexts
        self._takes_gradients = False
        self._replayed = False

    def forward(self, args: tuple, kwargs: dict, pack_input: Callable[[Tensor], Any] | None) -> Any:
        """Run the region; `pack_input` says what waits instead of a tensor input (the tensor itself: it waits)."""
        self._look_at(args, kwargs)
        self._inputs = offer_inputs(pack_input, args, kwargs)
        self.benefit = Benefit.of_new(self.path, (args, kwargs)) if pack_input is None else None
        live.add(self)
        gradients = gradients_begun()
        with entered(Recording(self)), self._forward_context:
            output = self._body(*args, **kwargs)
        self._takes_gradients = gradients_begun() != gradients
        self.state.seal()
        around = [scope.invocation for scope in open_scopes() if isinstance(scope, Recording)]
        with unseen():
            self.tape.pack(is_read_whole=bool(around))
        for invocation in around:
            invocation.watch.include(self.watch)
        if self.benefit is not None:
            self.benefit.check(output)
            self.benefit = None
        if not around:
            for listener in self.after_forward:
                listener(self)
        return output

    def _look_at(self, args: tuple, kwargs: dict) -> None:
        objects = []
        for name, argument in (*enumerate(args), *kwargs.items()):
            for leaf in leaves(argument):
                if isinstance(leaf, Tensor):
                    self.watch.add(f"argument {name!r}", leaf)
                else:
                    objects.append((f"argument {name!r}", leaf))
        self.state = PythonState(self._owner, objects)
        self._watch(0, 0)

    def enter(self, cell: nn.Cell, runs_again: bool) -> None:
        """A cell is about to run in the forward; see `PythonState.enter`."""
        tensors, cells = len(self.state.tensors), len(self.state.cells)
        self.state.enter(cell, runs_again=runs_again)
        self._watch(tensors, cells)

    def _watch(self, tensors: int, cells: int) -> None:
        """Watch what the state has found after its first so many tensors and cells."""
        for what, tensor in self.state.tensors[tensors:]:
            self.watch.add(what, tensor)
        for _, cell in self.state.cells[cells:]:
            for parameter in cell._params.values():
                if parameter is not None:
                    self.watch.add("a weight", parameter)

    @property
    def has_replayed(self) -> bool:
        """Whether the replay has run."""
        return self._replayed

    @property
    def cells(self) -> Any:
        """The cells that run inside, with their paths below the region."""
        return self.state.cells

    # ---- writes, see Note: [Changed underneath]

    def finds(self, written: Written) -> str | None:
        """What a tensor that is written from outside is for the replay, if it will read it."""
        if written.parameter is not None and id(written.parameter) in self.overwritten:
            return None  # the replay begins with a copy
        return self.watch.finds(written) or self.tape.finds(written)

    def write_inside(self, written: Written) -> None:
        """The region's own forward is about to write a tensor."""
        with unseen():
            if written.parameter is not None:
                self.watch.updates(written.parameter)
                if isinstance(written.tensor, Parameter):
                    key = id(written.parameter)
                    self.overwritten.setdefault(key, (written.tensor, copy_of(written.tensor)))
                return
            self.tape.rescue(written)
            self.state.rescue(written)

            def rescued(leaf: Any) -> Any:
                if isinstance(leaf, Tensor) and not is_parameter(leaf) and written.reaches(leaf):
                    return _Input(Kept(copy_of(leaf)), leaf, is_written=True)
                if isinstance(leaf, _Input) and not leaf.is_written and written.tensor is leaf.original():
                    leaf.is_written = True
                return leaf

            self._inputs = map_leaves(rescued, self._inputs)

    # ---- replay

    def replay(self) -> None:
        """Run the region again and give every placeholder that is still held its value."""
        if self._replayed:
            raise ReplayMismatchError(
                f"{self.path}: backward reads a saved tensor that the replay did not produce; {REMEDY}"
            )
        self.watch.verify()
        if self.is_outermost:
            check_whole_net(self.path, self.watch.parameters, self._replayed_bytes)
        scope = Replaying(self)
        for leaf in leaves(self._inputs):
            if isinstance(leaf, _Input):
                leaf.fetch()
        record_again(lambda: self._run_again(scope), self._takes_gradients)
        scope.finish()
        self._replayed = True
        live.remove(self)
        for listener in self.after_replay:
            listener(self)
        self._inputs = self._replay_context = self.state = self.provided = None
        self.overwritten = {}

    def _run_again(self, scope: Replaying) -> None:
        assert self.provided is not None
        # before the precision of the forward is restored, which would cast them
        args, kwargs = map_leaves(lambda leaf: leaf.get() if isinstance(leaf, _Input) else leaf, self._inputs)
        with (
            self._parameters_restored(),
            self._ambient.restored(),
            self.provided.restored(),
            self.state.restored(),
            scope.after,
            entered(scope),
            self._replay_context,
        ):
            self._body(*args, **kwargs)

    def _replayed_bytes(self) -> int:
        held = [placeholder for ref in self.placeholders if (placeholder := ref()) is not None]
        return sum(math.prod(placeholder.shape) * placeholder.dtype.itemsize for placeholder in held)

    @contextlib.contextmanager
    def _parameters_restored(self) -> Iterator[None]:
        """Parameters that the region writes begin as they began, in a storage that is thrown away."""
        present = []
        try:
            for parameter, before in self.overwritten.values():
                present.append((parameter, alias(parameter, tracked=False)))
                rebind(parameter, copy_of(before))
            yield
        finally:
            for parameter, tensor in present:
                rebind(parameter, tensor)
