"""Whose operator a node of a compiled graph is.

Note: [Whose operator is it]
Flagged nets name the scopes of their cells by path, so a node of the graph tells its cell. MindSpore shares the graph
of a Python function between its callers, though: what such a function runs has the scope of the first caller, in all of
them. Nodes that run a Primitive of a cell are certain. The others are looked for at the same place below the decided
cell in which the nearest certain node is, along what they compute for or from.
"""

from collections.abc import Callable, Iterable

from hyper_parallel.graph.labels import path_in
from hyper_parallel.graph.places import Places
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
        self._before: dict[str, str | None] = {}
        self._after: dict[str, str | None] = {}
        for node in forward:
            # a value that is computed again never leaves its region; another one may come from the region before
            inside_first = sorted(sources(node), key=lambda source: (not source.recompute, not source.is_own))
            self._before[node.name] = self._certain(node, (self._before.get(each.name) for each in inside_first))
        for node in reversed(forward):
            self._after[node.name] = self._certain(
                node,
                (
                    self._after.get(each.name) if each.is_own or each.recompute else self._before[each.name]
                    for each in readers.get(node.name, ())
                ),
            )
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
        path, recomputed = path_in(node.scope)
        return (path if path in self._places.wish else None), recomputed

    def _certain(self, node: Node, near: Iterable[str | None]) -> str | None:
        """The path of a node, if that is certain; else the first of those near it that is."""
        path, _ = self._label(node)
        if node.is_own and path is not None:
            return path
        return next((found for found in near if found is not None), None)

    def _find_anchor(self, node: Node) -> str | None:
        path, recomputed = self._label(node)
        labelled = self._places.anchor.get(path) if path is not None else None
        if node.is_own:
            return labelled
        before, after = self._before[node.name], self._after[node.name]
        near = (after or before) if node.recompute else (before or after)
        fits = labelled is not None and (labelled in self._places.root) == recomputed
        if near is None:
            return labelled if fits else None
        known = self._places.anchor.get(near)
        if labelled is None:
            return known if (known in self._places.root) == recomputed else None
        alike = self._places.alike(labelled)
        if known in alike:
            return known
        return (self._beside(near, alike) or (labelled if recomputed else None)) if fits else None

    def _beside(self, path: str, anchors: list[str]) -> str | None:
        """The anchor beside a path of which no certain node is known."""
        parent = path.rpartition(".")[0]
        beside = [each for each in anchors if each.rpartition(".")[0] == parent and each not in self._has_certain]
        return beside[0] if beside else None
