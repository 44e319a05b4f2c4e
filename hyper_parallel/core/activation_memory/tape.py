"""`Tape`: what a replay reads instead of running again, in the order in which the forward produced it.

Three kinds of entries: the result of an operator that runs once, the output of a cell that runs once, and the tape of a
nested region. A nested region's tape belongs to its own invocation and is referred to here, so that a result lives
once, however many regions enclose it.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.dropout import PackedDropout
from hyper_parallel.core.activation_memory.operator_log import REMEDY, OperatorLog
from hyper_parallel.core.activation_memory.scopes import Kept, unseen
from hyper_parallel.core.activation_memory.trees import map_leaves
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import alias, is_parameter, requires_grad, result_like
from ms_ops.tensors import copy_of, storage_of, untouched


class _Saved:
    """A tensor on a tape; `tensor` is the tensor itself or something on host with `get()`."""

    __slots__ = ("_to_host", "is_written", "original", "tensor", "tracked")

    def __init__(self, tensor: Tensor, to_host: Any, tracked: bool, original: Tensor) -> None:
        packed = tensor if to_host is None else to_host(tensor)
        self.tensor = tensor if isinstance(packed, Kept) else packed  # exempt: it waits as it is
        self._to_host = to_host
        self.tracked = tracked
        self.original = weakref.ref(original)
        self.is_written = False

    def get(self) -> Tensor:
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor.get()
        return result_like(tensor, self.tracked) if self.is_written else alias(tensor, self.tracked)

    def is_reached(self, written: Written) -> bool:
        if not isinstance(self.tensor, Tensor):
            return False  # a copy on host, or on its way there: that one watches itself
        return written.tensor is self.original() or written.reaches(self.tensor)

    def leave_out(self) -> None:
        """Nobody reads the values: shape and dtype are enough."""
        if isinstance(self.tensor, Tensor):
            with unseen():
                stand_in = untouched(self.tensor.shape, self.tensor.dtype)
            if stand_in is not None:
                self.tensor = stand_in

    def rescue(self, written: Written) -> None:
        """The region itself is about to write what may be this tensor: keep a copy."""
        self.is_written = self.is_written or written.rebinds  # perhaps this one: only its object would tell
        waiting = self.tensor if isinstance(self.tensor, Tensor) else getattr(self.tensor, "tensor", None)
        if waiting is not None and (written.tensor is self.original() or written.reaches(waiting)):
            copied = copy_of(waiting)
            self.tensor = copied if waiting is self.tensor or self._to_host is None else self._to_host(copied)
            self.is_written = True


def _read(leaf: Any) -> Any:
    return leaf.get() if isinstance(leaf, _Saved) else leaf


class Tape:
    """Results in forward order, written once.

    Args:
        log: Where the operators of the same region are written; a new one by default.
        may_be_written: Results on it may be written before a replay reads them; that is the user's business.
    """

    __slots__ = ("_may_be_written", "_perhaps", "_saved", "entries", "log")

    def __init__(self, log: OperatorLog | None = None, may_be_written: bool = False) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.log = log or OperatorLog()
        self._may_be_written = may_be_written
        self._saved: list[tuple[str, _Saved]] = []
        self._perhaps: list[tuple[int, list[_Saved]]] = []
        """Tensors that are kept only if the replay needs them, and how many operators had run before."""

    def write_operator(self, name: str, result: Any, to_host: Any = None) -> None:
        """The result of an operator; autograd has not seen it yet, so that nothing about it is tracked.

        Args:
            name: The operator.
            result: What it gave.
            to_host: Turns a tensor into something on host that has `get()`.
        """
        self._write(f"operator {name}", result, to_host)

    def write_dropout(self, name: str, dropout: PackedDropout) -> None:
        """The result of a dropout operator."""
        self.entries.append((f"operator {name}", dropout))

    def write_cell(
        self, path: str, output: Any, to_host: Any = None, effects: Any = None, perhaps: bool = False
    ) -> None:
        """The output of a cell that runs once.

        Args:
            path: The cell.
            output: What it gave.
            to_host: Turns a tensor into something on host that has `get()`.
            effects: What else it changed.
            perhaps: Keep the output only if the replay needs its values.
        """
        count = len(self._saved)
        self._write(f"cell {path}", (output, effects), to_host)
        if perhaps:
            self._perhaps.append((len(self.log.entries), [saved for _, saved in self._saved[count:]]))

    def nested(self, path: str, log: OperatorLog | None = None, may_be_written: bool = False) -> "Tape":
        """The tape of a region inside this one."""
        self.log.need()
        tape = Tape(log, may_be_written)
        self.entries.append((f"region {path}", tape))
        return tape

    def finds(self, written: Written) -> str | None:
        """What the written tensor is, if it is on this tape or on that of a region inside."""
        for what, saved in () if self._may_be_written else self._saved:
            if saved.is_reached(written):
                return f"the kept result of {what}"
        for _, entry in self.entries:
            if isinstance(entry, Tape) and (found := entry.finds(written)) is not None:
                return found
        return None

    def over(self, exposed: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The results on this tape, or on that of a region inside, that share the bytes of a tensor."""
        for what, saved in () if self._may_be_written else self._saved:
            if isinstance(saved.tensor, Tensor) and storage_of(saved.tensor) == storage_of(exposed):
                yield f"the kept result of {what}", saved.tensor
        for _, entry in self.entries:
            if isinstance(entry, Tape):
                yield from entry.over(exposed)

    def rescue(self, written: Written) -> None:
        """The region itself is about to write a result that its replay will read: keep a copy."""
        for _, saved in self._saved:
            saved.rescue(written)
        for _, entry in self.entries:
            if isinstance(entry, PackedDropout):
                entry.rescue(written)

    def pack(self, is_read_whole: bool = False) -> None:
        """The region's forward has ended: keep what can be kept smaller.

        Args:
            is_read_whole: An enclosing region's replay needs all that this one gives.
        """
        for position, tensors in self._perhaps:
            if not is_read_whole and not self.log.all_needed and self.log.needed <= position:
                for saved in tensors:
                    saved.leave_out()
        self._perhaps.clear()
        for _, entry in self.entries:
            if isinstance(entry, PackedDropout):
                entry.pack()

    def _write(self, what: str, tree: Any, to_host: Any = None) -> None:
        def saved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or is_parameter(leaf):
                return leaf
            kept = alias(leaf, tracked=False)
            result = _Saved(kept, to_host, requires_grad(leaf), leaf)
            self._saved.append((what, result))
            return result

        self.entries.append((what, map_leaves(saved, tree)))


