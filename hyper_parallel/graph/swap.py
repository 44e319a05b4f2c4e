"""What becomes of `must_swap` in a compiled graph."""

from typing import NamedTuple

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from ms_ops.graph_compile import device_target, in_graph_mode


class Ladder(NamedTuple):
    """Whether cells can be swapped here, and what happens if not."""

    can_swap: bool
    """Whether MindSpore honours its `offload` attributes: on Ascend, in GRAPH_MODE, in cells under lazy_inline."""
    rung: str = ""
    """What happens instead of swapping: recompute or keep; nothing: it is an error."""

    @property
    def recomputes(self) -> bool:
        """Whether a cell is recomputed instead of swapped."""
        return self.rung == "recompute"

    def why_not(self, in_region: bool, inlined_late: bool) -> str:
        """Why a cell can't be swapped; empty if it can, or if something else happens instead.

        Args:
            in_region: Whether a recomputed cell is around it.
            inlined_late: Whether its class, or that of a cell around it, is under lazy_inline.
        """
        if self.rung:
            return ""
        if in_region:
            return "inside a recomputed cell: MindSpore recomputes what it finds under both; leave one of the two out"
        if self.can_swap and inlined_late:
            return ""
        return (
            "isn't honoured here: MindSpore swaps only on Ascend, in GRAPH_MODE, in cells whose class is under "
            "lazy_inline; use must_recompute, say what happens instead (swap: {when_exhausted: [recompute]}), or run "
            "in PyNative mode"
        )


def ladder_of(settings: SwapSettings) -> Ladder:
    """What becomes of `must_swap`.

    Args:
        settings: Of the policy file and the manager: its `when_exhausted` counts here, too.
    """
    if in_graph_mode() and device_target() == "Ascend":
        return Ladder(can_swap=True)
    return Ladder(False, settings.when_exhausted[0] if settings.when_exhausted else "")
