"""The cells of a net under every path they have, in the order of `cells_and_names()`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mindspore import nn

# A class with one of these constructs only holds cells: a policy on it would never be asked.
_HOLDERS = (nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct)


@dataclass(eq=False)
class Node:
    """One cell at one path. A cell that is shared has several nodes."""

    path: str
    """Dotted path below the net; the net itself has the empty path."""
    cell: nn.Cell
    parent: "Node | None"
    children: list["Node"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.path.rpartition(".")[2]
        """The last segment of the path."""
        self.runs = "construct" in vars(self.cell) or type(self.cell).construct not in _HOLDERS
        """Whether the cell has a construct of its own. CellList and CellDict have none: they only hold cells."""

    @property
    def class_name(self) -> str:
        """Name of the cell's class."""
        return self.cell.cls_name or type(self.cell).__name__

    def below(self) -> Iterator["Node"]:
        """Walk the nodes below this one, parents first."""
        for child in self.children:
            yield child
            yield from child.below()

    def above(self) -> Iterator["Node"]:
        """Walk the nodes above this one, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


def tree_of(net: nn.Cell) -> Node:
    """Give the tree of a net's cells.

    `Cell.cells_and_names()` names a shared cell once, by its first path. A file may name it by any of its paths, so
    the tree has them all. A cell that contains itself is entered once.

    Args:
        net: The net.

    Returns:
        The node of the net, with the empty path.
    """
    return _grow(net, "", None)


def _grow(cell: nn.Cell, path: str, parent: Node | None) -> Node:
    node = Node(path, cell, parent)
    entered = {id(cell)} | {id(outer.cell) for outer in node.above()}
    # name_cells() leaves out the second name of a child that is shared between two names of one cell.
    for name, child in cell._cells.items():
        if child is not None and id(child) not in entered:
            node.children.append(_grow(child, f"{path}.{name}" if path else name, node))
    return node
