"""Whose operator a node of a compiled graph is.

Note: [Whose operator is it]
Flagged nets name the scopes of their cells by path, so a node of the graph tells its cell. MindSpore shares the graph
of a Python function between its callers, though: what such a function runs has the scope of the first caller, in all of
them. Nodes that run a Primitive of a cell are certain. The others are looked for at the same place below the decided
cell in which the nearest certain node is, along what they compute for or from.
"""

from collections.abc import Callable, Iterable

from hyper_parallel.graph.mapping import NET
from hyper_parallel.graph.places import Places
from ms_ops.graph_flags import RECOMPUTED
from ms_ops.graph_ir import Node


class Owners:
    """Says whose operators nodes are.

    Args:
        forward: The nodes of the forward, in order.
        readers: By the name of a node: the forward's nodes that read its value.
        sources: Gives the nodes whose values a node reads.
        places: The cells of the net.
    """

    def __init__(
        self,
        forward: list[Node],
        readers: dict[str, list[Node]],
        sources: Callable[[Node], list[Node]],
        places: Places,
    ) -> None:
        self._readers = readers
        self._sources = sources
        self._places = places
        self._anchor: dict[str, str | None] = {}
        self._near: dict[tuple[str, bool], str | None] = {}
        for node in reversed(forward):
            self._near[node.name, True] = self._certain_near(node, readers.get(node.name, ()), True)
        for node in forward:
            self._near[node.name, False] = self._certain_near(node, sources(node), False)
        certain = (self._label(node)[0] for node in forward if node.is_own)
        self._has_certain = {places.anchor.get(path) for path in certain if path is not None}
        for node in forward:
            self._anchor[node.name] = self._find_anchor(node)

    def root(self, node: Node) -> str | None:
        """The path of the recomputed cell that runs a node; None if none does."""
        anchor = self._anchor[node.name]
        return anchor if anchor in self._places.root else None

    def path(self, node: Node) -> str | None:
        """The path of the cell that runs a node; None if that isn't known, or is none of the net's."""
        anchor, (path, _) = self._anchor[node.name], self._label(node)
        if path is None or anchor is None:
            return anchor
        return self._places.below(anchor, path)

    def _label(self, node: Node) -> tuple[str | None, bool]:
        """The path that a scope names, if the net has it, and whether it is a recomputed one."""
        scope = node.scope.partition("/")[0]
        path = scope.removeprefix(RECOMPUTED)
        path = "" if path == NET else path
        return (path if path in self._places.wish else None), scope.startswith(RECOMPUTED)

    def _certain_near(self, node: Node, others: Iterable[Node], later: bool) -> str | None:
        path, recomputed = self._label(node)
        if node.is_own and path is not None:
            return path
        for other in others:
            found = self._near.get((other.name, later))
            # the value that a region hands on is read by another one
            if found is not None and (not later or not recomputed or self._label(other)[1]):
                return found
        return None

    def _find_anchor(self, node: Node) -> str | None:
        path, recomputed = self._label(node)
        labelled = self._places.anchor.get(path) if path is not None else None
        if labelled is None or (labelled in self._places.root) != recomputed:
            labelled, others = None, list(dict.fromkeys(self._places.anchor.values()))
            others = [each for each in others if (each in self._places.root) == recomputed]
        else:
            others = self._places.alike(labelled)
        if node.is_own:
            return labelled
        # what is computed again is never handed on itself, so that its readers are in the same region
        order = (True, False) if node.recompute else (False, True)
        near = next((found for later in order if (found := self._near[node.name, later]) is not None), None)
        if near is None:
            return labelled
        return self._nearest(near, others) or (labelled if recomputed else None)

    def _nearest(self, path: str, anchors: list[str]) -> str | None:
        """The anchor around a path, or one beside it of which no certain node is known."""
        known = self._places.anchor.get(path)
        if known in anchors:
            return known
        parent = path.rpartition(".")[0]
        beside = [each for each in anchors if each.rpartition(".")[0] == parent and each not in self._has_certain]
        return beside[0] if beside else None
