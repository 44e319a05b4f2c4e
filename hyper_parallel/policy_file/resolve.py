"""What a policy file means for one net: which cell gets what, by whose word, and what is wrong with that."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspore import nn

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.cells import Node, tree_of
from hyper_parallel.policy_file.keeps import Decision, Regions
from hyper_parallel.policy_file.loading import PlacedRule, Source
from hyper_parallel.policy_file.notes import labels_together, overruled_notes, remaining_notes
from hyper_parallel.policy_file.problems import Problem, policy_error
from hyper_parallel.policy_file.selection import Selector
from hyper_parallel.policy_file.specs import agree, differs, excluded_spec, spec_in_words, spec_of_rule


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
    prefetch: list[tuple[nn.Cell, nn.Cell]]
    """Pairs of layers of which the first is loaded when backward reaches the second."""
    cell_count: int
    """Number of different cells below the net."""
    regions: Regions
    """The decisions behind the rows, for those who explain them."""
    matched: list[tuple[PlacedRule, list[Node]]]
    """Every rule with the cells that it names, whether it decides about them or not."""

    def without_cells(self) -> "Resolution":
        """What can be told later, without keeping the net alive."""
        return self._replace(attachments=[], prefetch=[], matched=[], regions=Regions([], {}))


class _Winner(NamedTuple):
    """The rule that decides at one path."""

    number: int
    """Its place among all rules."""
    excludes: bool
    """Whether it says so by `exclude`."""


def resolve(source: Source, net: nn.Cell, settings: SwapSettings, stage: int | None = None) -> Resolution:
    """Work out what a file means for a net. Nothing is attached.

    Args:
        source: The validated file.
        net: The net.
        settings: The swap settings that will be in force; only the words of the rows depend on them.
        stage: Which stage of the pipeline the net is, for a file with stages.

    Returns:
        Rows and notes for a reader, and the specs to attach.

    Raises:
        PolicyError: A rule matches no cell, or contradicts a decorator or another path of a shared cell; or the file
            has stages and no such one was given.
    """
    return _Resolver(source, net, stage).resolve(settings)


class _Resolver:
    def __init__(self, source: Source, net: nn.Cell, stage: int | None) -> None:
        self.source = source
        self.rules = source.rules(stage)
        self.root = tree_of(net)
        self.nodes_of: dict[int, list[Node]] = {}
        for node in [self.root, *self.root.below()]:
            self.nodes_of.setdefault(id(node.cell), []).append(node)
        self.selector = Selector(self.root)
        self.specs: dict[_Winner, RegionSpec] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.decisions: dict[int, Decision] = {}

    def resolve(self, settings: SwapSettings) -> Resolution:
        matched = self._matched()
        winners = self._winners(matched)
        for nodes in self.nodes_of.values():
            self._decide(nodes, {node.path: winners[node.path] for node in nodes if node.path in winners})
        prefetch = self._prefetch()
        if self.problems:
            raise policy_error(self.source.name, self.problems)
        if not self.source.file.default.saves:
            self._decide_rest()
        decisions = [self.decisions[key] for key in self.nodes_of if key in self.decisions]
        regions = Regions(decisions, self.nodes_of)
        self.notes += remaining_notes(self.source, regions, settings, prefetch)
        return Resolution(
            rows=[_row(regions, decision, settings) for decision in decisions],
            notes=self.notes,
            attachments=[Attachment(d.node.cell, d.spec) for d in decisions if d.attach],
            prefetch=[(load.cell, at.cell) for _, load, at in prefetch],
            cell_count=len(self.nodes_of) - 1,
            regions=regions,
            matched=matched,
        )

    def _matched(self) -> list[tuple[PlacedRule, list[Node]]]:
        matched = []
        for placed in self.rules:
            nodes, problem = self.selector.select(placed)
            matched.append((placed, nodes))
            if problem is not None:
                self.problems.append(problem)
        return matched

    def _winners(self, matched: list[tuple[PlacedRule, list[Node]]]) -> dict[str, _Winner]:
        """Give the rule that wins for each path that a rule names, or excludes from the replay of one that it names."""
        by_name: dict[str, int] = {}
        for number, (_, nodes) in enumerate(matched):
            by_name.update(dict.fromkeys((node.path for node in nodes), number))
        self.notes += overruled_notes(matched, by_name)
        winners = {path: _Winner(number, False) for path, number in by_name.items()}
        for number, (placed, nodes) in enumerate(matched):
            for index, pattern in enumerate(placed.rule.exclude):
                self._exclude(pattern, index, number, placed, nodes, winners, by_name)
        return winners

    def _exclude(
        self,
        pattern: str,
        index: int,
        number: int,
        placed: PlacedRule,
        nodes: list[Node],
        winners: dict[str, _Winner],
        by_name: dict[str, int],
    ) -> None:
        matches = False
        for top in nodes:
            for node in self.selector.matching(pattern, top):
                matches = matches or node.runs
                if node.runs and by_name[top.path] == number and winners.get(node.path, _FIRST).number <= number:
                    winners[node.path] = _Winner(number, True)
        if nodes and not matches:
            where = f"below {nodes[0].path}" + (" or the other cells of the rule" if len(nodes) > 1 else "")
            loc = (*placed.loc, "exclude", index)
            message = f"{placed.label}, exclude: `{pattern}` matches nothing {where}"
            self.problems.append(placed.document.problem(loc, message))

    def _decide(self, nodes: list[Node], winners: dict[str, _Winner]) -> None:
        """Decide about one cell, which has several nodes if it is shared, from its rules and its decorator."""
        carried = spec_of(nodes[0].cell)
        if not winners:
            if carried is not None:
                self._record(Decision(nodes[0], carried, carried.source, attach=False))
            return
        (path, winner), *others = winners.items()
        placed, spec = self.rules[winner.number], self._spec(winner, path)
        for other_path, other_winner in others:
            other = self._spec(other_winner, other_path)
            if differs(spec, other):
                message = (
                    f"{path} and {other_path} are one cell, but {placed.label} says {spec_in_words(spec)} and "
                    f"{self.rules[other_winner.number].label} says {spec_in_words(other)}; a shared cell has one policy"
                )
                self.problems.append(
                    self.rules[other_winner.number].document.problem(self.rules[other_winner.number].loc, message)
                )
                return
        if carried is not None and not agree(spec, carried):
            message = (
                f"{placed.label}: says {spec_in_words(spec)} for {path}, which carries {spec_in_words(carried)} "
                f"already ({carried.source}); the two must agree, so change one of them"
            )
            self.problems.append(placed.document.problem((*placed.loc, "policy"), message))
            return
        why = self._who(winners.values())
        if carried is not None:
            # What a file can't say (a context_fn, a policy per tensor) stays.
            spec, why = replace(carried, path=path), f"{why}, {carried.source}"
        node = next(node for node in nodes if node.path == path)
        rules = tuple(dict.fromkeys(self.rules[each.number].label for each in winners.values()))
        self._record(Decision(node, spec, why, attach=True, preset=placed.rule.preset, rules=rules))

    def _who(self, winners: Iterable[_Winner]) -> str:
        found = sorted(set(winners), key=lambda winner: winner.number)
        names = [self.rules[winner.number].label + (" (exclude)" if winner.excludes else "") for winner in found]
        return labels_together(names)

    def _decide_rest(self) -> None:
        """Give the default to the outermost cells that nobody named."""
        decided = [node for key in self.decisions for node in self.nodes_of[key]]
        named = {id(node.cell) for node in decided} | {id(below.cell) for node in decided for below in node.below()}
        holding = {id(above.cell) for node in decided for above in node.above()}
        rest = list(_outermost(self.root, named, holding))
        default = self.source.file.default
        for node in rest:
            spec = RegionSpec(default, source=f"{self.source.name}: default", path=node.path)
            self._record(Decision(node, spec, "default", attach=True))
        if not rest:
            self.notes.append(f"default ({default.name.lower()}) has no effect: no cell is left for it")

    def _record(self, decision: Decision) -> None:
        self.decisions.setdefault(id(decision.node.cell), decision)

    def _spec(self, winner: _Winner, path: str) -> RegionSpec:
        found = self.specs.get(winner)
        if found is None:
            placed = self.rules[winner.number]
            who = f"{self.source.name}: {placed.label}"
            found = excluded_spec(who) if winner.excludes else spec_of_rule(placed.rule, who)
            self.specs[winner] = found
        return replace(found, path=path)

    def _prefetch(self) -> list[tuple[str, Node, Node]]:
        pairs = []
        for placed in self.source.pairs:
            load, not_load = self.selector.one(placed.load, placed, "load")
            at, not_at = self.selector.one(placed.at, placed, "at")
            self.problems.extend(problem for problem in (not_load, not_at) if problem is not None)
            if load is not None and at is not None:
                if load.cell is at.cell:
                    message = f"{placed.label}: {load.path} and {at.path} are one cell, expected two layers"
                    self.problems.append(placed.document.problem(placed.loc, message))
                pairs.append((placed.label, load, at))
        return pairs


_FIRST = _Winner(-1, False)


def _row(regions: Regions, decision: Decision, settings: SwapSettings) -> PlanRow:
    return PlanRow(
        path=decision.node.path,
        class_name=decision.node.class_name,
        policy=decision.spec.policy,
        swap_inputs=decision.spec.swap_inputs,
        why=decision.why,
        keeps=regions.keeps(decision, settings),
    )


def _outermost(node: Node, named: set[int], holding: set[int]) -> Iterator[Node]:
    """Walk the outermost cells below a node that run, aren't named, and hold none that is."""
    for child in node.children:
        if id(child.cell) in named:
            continue
        if child.runs and id(child.cell) not in holding:
            yield child
        else:
            yield from _outermost(child, named, holding)
