"""Which cells of a net a rule selects, or why none."""

from collections.abc import Iterator

from mindspore import nn

from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.layers import container_of, layer_numbers
from hyper_parallel.policy_file.loading import PlacedPair, PlacedRule
from hyper_parallel.policy_file.names import PathNames, did_you_mean
from hyper_parallel.policy_file.patterns import CellPattern, RegexPattern, State, parse_pattern
from hyper_parallel.policy_file.problems import Problem
from hyper_parallel.policy_file.rule import Rule

_MOST_OFFERS = 20
"""Mistakes of one file for which the closest names are looked up: comparing names takes time."""


class Selector:
    """Selects cells of one net.

    Args:
        root: The net.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._nodes = list(root.below())
        self._by_class: dict[type, list[Node]] = {}
        for node in self._nodes:
            self._by_class.setdefault(type(node.cell), []).append(node)
        self._patterns: dict[str, CellPattern] = {}
        self._selected: dict[tuple[str | None, ...], list[Node]] = {}
        self._containers: dict[str | None, Node] = {}
        self._names: PathNames | None = None
        self._offers = 0

    def select(self, placed: PlacedRule) -> tuple[list[Node], Problem | None]:
        """Give the cells that a rule names.

        Args:
            placed: The rule.

        Returns:
            The cells that run, in the order of the net; and what is wrong if there are none.
        """
        rule = placed.rule
        key = rule.cells, rule.class_name, rule.layers, rule.container
        known = self._selected.get(key)
        if known is not None:
            return known, None
        within = [self._root]
        if rule.layers is not None:
            try:
                within = self._layers(rule)
            except ValueError as error:
                return [], placed.wrong("layers" if rule.container is None else "container", str(error))
        found = [node for top in within for node in self._below(top, rule)]
        running = [node for node in found if node.runs]
        if not running:
            return [], self._nothing(placed, found, within)
        self._selected[key] = running
        return running, None

    def one(self, pattern: str, placed: PlacedPair, key: str) -> tuple[Node | None, Problem | None]:
        """Give the one cell that a pattern names, or what is wrong."""
        found = [node for node in self.matching(pattern, self._root) if node.runs]
        cells = {id(node.cell) for node in found}
        if len(cells) == 1:
            return found[0], None
        if found:
            shown = ", ".join(node.path for node in found[:3])
            what = f"`{pattern}` names {len(cells)} cells ({shown}, ...), expected one"
        else:
            what = f"`{pattern}` matches nothing{self._offer(pattern)}"
        return None, placed.document.problem((*placed.loc, key), f"{placed.label}, {key}: {what}")

    def matching(self, pattern: str, top: Node) -> list[Node]:
        """Give the cells below a node whose path from there a pattern matches."""
        parsed = self._patterns.get(pattern)
        if parsed is None:
            parsed = self._patterns[pattern] = parse_pattern(pattern)
        found: list[Node] = []
        if isinstance(parsed, RegexPattern):
            matches = parsed.matches_text
            if top is self._root:
                return [node for node in self._nodes if matches(node.path)]
            start = len(top.path) + 1
            found = [node for node in top.below() if matches(node.path[start:])]
        else:
            _walk(top, parsed.begin, found)
        return found

    def _below(self, top: Node, rule: Rule) -> Iterator[Node]:
        if rule.cells is not None:
            nodes = iter(self.matching(rule.cells, top))
        elif rule.class_name is not None:
            nodes = iter((top, *top.below()) if top is not self._root else self._nodes_of(rule.class_name))
        else:
            nodes = iter([top])
        return nodes if rule.class_name is None else self._of_class(nodes, rule.class_name)

    def _nodes_of(self, wanted: str) -> list[Node]:
        """All cells of a class; there are many cells, but few classes."""
        pattern = parse_pattern(wanted)
        classes = [
            cls for cls, nodes in self._by_class.items() if any(map(pattern.matches, class_names(nodes[0].cell)))
        ]
        return [node for cls in classes for node in self._by_class[cls]]

    def _of_class(self, nodes: Iterator[Node], wanted: str) -> Iterator[Node]:
        pattern = parse_pattern(wanted)
        known: dict[type, bool] = {}
        for node in nodes:
            cls = type(node.cell)
            if cls not in known:
                known[cls] = any(pattern.matches(name) for name in class_names(node.cell))
            if known[cls]:
                yield node

    def _layers(self, rule: Rule) -> list[Node]:
        assert rule.layers is not None
        container = self._containers.get(rule.container)
        if container is None:
            container = self._containers[rule.container] = container_of(self._root, rule.container)
        by_number = {int(child.name): child for child in container.children}
        missing = [number for number in layer_numbers(rule.layers) if number not in by_number]
        if missing:
            place = container.path or "the net"
            have = f"`{place}` has {len(by_number)} layers, 0 to {max(by_number)}"
            raise ValueError(f"there is no layer {missing[0]}: {have}")
        return [by_number[number] for number in sorted(layer_numbers(rule.layers))]

    def _nothing(self, placed: PlacedRule, found: list[Node], within: list[Node]) -> Problem:
        rule = placed.rule
        key = next(key for key in ("cells", "class", "layers") if getattr(rule, _ATTRIBUTE.get(key, key)) is not None)
        what = f"`{getattr(rule, _ATTRIBUTE.get(key, key))}` matches nothing"
        if found:
            node = found[0]
            return placed.wrong(
                key,
                f"{what} that runs: {node.path} is a {node.class_name} that only holds cells; write '{node.path}.*'",
            )
        if rule.cells is not None and rule.class_name is not None:
            matched = [node for top in within for node in self.matching(rule.cells, top)]
            if matched:
                classes = ", ".join(dict.fromkeys(node.class_name for node in matched[:8]))
                return placed.wrong(
                    "class", f"`{rule.class_name}` matches nothing: what `{rule.cells}` names is of class {classes}"
                )
        if key == "class":
            return placed.wrong(key, what + self._offer_class(rule.class_name or ""))
        top = within[0] if rule.layers is not None else None
        return placed.wrong(key, what + (f" in the layers {rule.layers}" if top else "") + self._offer(rule.cells, top))

    def _offer(self, pattern: str | None, top: Node | None = None) -> str:
        self._offers += 1
        if pattern is None or self._offers > _MOST_OFFERS:
            return ""
        if not self._nodes:
            return ": the net has no cells below it"
        if top is not None:
            start = len(top.path) + 1
            names = PathNames(node.path[start:] for node in top.below() if node.runs)
            paths, whose = [node.path[start:] for node in top.children], f"{top.path} has"
        else:
            names = self._names = self._names or PathNames(node.path for node in self._nodes if node.runs)
            paths, whose = [node.path for node in self._root.children], "the net has"
        close = names.closest(pattern)
        if close:
            return f"; {whose} `{close}`"
        return f"; {whose} {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"

    def _offer_class(self, wanted: str) -> str:
        self._offers += 1
        if self._offers > _MOST_OFFERS:
            return ""
        known = list(dict.fromkeys(node.class_name for node in self._nodes if node.runs))
        close = did_you_mean(wanted, known)
        return close or f"; the net has cells of class {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def _walk(top: Node, state: State, found: list[Node]) -> None:
    """Add the cells below `top` that a pattern names, which has come to `state` there."""
    known = state.following
    for node in top.children:
        name = node.name
        following = known[name] if name in known else state.after(name)
        if following is not None:
            if following.is_end:
                found.append(node)
            if node.children:
                _walk(node, following, found)


_ATTRIBUTE = {"class": "class_name"}


def class_names(cell: nn.Cell) -> list[str]:
    """The names of a cell's class and of the classes it derives from, below nn.Cell."""
    return list(
        dict.fromkeys(cls.__name__ for cls in type(cell).__mro__ if cls is not nn.Cell and issubclass(cls, nn.Cell))
    )
