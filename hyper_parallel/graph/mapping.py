"""What the policies of a net mean for MindSpore's compiler: which flags on which cells and Primitives.

Note: [Recomputed in graph mode]
A cell under a replaying policy is one region: it and all that runs inside are recomputed, its output is kept. What a
cell runs inherits its scope where MindSpore inlines it, but not everywhere (a SequentialCell's children don't), so that
each recomputed cell says so itself. A region inside another one is part of that. Cells inside a region that are to run
once have their Primitives excluded one by one and the output of each cell kept: that is all MindSpore offers, so what
functions give in the middle of such a cell's construct may be recomputed all the same, and the report says so. Under
lazy_inline even the outputs can't be kept: MindSpore fails to compile a region with such a cell inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mindspore import nn
from mindspore.ops import Primitive

from hyper_parallel.core.activation_memory.operator_policy import REST, Alternating, Asked, Table
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from hyper_parallel.graph.swap import Ladder, under_lazy_inline
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.keeps import Decision, Regions, place
from hyper_parallel.policy_file.notes import shown
from hyper_parallel.policy_file.problems import Problem
from ms_ops.catalogue import COLLECTIVES
from ms_ops.dispatch import why_not_repeated
from ms_ops.graph_flags import COMMUNICATION, SLICED, is_flagged_natively, own_primitives


class Attribute(NamedTuple):
    """An attribute for one Primitive."""

    primitive: Primitive
    name: str
    value: bool | int | str


@dataclass
class Flags:
    """Everything that is to be set for one net."""

    labels: dict[int, tuple[nn.Cell, str]] = field(default_factory=dict)
    """By the id of the cell: the cell and its path, which names the scope of its operators."""
    regions: set[int] = field(default_factory=set)
    """The ids of the recomputed cells that begin a region."""
    recomputed: set[int] = field(default_factory=set)
    """The ids of these, and of all cells inside that are recomputed, too."""
    watched: dict[int, tuple[nn.Cell, str]] = field(default_factory=dict)
    """Cells that mustn't run but in a graph, and how messages name them and their policies."""
    outputs: dict[int, nn.Cell] = field(default_factory=dict)
    """Cells whose output is kept."""
    attributes: list[Attribute] = field(default_factory=list)
    functions: dict[str, bool] = field(default_factory=dict)
    """By dispatch name, for the Primitives behind functions: recompute them or keep them."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def recompute(self) -> bool:
        """Whether anything is to be computed again, or kept where it would be."""
        return bool(self.regions) or any(each.name == "recompute" for each in self.attributes)


class Wish(NamedTuple):
    """What a plan wants for the operators at one place."""

    recomputes: bool
    """Whether they are computed again; else they are kept."""
    in_region: bool
    """Whether a recomputed cell is around them."""
    decision: Decision | None


def flags_of(regions: Regions, ladder: Ladder) -> Flags:
    """Work out all flags for a net.

    Args:
        regions: What was decided about its cells.
        ladder: What happens to cells that are to be swapped.

    Returns:
        The flags; its `problems` say what graph mode can't do.
    """
    mapping = _Mapping(regions, ladder)
    root = next(node for nodes in regions.nodes_of.values() for node in nodes if node.parent is None)
    mapping.walk(root, Wish(False, False, None))
    mapping.finish()
    return mapping.flags


def wish_for(name: str, wish: Wish) -> bool:
    """Whether an operator is to be computed again.

    Args:
        name: As MindSpore dispatches it.
        wish: What holds where it runs.
    """
    if why_not_repeated(name):
        return False
    spec = wish.decision.spec if wish.decision is not None else None
    if spec is not None and spec.policy.replays:
        if spec.keep_collectives and name in COLLECTIVES:
            return False
        if isinstance(spec.operators, Table) and spec.operators.names(name):
            return spec.operators.policy_of(name).replays
    return wish.recomputes


def wish_at(decision: Decision, around: Wish, ladder: Ladder) -> Wish:
    """What holds in a decided cell.

    Args:
        decision: About the cell.
        around: What holds where the cell runs.
        ladder: What happens to cells that are to be swapped.
    """
    spec = decision.spec
    replays = spec.policy.replays or (spec.policy.swaps and ladder.rung_at(decision.node) == "recompute")
    rest = spec.operators.policies.get(REST) if isinstance(spec.operators, Table) else None
    recomputes = replays and not (rest is not None and rest.saves)
    return Wish(recomputes, around.in_region or recomputes, decision)


class _Mapping:
    def __init__(self, regions: Regions, ladder: Ladder) -> None:
        self.regions = regions
        self.ladder = ladder
        self.flags = Flags()
        self.primitives: dict[int, Primitive] = {}
        self.wanted: dict[int, dict[tuple[bool, bool], str]] = {}
        """By the id of a Primitive: whether it is to be computed again, and whether it is in a region; the first cell
        where that is so."""
        self.by_function: dict[str, dict[bool, str]] = {}
        """By dispatch name: whether functions are to compute it again; the first cell that wants it."""
        self.refused: dict[str, list[str]] = {}
        """By what is wrong: the paths of the cells."""
        self.noted: dict[str, list[str]] = {}
        """By what there is to say: the paths of the cells."""

    def walk(self, node: Node, around: Wish) -> None:
        decision = self.regions.of(node)
        wish = around
        cell = node.cell
        self.flags.labels.setdefault(id(cell), (cell, node.path))
        if is_flagged_natively(cell):
            self.refuse(node, "carries MindSpore's own recompute() already; leave one of the two out")
        if decision is not None:
            wish = wish_at(decision, around, self.ladder)
            self.check(node, decision, around)
            if wish.in_region and not around.in_region:
                self.flags.regions.add(id(cell))
                self.flags.outputs[id(cell)] = cell
            if id(cell) in self.flags.regions or spec_of(cell) is not None:
                self.flags.watched[id(cell)] = cell, f"{place(node)} ({decision.spec}, {decision.why})"
            self.functions(decision.spec, wish, place(node))
            self.options(node, decision.spec)
        if wish.recomputes:
            self.flags.recomputed.add(id(cell))
        if wish.in_region and not wish.recomputes and node.runs and not under_lazy_inline(node):
            self.flags.outputs[id(cell)] = cell
        for primitive in own_primitives(cell):
            self.primitives[id(primitive)] = primitive
            how = wish_for(primitive.name, wish), wish.in_region
            self.wanted.setdefault(id(primitive), {}).setdefault(how, place(node))
        for child in node.children:
            self.walk(child, wish)

    def refuse(self, node: Node, what: str) -> None:
        self.refused.setdefault(what, []).append(place(node))

    def check(self, node: Node, decision: Decision, around: Wish) -> None:
        spec = decision.spec
        for why in _refusals(spec, decision.preset):
            self.refuse(node, f"({decision.why}): {why}")
        if spec.policy.swaps:
            why, rung = self.ladder.why_not(node, around.in_region), self.ladder.rung_at(node)
            if why:
                self.refuse(node, f"({decision.why}): must_swap {why}")
            elif rung:
                self.note(node, f"must_swap can't be honoured in this graph, so they {rung}")
            else:
                self.offload(node, spec)
                self.note(node, "MindSpore moves their tensors, but gives no memory back for it (docs/graph_mode.md)")
        if spec.determinism_check == "values":
            self.note(node, "determinism_check has no effect in graph mode")
        if spec.allow_cache_entry_mutation:
            self.note(node, "allow_cache_entry_mutation has no effect in graph mode")
        if spec.policy.replays and around.recomputes:
            self.note(node, "recomputed as a part of the region around it, not as one of its own")

    def note(self, node: Node, what: str) -> None:
        self.noted.setdefault(what, []).append(place(node))

    def functions(self, spec: RegionSpec, wish: Wish, where: str) -> None:
        names: dict[str, bool] = {}
        if isinstance(spec.operators, Table):
            names = {
                name: again for name in spec.operators.named() if (again := wish_for(name, wish)) != wish.recomputes
            }
        if spec.keep_collectives and wish.in_region:
            names.update(dict.fromkeys(COLLECTIVES, False))
        for name, again in names.items():
            self.by_function.setdefault(name, {}).setdefault(again, where)

    def options(self, node: Node, spec: RegionSpec) -> None:
        given = spec.graph
        if given is None:
            return
        for each in (node, *node.below()):
            for primitive in own_primitives(each.cell):
                if given.mp_comm_recompute is not None:
                    self.flags.attributes.append(Attribute(primitive, COMMUNICATION, given.mp_comm_recompute))
                if given.recompute_slice_activation is not None:
                    self.flags.attributes.append(Attribute(primitive, SLICED, given.recompute_slice_activation))
        if given.recompute_comm_op is not None:
            for primitive in own_primitives(node.cell):
                self.flags.attributes.append(Attribute(primitive, COMMUNICATION, given.recompute_comm_op))

    def offload(self, node: Node, spec: RegionSpec) -> None:
        given = spec.graph.backward_prefetch if spec.graph is not None else None
        for cell in self.under_decision_of(node):
            for primitive in own_primitives(cell):
                self.flags.attributes.append(Attribute(primitive, "offload", True))
                self.flags.attributes.append(
                    Attribute(primitive, "backward_prefetch", "Auto" if given is None else given)
                )

    def under_decision_of(self, node: Node) -> Iterator[nn.Cell]:
        """Walk a decided cell and those inside about which nothing else was decided."""
        yield node.cell
        for child in node.children:
            if self.regions.of(child) is None:
                yield from self.under_decision_of(child)

    def finish(self) -> None:
        self.flags.problems += [Problem(f"{shown(paths)} {what}") for what, paths in self.refused.items()]
        self.flags.notes += [f"{shown(paths)}: {what}" for what, paths in self.noted.items()]
        for name, wanting in self.by_function.items():
            self.flags.functions[name] = False not in wanting
            if len(wanting) > 1:
                self.flags.notes.append(
                    f"functions that run {name} keep their results everywhere: {wanting[False]} keeps them, "
                    f"{wanting[True]} recomputes them, and MindSpore has one Primitive for both"
                )
        for key, wanted in self.wanted.items():
            self.flag(self.primitives[key], wanted)

    def flag(self, primitive: Primitive, wanted: dict[tuple[bool, bool], str]) -> None:
        if all(again == in_region for again, in_region in wanted):
            return  # the scopes of its cells say it
        values = {again for again, _ in wanted}
        if len(values) == 1:
            self.flags.attributes.append(Attribute(primitive, "recompute", values.pop()))
            return
        # the cells that want what their scopes don't say come first
        recomputing = wanted.get((True, False)) or wanted[True, True]
        keeping = wanted.get((False, True)) or wanted[False, False]
        self.flags.problems.append(
            Problem(
                f"{recomputing} and {keeping} share one {primitive.name} Primitive, but it is recomputed in the one "
                f"and kept in the other, and MindSpore has one flag for it; give each cell a Primitive of its own"
            )
        )


def _refusals(spec: RegionSpec, preset: tuple[str, ...]) -> Iterator[str]:
    if spec.context_fn is not None:
        yield "context_fn is never called in a compiled graph; name the operators instead: ops={'MatMul': must_save}"
    if isinstance(spec.operators, (Asked, Alternating)):
        named = f"preset {preset[0]}" if preset else "policy_fn"
        yield (
            f"{named} is asked operator by operator while Python runs, which a compiled graph doesn't; name the "
            f"operators instead (ops: {{MatMul: must_save}}), or give cells policies of their own"
        )
    elif spec.operators is not None and not isinstance(spec.operators, Table):
        yield f"{spec.operators} can't be read from a compiled graph; name the operators: ops={{'MatMul': must_save}}"
    elif isinstance(spec.operators, Table) and any(policy.swaps for policy in spec.operators.policies.values()):
        yield "an operator in a recomputed region can't be must_swap: MindSpore recomputes it instead; use must_save"
    if spec.swap_inputs:
        yield (
            "swap_inputs isn't available in graph mode: the inputs of a region stay on the device; leave it out, or "
            "recompute larger cells"
        )
    if spec.tensor_policy is not None:
        yield (
            "a policy per tensor isn't available in graph mode, where tensors have no size or storage to be asked "
            "for; leave it out, or name the cells"
        )
