"""`OperatorLog`: which operators the forward of a region ran, for the comparison with its replay.

An entry is the operator's dispatch name, its plain arguments (numbers, strings, shapes: what is no tensor), and the
shapes and dtypes of its results. Plain arguments catch a Python number that differs, which shapes don't.
"""

from collections.abc import Iterable
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.call_site import call_site
from hyper_parallel.core.activation_memory.scopes import unseen
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.dispatch import MATRIX_PRODUCTS, NO_ANSWER, REPLACEABLE, meaningful
from ms_ops.tensors import checksum, untouched

Entry = tuple[str, tuple, Any, Any, tuple]
"""Name, plain arguments, results, checksums of the results (None unless asked for), the `param_info` of parameters."""

KEPT: Any = "kept"
"""Stands in an entry for the results of an operator that runs once: the replay reads them."""

REMEDY = (
    "the region must do the same each time it runs with the same inputs; give the cell that holds this operator the "
    "policy MUST_SAVE, or register what it depends on with register_state_provider"
)

_PLAIN = (int, float, bool, str, type(None))


def plain_arguments(args: Iterable[Any]) -> tuple:
    """What is no tensor among an operator's arguments."""
    found = []
    for argument in args:
        kind = type(argument)
        if kind in _PLAIN:
            found.append(argument)
        elif kind is tuple or kind is list:
            found.append(plain_arguments(argument))
    return tuple(found)


def results_of(result: Any) -> Any:
    """Shape and dtype of every tensor in an operator's result."""
    if isinstance(result, Tensor):
        return result.shape, result.dtype
    if isinstance(result, (tuple, list)):
        return [results_of(item) for item in result]
    return None


def checksums_of(result: Any) -> Any:
    """A checksum of every tensor in an operator's result."""
    if isinstance(result, Tensor):
        return checksum(result)
    if isinstance(result, (tuple, list)):
        return [checksums_of(item) for item in result]
    return None


class OperatorLog:
    """Operators in forward order.

    Note: [Operators that a replay needn't run]
    Of the operators after the last one whose result backward needs, a replay asks only for shapes. Which one that is,
    is known from the forward: every saved tensor, every value that was read on host, and every nested region needs all
    operators so far. A matrix product saves its factors, so that its own result isn't needed if its shape tells that
    what was saved is a factor.

    Args:
        values: Take a checksum of every result.
        all_needed: Run every operator again.
    """

    __slots__ = ("_at", "_reads_at", "all_needed", "answers", "entries", "needed", "values")

    def __init__(self, values: bool = False, all_needed: bool = False) -> None:
        self._at: dict[Any, list[Any]] = {}
        self._reads_at: dict[Any, list[Any]] = {}
        self.answers: dict[int, Any] = {}
        """What a policy function answered, and shapes and dtypes of the results, by the index of the entry."""
        self.entries: list[Entry] = []
        self.values = values
        self.needed = 0
        """How many operators a replay must run."""
        self.all_needed = all_needed or values

    def need(self) -> None:
        """What ran so far, a replay runs."""
        self.needed = len(self.entries)

    def values_at(self, site: Any) -> list[Any]:
        """What an instruction has taken from Python into tensors, in order: indices, numbers, arrays.

        By the instruction, since what code makes once and keeps elsewhere is missing in the replay, rightly.
        """
        return self._at.setdefault(site, [])

    def reads_at(self, site: Any) -> list[Any]:
        """What an instruction has read on host, in order."""
        return self._reads_at.setdefault(site, [])

    def saved(self, tensor: Tensor) -> None:
        """Backward needs this tensor, the result of some operator that has run, or an input."""
        count = len(self.entries)
        if count and self.needed < count:
            name, _, results, *_ = self.entries[-1]
            self.needed = count - (name in MATRIX_PRODUCTS and results != (tensor.shape, tensor.dtype))

    def write(self, name: str, args: tuple, result: Any, parameters: Iterable[Tensor] = ()) -> None:
        """An operator has run in the forward; `parameters` are those among its arguments."""
        sums = checksums_of(meaningful(name, result)) if self.values else None
        infos = tuple(parameter.param_info for parameter in parameters)
        self.entries.append((name, plain_arguments(args), results_of(result), sums, infos))
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            self.need()  # a number may become a shape: MindSpore reads it without a word

    def write_once(self, name: str) -> None:
        """An operator has run whose result the replay will read."""
        self.entries.append((name, (), KEPT, None, ()))


