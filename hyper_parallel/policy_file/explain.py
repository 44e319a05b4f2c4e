"""Why a cell, or an operator, gets what it gets: which rule decided, which it overruled, and what follows from it."""

from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.core.activation_memory.operator_policy import Table
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.describe import rule_in_words
from hyper_parallel.policy_file.keeps import Decision, place
from hyper_parallel.policy_file.loading import PlacedRule, Source
from hyper_parallel.policy_file.resolve import Resolution
from hyper_parallel.policy_file.tensors import TensorSelection
from ms_ops.catalogue import catalogue_name, dispatch_names
from ms_ops.dispatch import why_not_repeated


@dataclass(frozen=True)
class RuleSays:
    """One rule, as an explanation quotes it."""

    label: str
    """How plans name it: `rule 2`."""
    where: str
    """File and line; empty in a dict."""
    cells: str
    """Which cells it names."""
    says: str
    """What it says of them."""


@dataclass(frozen=True)
class CellExplanation:
    """What happens to one cell's activations, and by whose word."""

    path: str
    class_name: str
    policy: str
    """As a file writes it; empty if nobody decides about this cell."""
    why: str
    """Who decided."""
    decided_by: tuple[RuleSays, ...]
    overruled: tuple[RuleSays, ...]
    """Earlier rules for the cell that don't count."""
    region: str
    """Path of the region in which the cell runs; empty if it is in none."""
    forward: str
    backward: str


@dataclass(frozen=True)
class OperatorExplanation:
    """What happens to the results of one operator in one region."""

    region: str
    class_name: str
    policy: str
    """The region's policy."""
    why: str
    operator: str
    """Its name in the catalogue."""
    says: str
    """The entry that decides about the operator: by its name, by `*`, by a preset, or none."""
    forward: str
    backward: str


def explain_cell(source: Source, resolution: Resolution, node: Node) -> CellExplanation:
    """Explain one cell.

    Args:
        source: The file.
        resolution: What it means for the net.
        node: The cell.

    Returns:
        The explanation, without bytes: those must be measured.
    """
    regions = resolution.regions
    decision, outer = regions.of(node), regions.around(node)
    matching = _matching(resolution, node)
    deciding = set(decision.rules) if decision is not None else set()
    forward, backward = _what_happens(decision, outer, source)
    return CellExplanation(
        path=node.path,
        class_name=node.class_name,
        policy=str(_policy_text(decision.spec)) if decision is not None else "",
        why=decision.why if decision is not None else "nobody: no rule and no decorator names it",
        decided_by=tuple(_says(placed) for placed, _ in resolution.matched if placed.label in deciding),
        overruled=tuple(_says(placed) for placed in matching if placed.label not in deciding),
        region=place(outer.node) if outer is not None else "",
        forward=forward,
        backward=backward,
    )


def explain_operator(resolution: Resolution, name: str) -> list[OperatorExplanation]:
    """Explain what happens to an operator.

    Args:
        resolution: What the file means for the net.
        name: Its name in the catalogue, or MindSpore's.

    Returns:
        One entry per decided region, whether the operator runs there or not: that must be measured.
    """
    return [_in_region(decision, name) for decision in resolution.regions.decisions]


def is_operator(name: str) -> bool:
    """Whether MindSpore dispatches an operator of this name."""
    return bool(dispatch_names(name))


def _matching(resolution: Resolution, node: Node) -> list[PlacedRule]:
    paths = {other.path for other in resolution.regions.nodes_of.get(id(node.cell), [node])}
    return [placed for placed, nodes in resolution.matched if any(each.path in paths for each in nodes)]


def _says(placed: PlacedRule) -> RuleSays:
    position = placed.document.problem(placed.loc, "").position
    where = f"{position.file}:{position.line}" if position is not None else ""
    return RuleSays(placed.label, where, placed.rule.selector, rule_in_words(placed.rule))


def _policy_text(spec: RegionSpec) -> str:
    return spec.policy.name.lower() + (" + swapped inputs" if spec.swap_inputs else "")


