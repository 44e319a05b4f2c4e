"""Which nets are under which plans."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from mindspore import nn

from hyper_parallel.core.errors import PolicyError

# Note: [Which net is under which plan]
# The record lives beside the cells, not on them: a deepcopy of a net must not be taken for the net itself, and an
# attribute on a net would show in its printing and its pickling. Keys are weak, and a plan knows its cells weakly, so
# neither keeps the other alive. Nets and cells that carry a spec of the plan are both keys: a plan for a part of a net
# is found when the whole net gets one.
_PLAN_OF: "WeakKeyDictionary[nn.Cell, Any]" = WeakKeyDictionary()


def recorded(cell: nn.Cell, plan: Any) -> Callable[[], None]:
    """Note that a cell is under a plan; gives what takes the note back."""
    _PLAN_OF[cell] = plan
    weak = ref(cell)

    def undo() -> None:
        if (alive := weak()) is not None:
            _PLAN_OF.pop(alive, None)

    return undo


def require_free(net: nn.Cell) -> None:
    """Raise PolicyError if a net, or a cell in it, is under a plan."""
    for path, cell in net.cells_and_names():
        plan = _PLAN_OF.get(cell)
        if plan is not None:
            where = f"{path} in {name_of(net)}" if path else name_of(net)
            raise PolicyError(f"{where} is under the plan from {plan.source} already; call remove() on that plan first")


def applied_plans() -> list[tuple[nn.Cell, Any]]:
    """Every net that is under a plan, with the plan."""
    return [(cell, plan) for cell, plan in _PLAN_OF.items() if plan.is_for(cell)]


def name_of(net: nn.Cell) -> str:
    """The name of a net's class."""
    return net.cls_name or type(net).__name__
