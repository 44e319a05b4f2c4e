"""What a policy file means for one net: which cell gets what, by whose word, and what is wrong with that."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspore import nn

from hyper_parallel.core.activation_memory.operator_policy import Table
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.cells import Node, tree_of
from hyper_parallel.policy_file.loading import Source, policy_error
from hyper_parallel.policy_file.patterns import parse_pattern
from hyper_parallel.policy_file.schema import did_you_mean


@dataclass(frozen=True)
class PlanRow:
    """One cell of a plan: what a rule, the default or a decorator decided for it."""

    path: str
    """Dotted path of the cell; empty for the net itself, which only a decorator can name."""
    class_name: str
    """Name of the cell's class."""
    policy: CheckpointPolicy
    swap_inputs: bool
    """Whether the inputs of the replayed region wait on host."""
    why: str
    """Who decided: `rule 2`, `default`, `decorator`; several if they agree."""
    keeps: str
    """What is kept between forward and backward, in words."""

    @property
    def policy_text(self) -> str:
        """The policy as a file writes it, e.g. ``must_recompute + swapped inputs``."""
        return self.policy.name.lower() + (" + swapped inputs" if self.swap_inputs else "")


class Attachment(NamedTuple):
    """A spec that a plan adds to a cell."""

    cell: nn.Cell
    spec: RegionSpec


class Resolution(NamedTuple):
    """A file, worked out for one net."""

    rows: list[PlanRow]
    notes: list[str]
    attachments: list[Attachment]
    cell_count: int
    """Number of different cells below the net."""


class _Decision(NamedTuple):
    node: Node
    spec: RegionSpec
    why: str
    attach: bool


def resolve(source: Source, net: nn.Cell, settings: SwapSettings) -> Resolution:
    """Work out what a file means for a net. Nothing is attached.

    Args:
        source: The validated file.
        net: The net.
        settings: The swap settings that will be in force; only the words of the rows depend on them.

    Returns:
        Rows and notes for a reader, and the specs to attach.

    Raises:
        PolicyError: A rule matches no cell, or contradicts a decorator or another path of a shared cell.
    """
    return _Resolver(source, net).resolve(settings)


