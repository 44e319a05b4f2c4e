"""`Tape`: what a replay reads instead of running again, in the order in which the forward produced it.

Three kinds of entries: the result of an operator that runs once, the output of a cell that runs once, and the tape of a
nested region. A nested region's tape belongs to its own invocation and is referred to here, so that a result lives
once, however many regions enclose it.
"""

from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.trees import map_leaves
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import alias, requires_grad


class _Saved:
    """A tensor on a tape; `tensor` is the tensor itself or something on host with `get()`."""

    __slots__ = ("tensor", "tracked")

    def __init__(self, tensor: Any, tracked: bool) -> None:
        self.tensor = tensor
        self.tracked = tracked

    def get(self) -> Tensor:
        return alias(self.tensor if isinstance(self.tensor, Tensor) else self.tensor.get(), self.tracked)


def _read(leaf: Any) -> Any:
    return leaf.get() if isinstance(leaf, _Saved) else leaf


class Tape:
    """Results in forward order, written once."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []

    def write_operator(self, name: str, result: Any) -> None:
        """The result of an operator; autograd has not seen it yet, so that nothing about it is tracked."""
        self._write(f"operator {name}", result)

    def write_cell(self, path: str, output: Any, to_host: Any = None) -> None:
        """The output of a cell that runs once; `to_host` turns a tensor into something on host that has `get()`."""
        self._write(f"cell {path}", output, to_host)

    def nested(self, path: str) -> "Tape":
        """The tape of a region inside this one."""
        tape = Tape()
        self.entries.append((f"region {path}", tape))
        return tape

    def _write(self, what: str, tree: Any, to_host: Any = None) -> None:
        def saved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            kept = alias(leaf, tracked=False)
            return _Saved(to_host(kept) if to_host else kept, requires_grad(leaf))

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

    def operator(self, name: str) -> Any:
        """The result that the operator gave in forward."""
        return map_leaves(_read, self._take(f"operator {name}"))

    def cell(self, path: str) -> Any:
        """The output that the cell gave in forward."""
        return map_leaves(_read, self._take(f"cell {path}"))

    def nested(self, path: str) -> Tape:
        """The tape that the nested region wrote in forward."""
        return self._take(f"region {path}")

    def finish(self) -> None:
        """Check that nothing was left unread."""
        if self._next != len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay ended before {self._entries[self._next][0]}, which the forward ran "
                f"({self._next} of {len(self._entries)} recorded results were read); the region must do the same each "
                f"time it runs with the same inputs, or carry the policy MUST_SAVE"
            )

    def _take(self, what: str) -> Any:
        if self._next == len(self._entries):
            raise ReplayMismatchError(
                f"{self._path}: the replay runs {what}, which the forward did not run (it recorded "
                f"{len(self._entries)} results); the region must do the same each time it runs with the same inputs, "
                f"or carry the policy MUST_SAVE"
            )
        recorded, value = self._entries[self._next]
        if recorded != what:
            raise ReplayMismatchError(
                f"{self._path}: the replay runs {what} where the forward ran {recorded} (recorded result "
                f"{self._next + 1} of {len(self._entries)}); the region must do the same each time it runs with the "
                f"same inputs, or carry the policy MUST_SAVE"
            )
        self._next += 1
        return value
