"""What a compiled graph does with the operators of a net's cells, beside what the plan wants."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hyper_parallel.graph.mapping import wish_for
from hyper_parallel.graph.owners import Owners
from hyper_parallel.graph.places import Places
from ms_ops.catalogue import VIEWS
from ms_ops.graph_ir import CALL, NO_SCOPE, Node

_PLUMBING = frozenset({"Depend", "Load", "MakeDict", "MakeList", "MakeTuple", "Partial", "Return", "Switch"})
_PLUMBING |= {"TupleGetItem", "UpdateState", "list_getitem", CALL}
"""Operators that compute nothing."""


@dataclass
class Count:
    """What becomes of one operator in one cell: numbers of its calls."""

    runs: int = 0
    """In the forward."""
    planned: int = 0
    """That the plan wants to compute again, and whose values backward needs."""
    copies: int = 0
    """That are computed again."""
    kept: int = 0
    """Whose values wait for backward."""
    kept_though: int = 0
    """Whose values wait for backward, though the plan wants them computed again; views don't count, which have nothing
    of their own to keep."""
    copied_though: int = 0
    """That are computed again, though the plan wants them kept; views don't count."""


@dataclass
class Found:
    """What a graph does."""

    counts: dict[str, dict[str, Count]] = field(default_factory=dict)
    """By the path of a decided cell (of the nearest one around an operator; None has the empty path), by operator."""
    ungated: set[str] = field(default_factory=set)
    """Paths of recomputed cells whose copies nothing holds back until backward."""
    moves: Counter[str] = field(default_factory=Counter)
    """By target: tensors that are moved there."""
    gates: int = 0


def analyse(nodes: list[Node], places: Places) -> Found:
    """Count what a graph does with the operators of a net.

    Args:
        nodes: Of the graph.
        places: The cells of the net.
    """
    return _Analysis(nodes, places).found()


class _Analysis:
    def __init__(self, nodes: list[Node], places: Places) -> None:
        self.places = places
        self.nodes = nodes
        self.by_name = {node.name: node for node in nodes}
        self.forward = [
            node for node in nodes if not node.is_backward and not node.is_copy and node.operator not in _PLUMBING
        ]
        self.copies = Counter(node.copy_id for node in nodes if node.is_copy)
        scopes = {node.copy_id: node.scope for node in nodes if node.is_copy}
        for node in self.forward:
            if node.scope == NO_SCOPE:  # under lazy_inline, but a copy has kept it
                node.scope = scopes.get(node.copy_id, NO_SCOPE)
        self.readers: dict[str, list[Node]] = {}
        for node in self.forward:
            for name in node.inputs:
                for source in self._behind(name):
                    self.readers.setdefault(source, []).append(node)
        self.owners = Owners(self.forward, self.readers, self._sources, places)
        self.late = set(self._read_late())

    def found(self) -> Found:
        found = Found()
        roots: dict[int, Counter[str]] = {}
        for node in self.forward:
            path = self.owners.path(node)
            if path is None:
                owner, again = "", False
            else:
                wish = self.places.wish[path]
                owner = wish.decision.node.path if wish.decision is not None else ""
                again = wish_for(node.operator, wish)
            self._count(node, found.counts.setdefault(owner, {}).setdefault(node.operator, Count()), again)
            root = self.owners.root(node)
            if node.region is not None and root is not None:
                roots.setdefault(node.region, Counter())[root] += 1
        root_of = {region: votes.most_common(1)[0][0] for region, votes in roots.items()}
        copied = {node.region for node in self.nodes if node.is_copy and node.operator not in _PLUMBING}
        gated = {node.region for node in self.nodes if node.is_copy and self._is_gated(node)}
        found.ungated = {root_of[region] for region in copied - gated if region in root_of}
        found.moves = Counter(node.target for node in self.nodes if node.operator == "MoveTo")
        found.gates = sum(node.is_gate for node in self.nodes)
        return found

    def _count(self, node: Node, count: Count, again: bool) -> None:
        copies = self.copies[node.copy_id] if node.copy_id else 0
        count.runs += 1
        count.copies += copies
        if copies:
            count.planned += again
            count.copied_though += not again and node.operator not in VIEWS
        elif node.name in self.late:
            count.kept += 1
            if again and not self._is_output(node):
                count.planned += 1
                count.kept_though += node.operator not in VIEWS

    def _is_output(self, node: Node) -> bool:
        """Whether a node gives what its region hands on, which is kept: the next region begins with it."""
        root = self.owners.root(node)
        readers = self.readers.get(node.name, [])
        return root is not None and (not readers or any(self.owners.root(reader) != root for reader in readers))

    def _sources(self, node: Node) -> list[Node]:
        return [self.by_name[source] for name in node.inputs for source in self._behind(name)]

    def _read_late(self) -> Iterator[str]:
        """Walk the nodes whose values wait for backward: it reads them, or a copy does."""
        for node in self.nodes:
            if node.is_backward or node.is_copy or node.is_gate or node.hands_over:
                for name in self._values(node):
                    yield from self._behind(name)

    def _values(self, node: Node) -> Iterable[str]:
        if node.operator in ("UpdateState", CALL):
            return ()
        return node.inputs[:1] if node.operator == "Depend" else node.inputs

    def _behind(self, name: str) -> Iterator[str]:
        """Walk what computes a value that is handed on."""
        waiting, seen = [name], set()
        while waiting:
            one = waiting.pop()
            node = self.by_name.get(one)
            if node is None or one in seen or node.is_backward or node.is_copy:
                continue
            seen.add(one)
            if node.operator in _PLUMBING:
                waiting.extend(self._values(node))
            else:
                yield one

    def _is_gated(self, node: Node) -> bool:
        return any(source.is_gate for name in node.inputs if (source := self.by_name.get(name)) is not None)
