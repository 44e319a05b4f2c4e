"""From targets to what each cell of each layer gets, where several targets meet."""

from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.activation_memory.operator_policy import makes_a_tensor
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges
from hyper_parallel.policy_file.mindformers.names import CELLS, Names, Place
from hyper_parallel.policy_file.mindformers.targets import Action, Dialect, Reading, Target
from hyper_parallel.policy_file.patterns import parse_pattern
from ms_ops.catalogue import all_names, catalogue_name, dispatch_names

COLLECTIVE = "Collective"
_COMMUNICATION = (Action.RECOMPUTE_COMMUNICATION, Action.EXCLUDE_COMMUNICATION)
_REST = "*"
_OPERATOR_POLICY = {
    Action.RECOMPUTE: "must_recompute",
    Action.RECOMPUTE_COMMUNICATION: "must_recompute",
    Action.SWAP: "must_swap",
    Action.EXCLUDE: "must_save",
    Action.EXCLUDE_COMMUNICATION: "must_save",
}


@dataclass
class Decision:
    """What one cell of one layer gets."""

    whole: set[Action] = field(default_factory=set)
    """What happens to the cell as a whole."""
    operators: dict[str, Action] = field(default_factory=dict)
    """What happens to operators in it."""
    sources: list[str] = field(default_factory=list)

    def rule(self, around: Action | None, kept: dict[str, str]) -> dict[str, Any]:
        """Write it as a rule without its cells.

        Args:
            around: What happens to the layer as a whole; the rest of the cell shares it.
            kept: Operators that no replay runs again.
        """
        if Action.EXCLUDE in self.whole:
            return {"policy": "must_save"}
        ops = {name: _OPERATOR_POLICY[action] for name, action in self.operators.items()}
        rule: dict[str, Any] = {"policy": "must_recompute"}
        if Action.RECOMPUTE in self.whole or around is Action.RECOMPUTE:
            if Action.RECOMPUTE in self.whole:
                ops = {name: policy for name, policy in ops.items() if policy != "must_recompute"}
            if Action.SWAP in self.whole:
                if Action.RECOMPUTE not in self.whole:
                    return {"policy": "must_swap"}
                rule["swap_inputs"] = True
            ops = {**kept, **ops}
        elif Action.SWAP in self.whole or around is Action.SWAP:
            if not set(ops.values()) - {"must_swap"}:
                return {"policy": "must_swap"} if self.whole else {}
            ops[_REST] = "must_swap"
        elif ops:
            ops[_REST] = "prefer_save"
        return {**rule, "ops": ops} if ops else rule


Decisions = dict[str, dict[int, Decision]]
"""By cell pattern below the layer (empty for the layer itself), then by layer."""


def decide(reading: Reading, names: Names) -> Decisions:
    """Work out what each cell of each layer gets.

    Args:
        reading: The targets; gets notes and problems about targets that meet.
        names: Reads patterns.

    Returns:
        The decisions, more general patterns before those that overrule them.
    """
    decisions: Decisions = {}
    for target in reading.targets:
        for place in [Place("")] if target.pattern is None else names.places(target.pattern):
            _add(reading, decisions, target, place)
    _refuse_both(reading, decisions)
    _spread_operators(decisions)
    if reading.dialect is Dialect.PYNATIVE:
        _leave_out_covered(decisions)
    return dict(sorted(decisions.items(), key=_generality))


