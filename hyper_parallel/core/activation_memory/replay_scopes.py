"""The scopes of a replayed region: `Recording` its forward, `Replaying` its replay, `Repeated` one inside another's."""

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.call_site import call_site
from hyper_parallel.core.activation_memory.dropout import PackedDropout, PackedMask
from hyper_parallel.core.activation_memory.operator_log import REMEDY, LogReader, results_of
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.scopes import Kept, Scope, entered, unseen
from hyper_parallel.core.activation_memory.tape import Tape, TapeReader
from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import alias, is_parameter, requires_grad
from ms_ops.dispatch import (
    NO_ANSWER,
    ROUTING,
    Kind,
    arguments,
    filled_by_collective,
    is_old_primitive,
    kind_of,
    moving_statistics,
    on_copies_of_state,
    parameters_read,
    wait_for_collective,
    written_parameter,
)

if TYPE_CHECKING:
    from hyper_parallel.core.activation_memory.replay import Invocation


_WROTE = "{}, into its argument"
"""On a tape: what a collective has written."""


class Placeholder:
    """What autograd holds instead of a saved tensor of a replayed region."""

    __slots__ = ("__weakref__", "_cleared", "_invocation", "_kept", "dtype", "shape", "value")

    def __init__(self, invocation: "Invocation", tensor: Tensor) -> None:
        self._invocation = invocation
        self._kept: Kept | None = None
        self._cleared: Exception | None = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        """The saved tensor; the first one asked for replays the region."""
        if self._kept is not None:
            return self._kept.get()
        if self._cleared is not None:
            raise self._cleared
        if self.value is None:
            self._invocation.replay()
        assert self.value is not None
        return self.value

    @property
    def path(self) -> str:
        """The region."""
        return self._invocation.path

    def clear(self, error: Exception) -> None:
        """Let go of the value; who asks for it gets the error."""
        self.value, self._cleared = None, error

    def keep(self, tensor: Tensor) -> None:
        """The operator that has saved the tensor won't run again."""
        self._kept = Kept(tensor)


