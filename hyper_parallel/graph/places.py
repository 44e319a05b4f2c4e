"""The cells of a net by path, and what a plan wants for each."""

from hyper_parallel.graph.mapping import Wish, wish_at
from hyper_parallel.graph.swap import Ladder
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.keeps import Regions


class Places:
    """The cells of a net by path, and what a plan wants for each.

    Args:
        regions: What was decided.
        ladder: What happens to cells that are to be swapped.
    """

    def __init__(self, regions: Regions, ladder: Ladder) -> None:
        self.wish: dict[str, Wish] = {}
        self.root: dict[str, str] = {}
        """The path of the recomputed cell in which a cell is."""
        self.anchor: dict[str, str] = {}
        """The same; outside of recomputed cells, the path of the nearest decided cell around, or of the cell itself."""
        self.class_of: dict[str, str] = {}
        self._alike: dict[tuple[str, bool], list[str]] = {}
        self._regions = regions
        self.ladder = ladder
        top = next(node for nodes in regions.nodes_of.values() for node in nodes if node.parent is None)
        self._walk(top, Wish(False, False, None), None)

    def _walk(self, node: Node, around: Wish, root: str | None) -> None:
        decision = self._regions.of(node)
        wish = around if decision is None else wish_at(decision, around, self.ladder)
        if wish.in_region and root is None:
            root = node.path
        self.wish[node.path] = wish
        self.class_of[node.path] = node.class_name
        if root is not None:
            self.root[node.path] = self.anchor[node.path] = root
        elif wish.decision is not None:
            self.anchor[node.path] = wish.decision.node.path
        for child in node.children:
            self._walk(child, wish, root)

    def alike(self, anchor: str) -> list[str]:
        """The anchors of the same class, in the order of the net: recomputed cells for one, else the others."""
        if not self._alike:
            for path in dict.fromkeys(self.anchor.values()):
                self._alike.setdefault((self.class_of[path], path in self.root), []).append(path)
        return self._alike[self.class_of[anchor], anchor in self.root]

    def below(self, anchor: str, path: str) -> str:
        """The place below an anchor that is what `path` is below its own; the anchor itself if there is none."""
        other = self.anchor.get(path)
        if other is None or other == anchor:
            return path if other == anchor else anchor
        moved = anchor + path[len(other) :]
        return moved if moved in self.wish else anchor