def _add(reading: Reading, decisions: Decisions, target: Target, place: Place) -> None:
    if target.action in _COMMUNICATION and not place.operators:  # the operator's name is ours: a collective
        names = place.cells.split(".")
        place = Place(names[0] if len(names) > 1 else "", (COLLECTIVE,))
    layers = _where_it_acts(reading, target, place)
    of_cell = decisions.setdefault(place.cells, {}) if layers else {}
    communication = target.action in _COMMUNICATION
    for layer in sorted(layers):
        decision = of_cell.setdefault(layer, Decision())
        if communication:
            decision.operators[COLLECTIVE] = target.action
        elif place.operators:
            for operator in place.operators:
                _join(reading, decision, operator, target)
        else:
            decision.whole.add(target.action)
        if target.source not in decision.sources:
            decision.sources.append(target.source)
    if layers and communication:
        reading.note(
            "different",
            target.source,
            f"'{target.pattern}' is the communication of one operator in MindFormers; here it is what all collectives "
            f"in {_cell(place.cells)} give",
        )
    elif layers and target.pattern is not None and not place.operators:
        _note_cell(reading, target, place.cells)
    elif layers and place.operators:
        reading.note(
            "different",
            target.source,
            f"'{target.pattern}' is one operator; here it is every {' or '.join(place.operators)} in "
            f"{_cell(place.cells)}",
        )


def _note_cell(reading: Reading, target: Target, cells: str) -> None:
    last = cells.split(".")[-1]
    if "*" in last or cells.startswith("re:"):
        text = (
            f"'{target.pattern}' names cells here; functions and Primitives that it matches, too, are left as they are"
        )
        reading.note("different", target.source, text)
    elif last not in CELLS:
        text = (
            f"'{target.pattern}' is taken for a cell; if it is a function or a Primitive, say which operator it runs: "
            f"operators={{'{last}': ...}} (--operator {last}=...)"
        )
        reading.note("assumed", target.source, text)


def _refuse_both(reading: Reading, decisions: Decisions) -> None:
    for cells, by_layer in decisions.items():
        both = [n for n, decision in by_layer.items() if {Action.EXCLUDE, Action.SWAP} <= decision.whole]
        if both:
            text = f"in layers {in_ranges(both)} it is excluded from recomputing, and swapped; one of the two can hold"
            reading.problem(_cell(cells), text)


def _join(reading: Reading, decision: Decision, operator: str, target: Target) -> None:
    """Of several actions on one operator, not to recompute wins, then to recompute, as in MindFormers."""
    before = decision.operators.get(operator)
    order = (Action.EXCLUDE, Action.RECOMPUTE, Action.SWAP)
    if before is not None and before is not target.action:
        winner = min(before, target.action, key=order.index)
        text = f"{operator} is named by {' and '.join(decision.sources)}, too; it is: {winner.value}"
        reading.note("meaning", target.source, text)
        decision.operators[operator] = winner
    else:
        decision.operators[operator] = target.action


def _where_it_acts(reading: Reading, target: Target, place: Place) -> frozenset[int]:
    """Give the layers in which a target isn't overruled or without effect."""
    recomputed = reading.layers_of(Action.RECOMPUTE, pattern=None)
    what = f"'{target.pattern}'" if target.pattern else "the layer"
    if target.action is Action.SWAP and reading.dialect is Dialect.GRAPH:
        overruled = target.layers & (recomputed | reading.layers_of(Action.RECOMPUTE, pattern=target.pattern))
        if overruled:
            text = f"{what}: not in layers {in_ranges(overruled)}, which are recomputed; recompute wins over swap"
            reading.note("meaning", target.source, text)
        whole = reading.layers_of(Action.SWAP, pattern=None) if target.pattern is not None else frozenset()
        if covered := target.layers & whole:
            reading.note("inert", target.source, f"{what}: layers {in_ranges(covered)} are swapped as a whole")
        return target.layers - overruled - whole
    if target.action is Action.SWAP:
        return target.layers
    if target.action is Action.EXCLUDE and reading.dialect is Dialect.GRAPH and not place.operators:
        reading.note("inert", target.source, f"{what} is a cell, and MindFormers takes only operators here")
        return frozenset()
    if target.action in (Action.EXCLUDE, Action.EXCLUDE_COMMUNICATION):
        replayed = reading.layers_of(Action.RECOMPUTE)
        if target.action is Action.EXCLUDE_COMMUNICATION or reading.dialect is Dialect.GRAPH:
            replayed = recomputed | _recomputed_around(reading, target)
        if target.layers - replayed:
            text = f"{what}: nothing is recomputed around it in layers {in_ranges(target.layers - replayed)}"
            reading.note("inert", target.source, text)
        return target.layers & replayed
    return target.layers


