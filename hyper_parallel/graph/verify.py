"""`verify_policy`: compile, read the graph back, and compare it with the plan."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import nn

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.graph.analysis import Count, Found, analyse
from hyper_parallel.graph.places import Places
from hyper_parallel.graph.reach import cells_reached
from hyper_parallel.graph.report import HONOURED, NOT_HONOURED, NOT_NEEDED, GraphReport, OperatorRow, VerifiedRow
from hyper_parallel.graph.swap import ladder_of
from hyper_parallel.policy_file.applied import applied_plans, name_of
from hyper_parallel.policy_file.mode import GRAPH
from hyper_parallel.policy_file.plan import PolicyPlan
from hyper_parallel.policy_file.resolve import PlanRow
from ms_ops.graph_compile import (
    JIT_LEVELS,
    capture_mode,
    graph_of_cell,
    graph_of_function,
    in_graph_mode,
    is_compiled_by_jit,
)
from ms_ops.graph_ir import read_graph


def verify_policy(net: Any, *inputs: Any, plan: PolicyPlan | None = None, jit_level: str | None = None) -> GraphReport:
    """Compile a net that is under a plan, and report what the compiled graph does with it.

    Nothing runs, and what is compiled here is forgotten: a plan can still be removed. A net is compiled with the
    gradient of its trainable parameters; a Cell that trains (`TrainOneStepCell`) or a step under `ms.jit` as it is.

    Args:
        net: A net under a plan with ``mode="graph"``; a Cell that holds such a net; or a function under `ms.jit` that
            trains one.
        *inputs: What it is called with.
        plan: Which plan, where that isn't clear from `net`: for a function, if several are applied.
        jit_level: ``"O0"`` or ``"O1"``; by default what the Cell has, else MindSpore's own: the one that a function
            has from `ms.jit` isn't looked up.

    Returns:
        The plan's rows, each with a verdict and the numbers of recomputed operators.

    Raises:
        TypeError: `net` is neither a Cell nor a function under `ms.jit`.
        PolicyError: No plan is applied to the net in graph mode, several are, or `jit_level` is unknown; the function
            is under `ms.jit` with another `capture_mode` than ``"ast"``; or what is compiled takes no gradient.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from hyper_parallel import apply_policy, verify_policy
        >>> block = nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 4))
        >>> net = nn.SequentialCell(block, nn.Dense(4, 1))
        >>> rule = {"cells": "0", "policy": "must_recompute"}
        >>> plan = apply_policy(net, {"version": 1, "rules": [rule]}, mode="graph")
        >>> report = verify_policy(net, ms.Tensor([[1.0, 2.0, 3.0, 4.0]]))
        >>> report.honoured, report.rows[0].recomputed["Tanh"]
        (True, 1)
        >>> plan.remove()
    """
    if jit_level is not None and jit_level not in JIT_LEVELS:
        raise PolicyError(
            f"jit_level: got {jit_level!r}, expected {' or '.join(JIT_LEVELS)}; the flags of policies are read at "
            f"these levels"
        )
    if not isinstance(net, nn.Cell) and not is_compiled_by_jit(net):
        raise TypeError(
            f"verify_policy takes a Cell or a function under ms.jit, but got {net!r} of type {type(net).__name__}; "
            f"put @ms.jit on a step function"
        )
    captured = None if isinstance(net, nn.Cell) else capture_mode(net)
    if captured not in (None, "ast"):
        raise PolicyError(
            f"{_called(net)} is under ms.jit(capture_mode={captured!r}), whose graph can't be read; use "
            f"capture_mode='ast', which is the default"
        )
    trained, plan = _trained(net, plan)
    nodes = read_graph(_graph(net, trained, inputs, jit_level))
    if not any(node.is_backward for node in nodes):
        raise PolicyError(
            f"{_called(net)} takes no gradient, and without one nothing is computed again; give the net itself, a "
            f"Cell that trains it (TrainOneStepCell), or a step under ms.jit that takes the gradient"
        )
    resolution = plan.resolution_for(trained)
    places = Places(resolution.regions, ladder_of(plan.swap_settings()))
    found = analyse(nodes, places)
    return GraphReport(
        source=plan.source,
        net=name_of(trained),
        rows=tuple(_verified(row, places, found) for row in resolution.rows),
        unplanned=tuple(
            _operator(name, count)
            for name, count in sorted(found.counts.get("", {}).items())
            if count.copied_though and "" not in {row.path for row in resolution.rows}
        ),
        gates=found.gates,
        moves=dict(found.moves),
    )


def _trained(net: Any, plan: PolicyPlan | None) -> tuple[nn.Cell, PolicyPlan]:
    """The net that is under a plan, and the plan."""
    pairs = [(cell, each) for cell, each in applied_plans() if plan is None or each is plan]
    inside = cells_reached(net)
    pairs = [(cell, each) for cell, each in pairs if id(cell) in inside]
    if not pairs:
        raise PolicyError(
            f"{_called(net)} is under no plan; call apply_policy(net, ..., mode='graph') before its first step"
        )
    if len(pairs) > 1:
        sources = ", ".join(each.source for _, each in pairs)
        raise PolicyError(f"{_called(net)}: several plans are applied ({sources}); say which one: plan=...")
    trained, found = pairs[0]
    if found.mode != GRAPH:
        raise PolicyError(
            f"{_called(net)} is under the plan from {found.source}, which is applied in PyNative mode, where nothing "
            f"is compiled; plan.describe() and `hyper-parallel explain` say what it does there"
        )
    return trained, found


def _called(net: Any) -> str:
    return name_of(net) if isinstance(net, nn.Cell) else getattr(net, "__qualname__", repr(net))


def _graph(net: Any, trained: nn.Cell, inputs: tuple, jit_level: str | None) -> str:
    if not isinstance(net, nn.Cell):
        return graph_of_function(net, inputs, jit_level)
    if net is not trained:
        return graph_of_cell(net, inputs, jit_level)
    weights = net.trainable_params()
    gradient = ms.value_and_grad(net, None, weights) if weights else ms.value_and_grad(net)
    if in_graph_mode():
        return graph_of_cell(_Step(net, gradient), inputs, jit_level)
    return graph_of_function(_step_with(gradient), inputs, jit_level)


class _Step(nn.Cell):
    """A net and its gradient."""

    def __init__(self, net: nn.Cell, gradient: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        self.net = net
        self.gradient = gradient

    def construct(self, *inputs: Any) -> Any:
        return self.gradient(*inputs)


def _step_with(gradient: Callable[..., Any]) -> Callable[..., Any]:
    # MindSpore's compiler reads this function
    def step(*inputs: Any) -> Any:
        return gradient(*inputs)

    return step


def _verified(row: PlanRow, places: Places, found: Found) -> VerifiedRow:
    counts = found.counts.get(row.path, {})
    verdict, reason = _verdict(row, counts, places, found)
    operators = tuple(_operator(name, count) for name, count in sorted(counts.items()))
    return VerifiedRow(row, verdict, reason, operators)


def _verdict(row: PlanRow, counts: dict[str, Count], places: Places, found: Found) -> tuple[str, str]:
    kept = {name: count.kept_though for name, count in counts.items() if count.kept_though}
    if kept:
        return NOT_HONOURED, (
            f"kept though: {_named(kept)}; a function or a tensor's method runs it, whose Primitive is shared with "
            f"cells that keep it, or out of reach; give the cell a Primitive of its own"
        )
    copied = {name: count.copied_though for name, count in counts.items() if count.copied_though}
    if copied:
        return NOT_HONOURED, (
            f"recomputed though: {_named(copied)}; no Primitive of the cell's own runs it, and its result isn't the "
            f"output of a cell: put it into a cell of its own, or use the operator's Primitive"
        )
    decision = places.wish[row.path].decision
    if row.policy.swaps and decision is not None and places.ladder.swaps(decision.node):
        moved = sum(found.moves.values())
        return (HONOURED, "") if moved else (NOT_HONOURED, "MindSpore moves nothing: the cell isn't under lazy_inline")
    if not counts:
        return NOT_NEEDED, "the graph runs none of its operators"
    if places.wish[row.path].recomputes:
        if row.path in found.ungated:
            return NOT_HONOURED, "MindSpore holds the recomputation back by nothing, so that it may save no memory"
        if not any(count.planned for count in counts.values()):
            return NOT_NEEDED, "backward needs nothing of it but its inputs and output, which are kept"
    return HONOURED, ""


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))


def _operator(name: str, count: Count) -> OperatorRow:
    return OperatorRow(name, count.runs, count.planned, count.copies, count.kept)
