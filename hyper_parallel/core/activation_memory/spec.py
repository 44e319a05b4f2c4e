"""`RegionSpec`: everything a user said about one cell, as one immutable value."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from hyper_parallel.core.activation_memory.graph_options import GraphOptions
from hyper_parallel.core.activation_memory.operator_policy import OperatorPolicy
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy, no_policy
from hyper_parallel.core.errors import PolicyError, PolicyTypeError

SPEC = "_hp_spec"
"""The attribute of a cell that holds what the user said."""

EXCLUDED = "checkpoint_exclude_wrapper"
"""The source of a spec that excludes a cell from the replay of what is around it."""

_BOOLS = ("swap_inputs", "early_stop", "allow_cache_entry_mutation", "keep_collectives", "save_output")
DETERMINISM_CHECKS = ("operators", "values")


@dataclass(frozen=True)
class RegionSpec:
    """What a user said about one cell."""

    policy: CheckpointPolicy
    swap_inputs: bool = False
    """Keep the inputs of a replayed region on host."""
    context_fn: Callable[[], tuple[Any, Any]] | None = None
    """Called once per invocation; gives the context of the forward and the context of the replay."""
    tensor_policy: Callable[[Any], CheckpointPolicy] | None = None
    """With MUST_SWAP or `swap_inputs`: asked once for every saved tensor, at the end of the cell, whether it goes to
    host."""
    determinism_check: str = "operators"
    """What a replay compares with its forward: `operators`, or their `values`, too."""
    early_stop: bool = True
    """Let a replay leave out operators after the last one that backward needs."""
    operators: OperatorPolicy | None = None
    """With a policy that replays: what happens to the results of operators in the region."""
    allow_cache_entry_mutation: bool = False
    """Let results that are kept for the replay be written before it reads them."""
    keep_collectives: bool = False
    """Of a replayed region: what collectives give is kept, so that the replay communicates nothing."""
    save_output: bool = True
    """Of a cell that runs once: keep its output even where the replay can do without."""
    graph: GraphOptions | None = None
    """What only a compiled graph reads."""
    source: str = "decorator"
    """Who said so: `decorator`, `checkpoint_wrapper`, `policy.yaml: rule 2`."""
    path: str = ""
    """The dotted path of the cell in its net, where it is known; used in messages."""

    def __post_init__(self) -> None:
        if not isinstance(self.policy, CheckpointPolicy):
            raise PolicyTypeError(
                f"policy must be a CheckpointPolicy ({self.source}), but got {no_policy(self.policy)}"
            )
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise PolicyTypeError(f"{name} must be a bool, but got {getattr(self, name)!r} ({self.source})")
        if self.tensor_policy is not None and not callable(self.tensor_policy):
            raise PolicyTypeError(f"policy_fn must be callable, but got {self.tensor_policy!r} ({self.source})")
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise PolicyError(
                f"determinism_check must be one of {', '.join(DETERMINISM_CHECKS)}, but got "
                f"{self.determinism_check!r} ({self.source})"
            )
        self._needs_a_replay(self.swap_inputs, "swap_inputs=True keeps the inputs of a replayed region on host")
        self._needs_a_replay(
            self.determinism_check == "values", "determinism_check='values' compares a replay with its forward"
        )
        self._needs_a_replay(self.keep_collectives, "keep_collectives=True is for a replayed region")
        self._needs_a_replay(
            self.operators is not None,
            "policies of operators (ops=, policy_fn=) are for a replayed region",
            ", or leave the cell's policy out",
        )

    def _needs_a_replay(self, is_given: bool, what: str, remedy: str = "") -> None:
        if is_given and not self.policy.replays:
            raise PolicyError(
                f"{what}, but the policy is {self.policy.name}, which replays nothing ({self.source}); use "
                f"MUST_RECOMPUTE or PREFER_RECOMPUTE{remedy}"
            )

    def __deepcopy__(self, memo: dict) -> "RegionSpec":
        return self

    def __str__(self) -> str:
        values = " + values compared" if self.determinism_check == "values" else ""
        operators = f" + operators: {self.operators}" if self.operators is not None else ""
        operators += " + collectives kept" if self.keep_collectives else ""
        operators += f" + graph: {self.graph}" if self.graph is not None else ""
        return self.policy.name + (" + swapped inputs" if self.swap_inputs else "") + values + operators


def spec_of(cell: Any) -> RegionSpec | None:
    """What a cell carries: on the instance, or inherited from a decorated class."""
    return cell.__dict__.get(SPEC) or getattr(type(cell), "_hp_class_spec", None)


def stack(old: RegionSpec, new: RegionSpec, where: str) -> RegionSpec:
    """Combine two specs on one cell: equal ones are idempotent, swap + recompute swaps the inputs, others raise.

    A cell that was excluded before stays so under `checkpoint_wrapper`.

    Args:
        old: What the cell carries.
        new: What is added.
        where: The cell, for the message.

    Returns:
        The spec that both together mean.

    Raises:
        PolicyError: The two contradict each other.
    """
    same = [each.name for each in fields(RegionSpec) if each.name not in ("source", "path")]
    if all(getattr(new, name) == getattr(old, name) for name in same):
        return old
    if old.source == EXCLUDED and new.source == "checkpoint_wrapper":
        return old  # as MindFormers means it: all that a pattern names is recomputed, but what is excluded
    if new.policy.replays and old.policy.swaps:
        return replace(new, swap_inputs=True, tensor_policy=old.tensor_policy, source=f"{old.source} + {new.source}")
    if new.policy.swaps and old.policy.replays:
        return replace(old, swap_inputs=True, tensor_policy=new.tensor_policy, source=f"{old.source} + {new.source}")
    raise PolicyError(
        f"{where} carries {old} ({old.source}) already, and {new} ({new.source}) contradicts it; "
        f"remove one of the two (only swap + recompute may be stacked: a replayed region with swapped inputs)"
    )