class Recording(Scope):
    """The forward of a replayed region: saved tensors become placeholders, what runs once goes onto the tape."""

    records = True

    def __init__(self, invocation: "Invocation") -> None:
        self.invocation = invocation
        self.tape = invocation.tape
        self._log = invocation.tape.log
        self._choice = invocation.choice
        self._keeps = False
        self._packs_mask = False
        self._mask: PackedMask | None = None
        self._saved_now: list[tuple[Placeholder, Tensor]] | None = None
        """What the operator that runs now has saved, while its policy isn't known.

        Nothing is left here when it has run: autograd's nodes hold this scope, and tensors hold their nodes."""

    def pack(self, tensor: Tensor) -> Any:
        if self._keeps:
            return self._keep(tensor)
        self._log.saved(tensor)
        if self.invocation.benefit is not None:
            self.invocation.benefit.saved(tensor)
        placeholder = Placeholder(self.invocation, tensor)
        self.invocation.placeholders.append(weakref.ref(placeholder))
        if self._saved_now is not None:
            self._saved_now.append((placeholder, tensor))
        return placeholder

    def _keep(self, tensor: Tensor) -> Any:
        if not self._packs_mask or self._mask is not None:
            return Kept(tensor)
        self._mask = PackedMask(tensor)
        return self._mask

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        kind = kind_of(name)
        parameters = parameters_read(args)
        for parameter in parameters:
            self.invocation.watch.add_parameter(parameter)
        if kind is Kind.UNSEEN:
            return run(*args)
        if kind is Kind.ONCE or (kind is Kind.WRITE and not _is_restorable(args, self.invocation.overwritten)):
            return self._once(name, run, args)
        if kind is Kind.STATE:
            for statistic in moving_statistics(args):
                if is_parameter(statistic):
                    self.invocation.watch.updates(statistic.param_info)
        placed = len(self.invocation.placeholders)
        if (self._choice.policy is not None or name in ROUTING) and not self.inside_a_gradient:
            result, policy = self._run_and_ask(name, run, args)
            if not policy.replays:
                return self._write_once(name, result, policy, args)
        else:
            result = run(*args)
        self._log.write(name, arguments(args), result, parameters)
        if kind is not Kind.PLAIN or len(self.invocation.placeholders) != placed:
            self._log.need()  # an old primitive, which saves while it runs: perhaps its own result
        return result

    def _ask(self, name: str, result: Any, args: tuple, runs_once: bool = False) -> CheckpointPolicy:
        invocation, choice = self.invocation, self._choice
        said, policy = choice.ask(invocation.path, name, result, invocation.cells, arguments(args), runs_once)
        if choice.policy is not None and choice.policy.asks:
            self._log.answers[len(self._log.entries)] = said, results_of(result)
        return policy

    def _run_and_ask(self, name: str, run: Callable[..., Any], args: tuple) -> tuple[Any, CheckpointPolicy]:
        placed = len(self.invocation.placeholders)
        saved = self._saved_now = []
        try:
            result = run(*args)
        finally:
            self._saved_now = None
        policy = CheckpointPolicy.PREFER_SAVE  # what chooses experts
        if self._choice.policy is not None and not (name in ROUTING and not self._choice.policy.names(name)):
            policy = self._ask(name, result, args)
        if not policy.replays:  # an old primitive saves while it runs, and the replay won't run it
            for placeholder, tensor in saved:
                placeholder.keep(tensor)
            del self.invocation.placeholders[placed:]
        return result, policy

    def _once(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        self._keeps = is_old_primitive(args)  # what the replay won't save again is kept as it is
        self._packs_mask = self._keeps and PackedDropout.suits(name, args)
        self._mask = None
        try:
            result = run(*args)
        finally:
            self._keeps = False
        policy = CheckpointPolicy.MUST_SAVE
        if self._choice.policy is not None and not self.inside_a_gradient:
            policy = self._ask(name, result, args, runs_once=True)
        if not self._packs_mask:
            return self._write_once(name, result, policy, args)
        self._log.write_once(name)
        self.tape.write_dropout(name, PackedDropout(args, result, self._mask or PackedMask(result[1])))
        return result

    def _write_once(self, name: str, result: Any, policy: CheckpointPolicy, args: tuple) -> Any:
        for leaf in leaves(result):
            wait_for_collective(leaf)
        self._log.write_once(name)
        to_host = self._choice.to_host if policy.swaps else None
        self.tape.write_operator(name, result, to_host)
        if filled := filled_by_collective(name, args):
            self.tape.write_operator(_WROTE.format(name), filled, to_host)
        return result

    def enters(self, cell: nn.Cell) -> None:
        self.invocation.enter(cell, runs_again=self.inside_a_gradient)

    def wrote(self, written: Written) -> None:
        self._log.need()
        self.invocation.write_inside(written)

    def leave_alone(self, tensor: Tensor) -> None:
        self._choice.leave_alone(tensor)

    def reads_on_host(self) -> None:
        self._log.need()

    def remembers(self, site: Any, value: Any) -> None:
        self._log.reads_at(site).append(value)

    def takes_value(self, site: Any, what: str, value: Any) -> None:
        self._log.values_at(site).append(value)


def _is_restorable(args: tuple, overwritten: dict[int, Any]) -> bool:
    """Whether a write may run again: into a temporary, or into a parameter that the replay has a copy of."""
    info = written_parameter(args)
    return info is None or id(info) in overwritten


class _Repeating(Scope):
    """Runs operators again, reading from a tape what ran once."""

    replays = True

    def __init__(self, tape: Tape, path: str, overwritten: dict[int, Any], cells: Any) -> None:
        self.path = path
        self.cells = cells
        self.overwritten = overwritten
        self.after = contextlib.ExitStack()
        """Closed when the replay has ended."""
        self.reader = TapeReader(tape, path)
        self._log = LogReader(tape.log, path, cells)

    def answer(self, name: str, args: tuple) -> Any:
        if name == "Print":
            return None  # it printed in the forward
        kind = kind_of(name)
        if kind is Kind.UNSEEN:
            return NO_ANSWER
        self.ask_again(name, args)
        if self._is_recorded(name, kind, args):
            self._log.begins(name)
            return self._recorded(name, args)
        stand_in = self.stand_in(name) if kind is Kind.PLAIN else None
        if stand_in is None:
            return NO_ANSWER
        self._log.begins(name)
        self._log.left_out(name, args)
        return stand_in

    def stand_in(self, name: str) -> Tensor | None:
        """What to give instead of the result of the operator that comes next; None: run it."""
        return None

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        kind = kind_of(name)
        if kind is Kind.UNSEEN:
            return run(*args)
        if not is_old_primitive(args):
            self.ask_again(name, args)
        is_recorded = self._is_recorded(name, kind, args)
        stand_in = self.stand_in(name) if kind is Kind.PLAIN else None
        self._log.begins(name)
        if stand_in is not None:
            self._log.left_out(name, arguments(args))
            return stand_in
        if is_recorded:
            return self._recorded(name, args)
        result = run(*(on_copies_of_state(args) if kind is Kind.STATE else args))
        self._log.ran(name, arguments(args), result, parameters_read(args))
        return result

    def ask_again(self, name: str, args: tuple) -> None:
        """The policy of operators is asked before an operator of a replay."""

    def _is_recorded(self, name: str, kind: Kind, args: tuple) -> bool:
        return kind is Kind.ONCE or self._log.keeps(name) or (kind is Kind.WRITE and not self._repeats(args))

    def _recorded(self, name: str, args: tuple) -> Any:
        with unseen():
            result = self.reader.operator(name, arguments(args))
        if filled := filled_by_collective(name, args):
            with entered(Scope()):
                for tensor, value in zip(filled, self.reader.operator(_WROTE.format(name)), strict=True):
                    tensor.copy_(value)
        if self.inside_a_gradient and any(isinstance(leaf, Tensor) and requires_grad(leaf) for leaf in leaves(result)):
            self._log.breaks_a_gradient(name)
        return result

    def _repeats(self, args: tuple) -> bool:
        return _is_restorable(args, self.overwritten)

    def wrote(self, written: Written) -> None:
        if written.parameter is not None and id(written.parameter) not in self.overwritten:
            raise ReplayMismatchError(
                f"{self.path}: the replay writes {written} by {written.how}{call_site()}, which the forward did not "
                f"write; {REMEDY}"
            )

    def takes_value(self, site: Any, what: str, value: Any) -> None:
        self._log.takes(site, what, value)

    def recalls(self, site: Any) -> Any:
        return self._log.recalls(site)

    def finish(self) -> None:
        """Check that the replay did all that the forward did."""
        self._log.finish()
        self.reader.finish()


class Repeated(_Repeating):
    """A nested region inside the replay of an enclosing one: only its output is needed, nothing of it is saved."""

    def __init__(self, tape: Tape, path: str, around: _Repeating) -> None:
        super().__init__(tape, path, around.overwritten, around.cells)
        self.after = around.after

    def pack(self, tensor: Tensor) -> Any:
        return None


class Replaying(_Repeating):
    """The replay of a region: what autograd saves now is what the placeholders of the forward stand for."""

    def __init__(self, invocation: "Invocation") -> None:
        super().__init__(invocation.tape, invocation.path, invocation.overwritten, invocation.cells)
        self._invocation = invocation
        self._next = 0
        self._values: list[tuple[Placeholder, Tensor]] = []

    def pack(self, tensor: Tensor) -> Any:
        placeholders, index = self._invocation.placeholders, self._next
        self._next += 1
        if index >= len(placeholders):
            raise ReplayMismatchError(
                f"{self.path}: the replay saves more than the {len(placeholders)} tensors that the forward "
                f"saved; the first one too many has shape {tensor.shape} and dtype {tensor.dtype}; {REMEDY}"
            )
        placeholder = placeholders[index]()
        if placeholder is not None:
            if placeholder.shape != tensor.shape or placeholder.dtype != tensor.dtype:
                raise ReplayMismatchError(
                    f"{self.path}: saved tensor {index + 1} of {len(placeholders)} has shape "
                    f"{tensor.shape} and dtype {tensor.dtype} in the replay, but shape {placeholder.shape} and dtype "
                    f"{placeholder.dtype} in the forward; {REMEDY}"
                )
            self._values.append((placeholder, alias(tensor, tracked=False) if requires_grad(tensor) else tensor))
        return None  # the replay's own graph is dropped unread; holding the tensor there would keep all of them

    def stand_in(self, name: str) -> Tensor | None:
        return self._log.stand_in(name)

    def ask_again(self, name: str, args: tuple) -> None:
        choice = self._invocation.choice
        if choice.policy is not None and choice.policy.asks:
            answer = self._invocation.tape.log.answers.get(self._log.next)
            choice.ask_again(self.path, name, answer, self.cells, arguments(args))

    def finish(self) -> None:
        """Check that the replay did all that the forward did; only then are its values given out."""
        super().finish()
        count = len(self._invocation.placeholders)
        if self._next != count:
            raise ReplayMismatchError(
                f"{self.path}: the replay saved {self._next} tensors, but the forward saved {count}; {REMEDY}"
            )
        for placeholder, value in self._values:
            placeholder.value = value
        self._values.clear()