class LogReader:
    """Compares a replay with the log of its forward, operator by operator.

    Args:
        log: The log.
        path: The region, for messages.
        cells: The cells inside, with their paths below it.
    """

    __slots__ = ("_cells", "_entries", "_log", "_needed", "_next", "_path", "_recalled", "_remedy", "_taken", "_values")

    def __init__(self, log: OperatorLog, path: str, cells: Iterable[tuple[str, nn.Cell]] = ()) -> None:
        self._cells = cells
        self._entries = log.entries
        self._values = log.values
        self._needed = len(log.entries) if log.all_needed else log.needed
        self._next = 0
        self._path = path
        self._remedy = REMEDY
        self._log = log
        self._taken: dict[Any, int] = {}
        self._recalled: dict[Any, int] = {}

    def breaks_a_gradient(self, name: str) -> None:
        """The replay takes a gradient through an operator that runs once: what differs from here on, does so for it."""
        self._remedy = (
            f"the region takes a gradient through {name}{call_site(self._cells)}, and the replay's own gradient can't "
            f"go through a recorded result; give the cell that takes the gradient the policy MUST_SAVE, or take {name} "
            f"out of that gradient"
        )

    def takes(self, site: Any, what: str, value: Any) -> None:
        """An instruction of the replay takes a value from Python into a tensor."""
        if self._values:
            return  # the operator that reads it is named
        values, index = self._log.values_at(site), self._taken.get(site, 0)
        self._taken[site] = index + 1
        if index < len(values) and values[index] != value and repr(values[index]) != repr(value):  # nan is not nan
            raise ReplayMismatchError(
                f"{self._path}: {what} is of {value!r} in the replay{call_site(self._cells)}, but of {values[index]!r} "
                f"in the forward; {self._remedy}"
            )

    def recalls(self, site: Any) -> Any:
        """What an instruction of the replay reads on host: what it read in the forward; else NO_ANSWER."""
        values, index = self._log.reads_at(site), self._recalled.get(site, 0)
        self._recalled[site] = index + 1
        return values[index] if index < len(values) else NO_ANSWER

    def keeps(self, name: str) -> bool:
        """Whether the operator that comes next is one whose results the replay reads."""
        entries, index = self._entries, self._next
        return index < len(entries) and entries[index][2] is KEPT and entries[index][0] == name

    @property
    def next(self) -> int:
        """The index of the operator that comes next."""
        return self._next

    def begins(self, name: str) -> None:
        """The replay is about to run an operator."""
        index = self._next
        self._next = index + 1
        if index >= len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay runs {name} as operator {index + 1}{call_site(self._cells)}, but the "
                f"forward ran only {len(self._entries)} operators; {self._remedy}"
            )
        if self._entries[index][0] != name:
            raise self._differs(name, describe(self._entries[index]))

    def ran(self, name: str, args: tuple, result: Any, parameters: Iterable[Tensor] = ()) -> None:
        """The operator that began has run."""
        entry = self._compare(name, args, results_of(result))
        infos = tuple(parameter.param_info for parameter in parameters)
        # a parameter that `x[...] = v` has rebound isn't known as one any more: only two that are known can differ
        if len(infos) == len(entry[4]) and any(one is not other for one, other in zip(infos, entry[4], strict=True)):
            raise self._differs(
                f"{describe(entry)} of {_names(infos)}",
                f"the same of {_names(entry[4])}",
            )
        if self._values:
            sums = checksums_of(meaningful(name, result))
            if sums != entry[3]:
                raise self._differs(f"{describe(entry)} with checksum {sums}", f"the same with checksum {entry[3]}")

    def left_out(self, name: str, args: tuple) -> None:
        """The operator that began is not run, since nobody reads its result."""
        self._compare(name, args, self._entries[self._next - 1][2])

    def _compare(self, name: str, args: tuple, results: Any) -> Entry:
        entry, arguments = self._entries[self._next - 1], plain_arguments(args)
        if entry[2] != results or (entry[1] != arguments and repr(entry[1]) != repr(arguments)):  # nan is not nan
            raise self._differs(describe((name, arguments, results, None, ())), describe(entry))
        return entry

    def stand_in(self, name: str) -> Tensor | None:
        """A tensor like the result of the operator that comes next, if nobody will read it."""
        if name not in REPLACEABLE or not self._needed <= self._next < len(self._entries):
            return None
        expected, _, results, *_ = self._entries[self._next]
        if expected != name or not isinstance(results, tuple):
            return None
        with unseen():
            return untouched(*results)

    def finish(self) -> None:
        """Check that the replay ran all that the forward ran."""
        if self._next < len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay ended after {self._next} operators, but the forward ran "
                f"{len(self._entries)}; the first one missing is {describe(self._entries[self._next])}; {self._remedy}"
            )

    def _differs(self, found: str, expected: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._path}: operator {self._next} of {len(self._entries)} is {found} in the "
            f"replay{call_site(self._cells)}, but {expected} in the forward; {self._remedy}"
        )


def describe(entry: Entry) -> str:
    """An operator with its plain arguments and results, for messages."""
    name, arguments, results, *_ = entry
    text = name + (f"{arguments!r}" if arguments else "")
    return text if results is None or results is KEPT else f"{text} -> {_results(results)}"


def _names(infos: tuple) -> str:
    return ", ".join(f"parameter {info.name}" for info in infos) or "no parameter"


def _results(results: Any) -> str:
    if isinstance(results, list):
        return "(" + ", ".join(_results(item) for item in results) + ")"
    return "no tensor" if results is None else f"{results[1]} {results[0]}"