def _what_happens(decision: Decision | None, outer: Decision | None, source: Source) -> tuple[str, str]:
    if decision is None and outer is None:
        return (
            f"runs as without the file (default: {source.file.default.name.lower()}); what backward needs stays on the "
            "device",
            "reads it from the device; nothing runs again",
        )
    if decision is None:
        assert outer is not None
        return _as_part_of(outer)
    within = outer.spec.policy if outer is not None else CheckpointPolicy.PREFER_SAVE
    spec = decision.spec
    if spec.policy.replays:
        return _replayed(decision, outer)
    replay = f"; the replay of {place(outer.node)} reads its output" if outer is not None and within.replays else ""
    if spec.policy.swaps:
        what = "its output and what" if replay else "what"
        only = f" (only tensors {spec.tensor_policy})" if isinstance(spec.tensor_policy, TensorSelection) else ""
        return (
            f"runs once; {what} backward needs goes to host{only}, but for what is small, a parameter, or owned "
            "outside",
            f"loads it from host ahead of its use; nothing runs again{replay}",
        )
    output = ", and its output," if replay else ""
    return (
        f"runs once; what backward needs{output} stays on the device",
        f"reads it from the device; nothing runs again{replay}",
    )


def _as_part_of(outer: Decision) -> tuple[str, str]:
    region = place(outer.node)
    if outer.spec.policy.replays:
        return (
            f"runs as part of {region}, which is replayed: what it saves is dropped, but for the results of random "
            "operators and of those that are kept",
            f"runs again in the replay of {region}",
        )
    where = "goes to host" if outer.spec.policy.swaps else "stays on the device"
    return f"runs as part of {region}: what backward needs {where} with it", "nothing runs again"


def _replayed(decision: Decision, outer: Decision | None) -> tuple[str, str]:
    spec = decision.spec
    within = outer.spec.policy if outer is not None else CheckpointPolicy.PREFER_SAVE
    if outer is not None and within.replays:
        inputs = f"its inputs come back with the replay of {place(outer.node)}"
    else:
        inputs = f"its inputs {'go to host' if spec.swap_inputs or within.swaps else 'stay on the device'}"
    kept = f", and of operators by {_operators_in_words(decision)}" if spec.operators is not None else ""
    kept += ", and of collectives" if spec.keep_collectives else ""
    compared = "; the values of all results are compared" if spec.determinism_check == "values" else ""
    return (
        f"runs; {inputs}, the results of random operators stay{kept}; what else is saved is dropped",
        f"runs again, once, when something of it is first needed, and reads the results that stayed{compared}",
    )


def _operators_in_words(decision: Decision) -> str:
    names = [name for name in decision.preset if name not in ("full", "inputs_on_host")]
    return f"the preset {names[0]}" if names else f"the table ({decision.spec.operators})"


def _in_region(decision: Decision, name: str) -> OperatorExplanation:
    says, forward, backward = _operator_fate(decision, name)
    return OperatorExplanation(
        region=decision.node.path,
        class_name=decision.node.class_name,
        policy=_policy_text(decision.spec),
        why=decision.why,
        operator=catalogue_name(name),
        says=says,
        forward=forward,
        backward=backward,
    )


def _operator_fate(decision: Decision, name: str) -> tuple[str, str, str]:
    spec = decision.spec
    if not spec.policy.replays:
        where = "goes to host" if spec.policy.swaps else "stays on the device"
        return "the policy of the cell", f"runs; what backward needs of it {where}", "nothing runs again"
    never_again = sorted({why for each in dispatch_names(name) if (why := why_not_repeated(each))})
    if never_again:
        return f"it {never_again[0]}", "runs; its result stays", "the replay reads the result"
    if spec.operators is None:
        return "the policy of the cell", "runs; its result is dropped", "runs again"
    if not isinstance(spec.operators, Table):
        who = _operators_in_words(decision)
        return who, f"runs; {who} decides about each call", "runs again, or its result is read, as was decided"
    entry, policy = _entry(spec.operators, name)
    if policy.replays:
        return entry, "runs; its result is dropped", "runs again"
    where = "goes to host" if policy.swaps else "stays on the device"
    return entry, f"runs; its result {where}", "the replay reads the result"


def _entry(table: Table, name: str) -> tuple[str, CheckpointPolicy]:
    wanted = dispatch_names(name)
    for entry, policy in table.policies.items():
        if entry != "*" and wanted & dispatch_names(entry):
            return f"{entry}: {policy.name.lower()}", policy
    policy = table.policies.get("*", CheckpointPolicy.PREFER_RECOMPUTE)
    return f"*: {policy.name.lower()}", policy


def find_cell(resolution: Resolution, path: str) -> Node | None:
    """The cell of a path; None if the net has none."""
    return next((node for node in _nodes(resolution) if node.path == path), None)


def _nodes(resolution: Resolution) -> Iterator[Node]:
    for nodes in resolution.regions.nodes_of.values():
        yield from nodes


def paths_of(resolution: Resolution) -> list[str]:
    """The paths of all cells of the net."""
    return [node.path for node in _nodes(resolution) if node.path]