def _recomputed_around(reading: Reading, target: Target) -> frozenset[int]:
    """Give the layers in which a cell around what the target names is recomputed."""
    pattern = (target.pattern or "").replace("\\.", ".")
    around = [t.pattern for t in reading.targets if t.action is Action.RECOMPUTE and t.pattern]
    inside = [other for other in around if pattern.startswith(other.replace("\\.", ".") + ".")]
    return frozenset().union(*(reading.layers_of(Action.RECOMPUTE, pattern=other) for other in inside))


def _spread_operators(decisions: Decisions) -> None:
    """Add what a pattern with a star says of operators to the patterns that overrule it."""
    for wide, of_wide in decisions.items():
        for narrow, of_narrow in decisions.items():
            if (
                "*" not in wide
                or "*" in narrow
                or "re:" in narrow
                or not narrow
                or not parse_pattern(wide).matches(narrow)
            ):
                continue
            for layer in of_narrow.keys() & of_wide.keys():
                general, own = of_wide[layer], of_narrow[layer]
                if own.operators and not own.whole and not general.whole:
                    own.operators = {**general.operators, **own.operators}
                    own.sources += [source for source in general.sources if source not in own.sources]


def _leave_out_covered(decisions: Decisions) -> None:
    """Take away what a cell around it has, too: in PyNative mode MindFormers takes the outer one only."""
    for inner, of_inner in decisions.items():
        names = inner.split(".")
        around = [".".join(names[:count]) for count in range(1, len(names))]
        for outer, of_outer in decisions.items():
            if outer and outer != inner and any(_covers(outer, path) for path in around):
                for layer in of_inner.keys() & of_outer.keys():
                    if of_outer[layer].whole == of_inner[layer].whole != set():
                        del of_inner[layer]


def _covers(pattern: str, path: str) -> bool:
    if "re:" in pattern or "re:" in path:
        return False
    return pattern == path or ("*" not in path and parse_pattern(pattern).matches(path))


def _generality(item: tuple[str, dict[int, Decision]]) -> tuple[bool, int, int]:
    cells, by_layer = item
    actions = set().union(*(decision.whole for decision in by_layer.values()))
    later = 2 if Action.EXCLUDE in actions else 1 if Action.SWAP in actions else 0
    return cells != "", later, cells.count(".") + 1 - 10 * ("*" in cells)


def kept_operators(reading: Reading) -> dict[str, str]:
    """Give the operators whose names contain a part that `exclude_op` of MindFormers 2.0 has.

    Args:
        reading: Gets a problem where a part is in no name.

    Returns:
        Entries of an `ops` table.
    """
    kept: set[str] = set()
    for part in reading.kept_substrings:
        found = {name for name in all_names() if part.lower() in name.lower() and _can_be_kept(name)}
        if part.strip() and not found:
            reading.problem("recompute, exclude_op", f"{part!r} is in the name of no operator whose result can be kept")
        kept |= found
    for name in sorted(kept):
        family = dispatch_names(name)
        if len(family) > 1 and name == catalogue_name(name):
            beside = family - kept
            kept -= family - {name}
            if beside:
                text = f"{name} stands for {', '.join(sorted(beside))}, too"
                reading.note("different", "recompute, exclude_op", text)
    return dict.fromkeys(sorted(kept), "must_save")


def _can_be_kept(name: str) -> bool:
    # operators of backward are never part of a forward that is replayed
    return makes_a_tensor(name) and not name.endswith(("Grad", "GradV2", "Backward"))


def _cell(cells: str) -> str:
    return cells or "the layer"