class TapeReader:
    """Reads a tape once, in order."""

    __slots__ = ("_entries", "_next", "_path")

    def __init__(self, tape: Tape, path: str) -> None:
        self._entries = tape.entries
        self._next = 0
        self._path = path

    @property
    def upcoming(self) -> str:
        """What the forward did next; empty at the end."""
        return self._entries[self._next][0] if self._next < len(self._entries) else ""

    def operator(self, name: str, args: tuple = ()) -> Any:
        """The result that the operator gave in forward, where its own arguments were the same."""
        entry = self._take(f"operator {name}")
        return entry.results(args[0]) if isinstance(entry, PackedDropout) else map_leaves(_read, entry)

    def cell(self, path: str) -> tuple[Any, Any]:
        """The output that the cell gave in forward, and what else it changed."""
        return map_leaves(_read, self._take(f"cell {path}"))

    def nested(self, path: str) -> Tape:
        """The tape that the nested region wrote in forward."""
        return self._take(f"region {path}")

    def finish(self) -> None:
        """Check that nothing was left unread."""
        if self._next != len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay ended before {self._entries[self._next][0]}, which the forward ran "
                f"({self._next} of {len(self._entries)} recorded results were read); {REMEDY}"
            )

    def _take(self, what: str) -> Any:
        if self._next == len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay reads {what} as recorded result {self._next + 1}, but the forward recorded "
                f"only {len(self._entries)}; {REMEDY}"
            )
        recorded, value = self._entries[self._next]
        if recorded != what:
            raise ReplayMismatchError(
                f"{self._path}: the replay runs {what} where the forward ran {recorded} (recorded result "
                f"{self._next + 1} of {len(self._entries)}); {REMEDY}"
            )
        self._next += 1
        return value
