"""Watching a flagged cell: it raises where its flags would be passed over, at the latest moment that is early enough.

Note: [How a flagged cell is watched]
An instance's class is replaced by a subclass with a `get_scope`, which MindSpore's compiler calls once for every cell
that it compiles, and a `__call__`, which compiled code never reaches. So nothing runs per step. What the compiler reads
(`construct`, flags, scope, names, parameters) is the class's own: of a cell that is under a decorator its `construct`
without the PyNative region.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

from mindspore import nn

from hyper_parallel.core.activation_memory.attach import plain_construct, plain_type
from hyper_parallel.core.errors import PolicyError
from ms_ops.autograd import gradient_depth, recording
from ms_ops.graph_compile import in_graph_mode, is_compiled_by_jit
from ms_ops.graph_flags import has_own_recompute

_MARK = "_hp_graph"
_OUTSIDE = (
    "is compiled on its own, and its gradient is taken outside of the compiled graph, where MindSpore orders the "
    "recomputation too early to save memory; put the gradient into the compiled function (ms.value_and_grad inside the "
    "one under ms.jit, or GRAPH_MODE), and no ms.jit on the construct of a block"
)


class Mark:
    """What a flagged cell carries.

    Args:
        cell: The cell.
        where: Names the cell and its policy in messages.
    """

    def __init__(self, cell: nn.Cell, where: str) -> None:
        self.where = where
        self._cell = ref(cell)

    def compiles(self, cell: nn.Cell) -> None:
        """Hear that the cell, or a copy of it, is being compiled."""
        if self._cell() is not cell:
            raise PolicyError(
                f"a copy of {self.where} is compiled, which has only a part of the flags: copies of Primitives lose "
                f"theirs; apply the policy to the copy itself (copy a net before a policy is applied to it)"
            )
        if has_own_recompute(cell):
            raise PolicyError(
                f"{self.where} carries MindSpore's own recompute(), too, which was called after the policy was applied "
                f"and may join its region with the next; leave one of the two out"
            )
        # the flag alone may have been left on by code that failed, or that calls run_backward
        if recording() and gradient_depth():
            raise PolicyError(f"{self.where} {_OUTSIDE}")

    def runs(self, cell: nn.Cell) -> None:
        """Hear that the cell is called by Python."""
        if not recording() or in_graph_mode():
            return
        if is_compiled_by_jit(type(cell).construct):
            raise PolicyError(f"{self.where} {_OUTSIDE}")
        raise PolicyError(
            f"{self.where} runs in PyNative mode, which passes flags of graph mode over; put the gradient into a "
            f"function under ms.jit, or apply the policy with mode='pynative'"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mark":
        return self


def watch(cell: nn.Cell, where: str) -> Callable[[], None]:
    """Have a flagged cell raise where its flags would be passed over.

    Args:
        cell: The cell.
        where: Names the cell and its policy in messages.

    Returns:
        What ends it.
    """
    before = type(cell)
    object.__setattr__(cell, _MARK, Mark(cell, where))
    watched = _watched_class(before)
    cell.__class__ = watched
    weak = ref(cell)

    def undo() -> None:
        alive = weak()
        if alive is not None:
            alive.__dict__.pop(_MARK, None)
            if type(alive) is watched:  # another class on top, FSDP's for example, stays
                alive.__class__ = before

    return undo


def mark_of(cell: nn.Cell) -> Mark | None:
    """What a flagged cell carries."""
    return cell.__dict__.get(_MARK)


def _watched_class(cls: Any) -> Any:
    found = cls.__dict__.get("_hp_graph_class")
    if found is None:
        base = plain_type(cls)

        def get_scope(self: nn.Cell) -> Any:
            mark = mark_of(self)
            if mark is not None:
                mark.compiles(self)
            return base.get_scope(self)

        def __call__(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            mark = mark_of(self)
            if mark is not None:
                mark.runs(self)
            return base.__call__(self, *args, **kwargs)

        names: dict[str, Any] = {
            "get_scope": get_scope,
            "__call__": __call__,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        found = type(base)(base.__name__, (base,), names)
        construct = plain_construct(base)
        if construct is not None:  # not among the names: a decorated class covers the construct of every new subclass
            found.construct = construct
        cls._hp_graph_class = found
    return found
