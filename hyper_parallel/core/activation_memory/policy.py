"""`CheckpointPolicy`: the five things that can happen to an activation."""

import difflib
import enum
from typing import Any


class CheckpointPolicy(enum.Enum):
    """What happens to the activations of a cell (or the output of an operator) between forward and backward.

    MUST is a promise: it is kept, or an error names the cell. PREFER is a wish that a plan or a budget may overrule;
    every overruling is reported.

    Attributes:
        MUST_SAVE: What autograd saves stays on the device. Inside a replayed region the cell runs once: its output is
            cached and read by the replay.
        PREFER_SAVE: The same, but a plan or a budget may choose otherwise.
        MUST_RECOMPUTE: Only the cell's inputs, and the results of random and effectful operators, are kept; the rest
            is replayed when backward needs it.
        PREFER_RECOMPUTE: The same, but what is unsafe or pointless to replay is kept, and a plan may choose otherwise.
        MUST_SWAP: Saved tensors go to host during forward and are back before backward needs them; nothing is
            replayed. It works with `SwapManager`, which owns the host side: tiers, budgets, prefetch, statistics.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel import CheckpointPolicy
        >>> CheckpointPolicy.MUST_SWAP.value
        4
        >>> CheckpointPolicy["MUST_RECOMPUTE"].replays
        True
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4

    @property
    def saves(self) -> bool:
        """Whether the activations stay on the device."""
        return self in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    @property
    def replays(self) -> bool:
        """Whether the activations are replayed in backward."""
        return self in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

    @property
    def swaps(self) -> bool:
        """Whether the activations wait on host."""
        return self is CheckpointPolicy.MUST_SWAP


def no_policy(value: Any) -> str:
    """What stands where a policy belongs, and which one may be meant, for messages.

    Examples:
        >>> from hyper_parallel.core.activation_memory.policy import no_policy
        >>> no_policy("must_sav").rpartition("; ")[2]
        'did you mean CheckpointPolicy.MUST_SAVE?'
    """
    names = [policy.name for policy in CheckpointPolicy]
    spelled = str(getattr(value, "name", value))[:40].upper()  # another library's enum, too
    close = difflib.get_close_matches(spelled, names, n=1, cutoff=0.6)
    offer = f"; did you mean CheckpointPolicy.{close[0]}?" if close else ""
    return f"{value!r} of type {type(value).__name__}; the policies are {', '.join(names)}{offer}"