class _Resolver:
    def __init__(self, source: Source, net: nn.Cell) -> None:
        self.source = source
        self.root = tree_of(net)
        self.nodes = list(self.root.below())
        self.nodes_of: dict[int, list[Node]] = {}
        for node in [self.root, *self.nodes]:
            self.nodes_of.setdefault(id(node.cell), []).append(node)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.decisions: dict[int, _Decision] = {}

    def resolve(self, settings: SwapSettings) -> Resolution:
        winners = self._winning_rules()
        for nodes in self.nodes_of.values():
            self._decide(nodes, {node.path: winners[node.path] for node in nodes if node.path in winners})
        if self.problems:
            raise policy_error(self.source.name, self.problems)
        if not self.source.file.default.saves:
            self._decide_rest()
        decisions = [self.decisions[key] for key in self.nodes_of if key in self.decisions]
        self._note_the_rest(decisions, settings)
        return Resolution(
            rows=[self._row(decision, settings) for decision in decisions],
            notes=self.notes,
            attachments=[Attachment(d.node.cell, d.spec) for d in decisions if d.attach],
            cell_count=len(self.nodes_of) - 1,
        )

    def _winning_rules(self) -> dict[str, int]:
        """Give the number of the rule that wins for each path that a rule matches."""
        winners: dict[str, int] = {}
        matched: dict[int, list[str]] = {}
        for number, rule in enumerate(self.source.file.rules, 1):
            pattern = parse_pattern(rule.cells)
            found = [node for node in self.nodes if pattern.matches(node.path)]
            matched[number] = [node.path for node in found if node.runs]
            winners.update(dict.fromkeys(matched[number], number))
            if not matched[number]:
                self.problems.append(f"rule {number}: {rule.cells!r} matches no cell{self._advice(rule.cells, found)}")
        for number, paths in matched.items():
            others = sorted({winners[path] for path in paths})
            if paths and number not in others:
                self.notes.append(
                    f"rule {number} ({self.source.file.rules[number - 1].cells}) has no effect: "
                    f"{_rules(others)} overrule{'s' if len(others) == 1 else ''} it on every cell it matches"
                )
        return winners

    def _advice(self, pattern: str, holders: list[Node]) -> str:
        if holders:
            node = holders[0]
            return f" that runs: {node.path} is a {node.class_name} that only holds cells; write '{node.path}.*'"
        paths = [node.path for node in self.nodes if node.runs]
        close = did_you_mean(pattern, paths)
        if close:
            return f" of {self.root.class_name}{close}"
        tops = list(dict.fromkeys(path.split(".")[0] for path in paths))
        shown = ", ".join(tops[:8]) + (", ..." if len(tops) > 8 else "")
        return (
            f" of {self.root.class_name}, whose paths begin with {shown}" if tops else ", the net has no cells below it"
        )

    def _decide(self, nodes: list[Node], numbers: dict[str, int]) -> None:
        """Decide about one cell, which has several nodes if it is shared, from its rules and its decorator."""
        carried = spec_of(nodes[0].cell)
        if not numbers:
            if carried is not None:
                self._record(_Decision(nodes[0], carried, carried.source, attach=False))
            return
        (path, number), *others = numbers.items()
        spec = self._spec(number, path)
        for other_path, other_number in others:
            other = self._spec(other_number, other_path)
            if not _agree(spec, other):
                self.problems.append(
                    f"{path} and {other_path} are one cell, but rule {number} says {_words(spec)} and "
                    f"rule {other_number} says {_words(other)}; a shared cell has one policy"
                )
                return
        if carried is not None and not _agree(spec, carried):
            self.problems.append(
                f"rule {number}: says {_words(spec)} for {path}, which carries {_words(carried)} already "
                f"({carried.source}); the two must agree, so change one of them"
            )
            return
        why = _rules(sorted(set(numbers.values())))
        if carried is not None:
            # What a file can't say (a context_fn, a policy per tensor) stays.
            spec, why = replace(carried, path=path), f"{why}, {carried.source}"
        node = next(node for node in nodes if node.path == path)
        self._record(_Decision(node, spec, why, attach=True))

    def _decide_rest(self) -> None:
        """Give the default to the outermost cells that nobody named."""
        decided = [node for key in self.decisions for node in self.nodes_of[key]]
        named = {id(node.cell) for node in decided} | {id(below.cell) for node in decided for below in node.below()}
        holding = {id(above.cell) for node in decided for above in node.above()}
        rest = list(_outermost(self.root, named, holding))
        default = self.source.file.default
        for node in rest:
            spec = RegionSpec(default, source=f"{self.source.name}: default", path=node.path)
            self._record(_Decision(node, spec, "default", attach=True))
        if not rest:
            self.notes.append(f"default ({default.name.lower()}) has no effect: no cell is left for it")

    def _record(self, decision: _Decision) -> None:
        self.decisions.setdefault(id(decision.node.cell), decision)

    def _spec(self, number: int, path: str) -> RegionSpec:
        rule = self.source.file.rules[number - 1]
        return RegionSpec(
            rule.policy,
            swap_inputs=rule.swap_inputs,
            determinism_check=rule.determinism_check,
            operators=None if rule.ops is None else Table(rule.ops, f"{self.source.name}: rule {number}"),
            allow_cache_entry_mutation=rule.allow_cache_entry_mutation,
            keep_collectives=rule.keep_collectives,
            source=f"{self.source.name}: rule {number}",
            path=path,
        )

    def _note_the_rest(self, decisions: list[_Decision], settings: SwapSettings) -> None:
        if not decisions:
            self.notes.append("no cell is under a policy: every cell keeps everything")
        for decision in decisions:
            self._note_one(decision)
        if any(d.spec.policy.swaps or d.spec.swap_inputs for d in decisions):
            if settings.when_exhausted:
                ladder = ", then ".join(settings.when_exhausted)
                self.notes.append(f"when the host budget is exhausted, a region may {ladder} instead of swapping")
            size = f"tensors below {size_in_words(settings.min_bytes)}, " if settings.min_bytes else ""
            self.notes.append(
                "never moved to host: parameters, their views and casts, tensors owned outside the region, "
                f"{size}and tensors without computation between their forward and their backward"
            )
        elif self.source.file.swap.model_fields_set:
            self.notes.append("swap has no effect: nothing is swapped")

    def _note_one(self, decision: _Decision) -> None:
        path = decision.node.path
        aliases = [node.path for node in self.nodes_of[id(decision.node.cell)] if node.path != path]
        if aliases:
            same = "is" if len(aliases) == 1 else "are"
            self.notes.append(f"{path} is shared: {', '.join(aliases)} {same} the same cell")
        outer = self._outer(decision.node)
        if decision.spec.swap_inputs and outer is not None and outer.spec.policy.replays:
            self.notes.append(f"swap_inputs has no effect for {path}: {_place(outer.node)} replays its inputs")

    def _row(self, decision: _Decision, settings: SwapSettings) -> PlanRow:
        node, spec = decision.node, decision.spec
        return PlanRow(
            path=node.path,
            class_name=node.class_name,
            policy=spec.policy,
            swap_inputs=spec.swap_inputs,
            why=decision.why,
            keeps=self._keeps(node, spec, settings),
        )

    def _keeps(self, node: Node, spec: RegionSpec, settings: SwapSettings) -> str:
        host = f"on host ({settings.tier} tier)"
        outer = self._outer(node)
        within = outer.spec.policy if outer is not None else CheckpointPolicy.PREFER_SAVE
        once = "; runs once" if within.replays else ""
        if spec.policy.replays:
            count = len({id(cell) for cell in self._replayed(node)})
            if outer is not None and within.replays:
                inputs = f"inputs replayed with {_place(outer.node)}"
            else:
                inputs = f"inputs {host if spec.swap_inputs or within.swaps else 'on device'}"
            checked = ", values compared" if spec.determinism_check == "values" else ""
            operators = f"; operators: {spec.operators}" if spec.operators is not None else ""
            operators += "; collectives kept" if spec.keep_collectives else ""
            return f"{inputs}; {count} cell{'s' if count > 1 else ''} replayed{checked}{operators}"
        if spec.policy.swaps:
            size = f" >= {size_in_words(settings.min_bytes)}" if settings.min_bytes else ""
            return f"{'output and ' if once else ''}saved tensors{size} {host}{once}"
        return f"everything{', and its output' if once else ''}{once}"

    def _outer(self, node: Node) -> _Decision | None:
        """Give the decision about the nearest cell above that has one: the region in which this one runs."""
        return next(
            (self.decisions[id(above.cell)] for above in node.above() if id(above.cell) in self.decisions), None
        )

    def _replayed(self, node: Node) -> Iterator[nn.Cell]:
        """Walk the cells that a replay of this one runs: not those that a saving or swapping policy lets run once."""
        if node.runs:
            yield node.cell
        for child in node.children:
            decision = self.decisions.get(id(child.cell))
            if decision is None or decision.spec.policy.replays:
                yield from self._replayed(child)


def _outermost(node: Node, named: set[int], holding: set[int]) -> Iterator[Node]:
    """Walk the outermost cells below a node that run, aren't named, and hold none that is."""
    for child in node.children:
        if id(child.cell) in named:
            continue
        if child.runs and id(child.cell) not in holding:
            yield child
        else:
            yield from _outermost(child, named, holding)


def size_in_words(size: int) -> str:
    """Write a number of bytes for a reader, e.g. ``1.0 MiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _agree(one: RegionSpec, other: RegionSpec) -> bool:
    sayable = (
        "policy",
        "swap_inputs",
        "determinism_check",
        "operators",
        "allow_cache_entry_mutation",
        "keep_collectives",
    )
    return all(getattr(one, what) == getattr(other, what) for what in sayable)


def _place(node: Node) -> str:
    return node.path or "the net"


def _words(spec: RegionSpec) -> str:
    inputs = " with swapped inputs" if spec.swap_inputs else ""
    values = " and values compared" if spec.determinism_check == "values" else ""
    operators = f" and operators {spec.operators}" if spec.operators is not None else ""
    return spec.policy.name.lower() + inputs + values + operators


def _rules(numbers: list[int]) -> str:
    return f"rule{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
