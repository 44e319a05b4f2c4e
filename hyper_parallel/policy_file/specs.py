"""From a rule to the `RegionSpec` that a cell carries."""

from hyper_parallel.core.activation_memory.graph_options import GraphOptions
from hyper_parallel.core.activation_memory.operator_policy import one_operator_policy
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.policy_file.rule import Graph, Rule, Tensors, preset_options
from hyper_parallel.policy_file.tensors import TensorSelection

_SAYABLE = (
    "policy",
    "swap_inputs",
    "determinism_check",
    "operators",
    "allow_cache_entry_mutation",
    "keep_collectives",
    "graph",
)
"""What a rule can say, of what a spec holds; besides the policy of tensors, which counts only where a rule has one."""


def spec_of_rule(rule: Rule, source: str) -> RegionSpec:
    """Say what a rule means for one cell.

    Args:
        rule: The rule.
        source: Who says so, for messages.

    Returns:
        The spec, without the path of a cell.
    """
    options = preset_options(rule.preset)
    ops = rule.ops if rule.ops is not None else options.get("ops")
    return RegionSpec(
        rule.policy,
        swap_inputs=rule.swap_inputs or options.get("swap_inputs", False),
        tensor_policy=None if rule.tensors is None else selection_of(rule.tensors),
        determinism_check=rule.determinism_check,
        operators=one_operator_policy(ops, options.get("policy_fn"), source),
        allow_cache_entry_mutation=rule.allow_cache_entry_mutation,
        keep_collectives=rule.keep_collectives,
        graph=None if rule.graph is None else options_of(rule.graph),
        source=source,
    )


def excluded_spec(source: str) -> RegionSpec:
    """What a cell carries that runs once inside a replayed region."""
    return RegionSpec(CheckpointPolicy.MUST_SAVE, source=source)


def selection_of(tensors: Tensors) -> TensorSelection:
    """The policy of tensors that a rule's `tensors` means."""
    return TensorSelection(int(tensors.min_bytes or 0), tensors.dtype)


def options_of(graph: Graph) -> GraphOptions:
    """The flags that a rule's `graph` means."""
    return GraphOptions(**graph.model_dump())


def agree(spec: RegionSpec, carried: RegionSpec) -> bool:
    """Whether what a rule says of a cell is what the cell carries already."""
    tensors = spec.tensor_policy is None or spec.tensor_policy == carried.tensor_policy
    return tensors and all(getattr(spec, what) == getattr(carried, what) for what in _SAYABLE)


def differs(spec: RegionSpec, other: RegionSpec) -> bool:
    """Whether two specs for one cell have different effects."""
    return any(getattr(spec, what) != getattr(other, what) for what in (*_SAYABLE, "tensor_policy"))


def spec_in_words(spec: RegionSpec) -> str:
    """What a spec says, for a message."""
    inputs = " with swapped inputs" if spec.swap_inputs else ""
    values = " and values compared" if spec.determinism_check == "values" else ""
    operators = f" and operators {spec.operators}" if spec.operators is not None else ""
    tensors = f" of tensors {spec.tensor_policy}" if isinstance(spec.tensor_policy, TensorSelection) else ""
    graph = f" and graph: {spec.graph}" if spec.graph is not None else ""
    return spec.policy.name.lower() + inputs + values + operators + tensors + graph
