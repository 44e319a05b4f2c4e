"""What becomes of `must_swap` in a compiled graph.

Note: [Swapped by MindSpore]
MindSpore moves what its `offload` attributes name only on Ascend, in GRAPH_MODE, in cells under lazy_inline. There its
runtime dispatches the events that should order the copies before the operators they stand for, so that a tensor is
copied before it is computed, or read before it is back. That is right only if every launch waits. With memory planned
ahead (optimize level O1) events are in order, but what should be on host gets a place on the device.
"""

from typing import NamedTuple

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.cells import Node
from ms_ops.graph_compile import (
    device_target,
    in_graph_mode,
    is_inlined_late,
    is_launch_blocking,
    plans_memory_ahead,
)


class Ladder(NamedTuple):
    """Whether cells can be swapped here, and what happens if not."""

    missing: str = ""
    """What keeps MindSpore from swapping, or from doing it right; empty if nothing does."""
    rung: str = ""
    """What happens instead of swapping: recompute or keep; nothing: it is an error."""

    def swaps(self, node: Node) -> bool:
        """Whether MindSpore honours its `offload` attributes in a cell."""
        return not self.missing and under_lazy_inline(node)

    def rung_at(self, node: Node) -> str:
        """What happens to a cell instead of swapping it; empty if it is swapped."""
        return "" if self.swaps(node) else self.rung

    def why_not(self, node: Node, in_region: bool) -> str:
        """Why a cell can't be swapped; empty if it can, or if something else happens instead.

        Args:
            node: The cell.
            in_region: Whether a recomputed cell is around it.
        """
        if self.rung_at(node):
            return ""
        if in_region:
            return "inside a recomputed cell: MindSpore recomputes what it finds under both; leave one of the two out"
        if self.swaps(node):
            return ""
        why = self.missing or "neither the cell's class nor one of a cell around it is under lazy_inline"
        return (
            f"isn't honoured here: {why}; use must_recompute, say what happens instead "
            f"(swap: {{when_exhausted: [recompute]}}), or run in PyNative mode"
        )


def under_lazy_inline(node: Node) -> bool:
    """Whether a cell's class, or that of a cell around it, is under lazy_inline."""
    return any(is_inlined_late(each.cell) for each in (node, *node.above()))


def ladder_of(settings: SwapSettings) -> Ladder:
    """What becomes of `must_swap`.

    Args:
        settings: Of the policy file and the manager: its `when_exhausted` counts here, too.
    """
    return Ladder(_missing(), settings.when_exhausted[0] if settings.when_exhausted else "")


def _missing() -> str:
    if not in_graph_mode() or device_target() != "Ascend":
        return "MindSpore swaps only on Ascend, in GRAPH_MODE, in cells whose class is under lazy_inline"
    if plans_memory_ahead():
        return (
            "with mindspore.runtime.set_memory(optimize_level='O1') MindSpore copies to another place on the device; "
            "leave that level at O0"
        )
    if not is_launch_blocking():
        return (
            "without mindspore.runtime.launch_blocking(), under which every launch is waited for, MindSpore doesn't "
            "order the copies of a compiled graph, and gradients are wrong; call it before the policy is applied"
        )
    return ""
