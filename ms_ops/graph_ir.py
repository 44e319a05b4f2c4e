"""Reading a compiled graph from the text that MindSpore dumps. Seen in MindSpore 2.9.0 and 2.10.0.

Of a recomputed operator there are two nodes: in the forward one with `recompute: Bool(1)`, and before the backward that
needs it a copy with `duplicated: Bool(1)`; both have the same `recompute_id`, and the `recompute_sub_graph` of their
region. `Depend` with `recompute_depend` holds a region's copies back until its backward begins. Operators of the
backward have a scope that begins with `Gradients`. `MoveTo` names where it moves a tensor to.

A cell under lazy_inline has graphs of its own. `Partial` hands over to its backward (a graph whose name has an arrow to
the left) what that needs. If the cell is recomputed, it has a graph for the forward alone, and a second one with the
copies, whose call has `added_recompute_depend`; a copy and its original have the same `unique_id`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = re.compile(r"  (%\w+)\((.*?)\) = (?:PrimFunc_)?([\w./-]+|call @[^(]+)\(")
_GRAPH = re.compile(r"subgraph @(\S+?)\(")
_SCOPE = re.compile(r"# Scope: \((.*)\)$")
_ARGUMENT = re.compile(r"%\w+")
_ATTRIBUTE = re.compile(
    r"\b(recompute_sub_graph|recompute_id|recompute|duplicated|recompute_depend|added_recompute_depend): \w+\((\d+)\)"
)
_UNIQUE = re.compile(r'\bunique_id: "(\d+)"')
_TARGET = re.compile(r'"(\w+)"')

_BACKWARD_GRAPH = "◂"

CALL = "call"
"""The operator of a call of a graph."""

NO_SCOPE = "Default"

BACKWARD = "Gradients"
"""What the scope of an operator of the backward begins with."""


@dataclass(slots=True)
class Node:
    """One operator in a compiled graph."""

    name: str
    """Unique in the text."""
    operator: str
    """As MindSpore dispatches it; `TupleGetItem`, `Depend`, `Load` and the like, too."""
    inputs: tuple[str, ...]
    """Names of the nodes and parameters that it reads, in order."""
    scope: str
    is_own: bool
    """Whether a cell holds its Primitive: it isn't a function's, nor a tensor's method."""
    recompute: bool | None
    """What the compiler decided: recompute the value, keep it, or None where nobody asked."""
    is_copy: bool
    """Whether it computes again what another node has computed."""
    copy_id: str
    """What a node and its copy share, and no others; empty if it can have none."""
    region: int | None
    """The connected part of the graph that is recomputed together."""
    is_gate: bool
    """Whether it holds the copies of a region back."""
    target: str
    """Of `MoveTo`: where to."""
    hands_over: bool
    """Whether backward gets what it reads: it makes the backward of a cell under lazy_inline."""

    @property
    def is_backward(self) -> bool:
        """Whether it is part of a gradient (a copy isn't)."""
        return self.scope.startswith(BACKWARD) and not self.is_copy


def read_graph(text: str) -> list[Node]:
    """Read a dump.

    Args:
        text: What MindSpore's `dump_func_graph` gives, or an `.ir` file.

    Returns:
        Its nodes, in order.

    Raises:
        ValueError: No node is found: the text is no dump, or this MindSpore writes another format.
    """
    found = list(_nodes(text))
    if not found:
        raise ValueError(
            f"no operator is found in a graph of {len(text)} characters: either it is no dump of MindSpore's, or this "
            f"version writes dumps differently; look at ms_ops/graph_ir.py, which reads them"
        )
    return found


def _nodes(text: str) -> Iterator[Node]:
    graph, node = "", None
    for line in text.splitlines():
        if line.startswith("  %"):
            if node is not None:
                yield node
            node = _node(graph, line)
        elif node is not None and "# Scope: (" in line:
            scope = _SCOPE.search(line)
            node.scope = scope[1] if scope is not None else ""
        elif line.startswith("subgraph @"):
            head = _GRAPH.match(line)
            graph = head[1] if head is not None else line
    if node is not None:
        yield node


def _node(graph: str, line: str) -> Node | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    arguments = line[head.end() : _closing(line, head.end())]
    rest = line[head.end() + len(arguments) :]
    attributes = {name: int(value) for name, value in _ATTRIBUTE.findall(rest)}
    recompute = attributes.get("recompute")
    shared, unique = attributes.get("recompute_id"), _UNIQUE.search(rest)
    target = _TARGET.search(arguments) if head[3] == "MoveTo" else None
    return Node(
        name=f"{graph}:{head[1]}",
        operator=CALL if head[3].startswith(CALL) else head[3],
        inputs=tuple(f"{graph}:{name}" for name in _ARGUMENT.findall(arguments)),
        scope="",
        is_own="{instance name: " in rest,
        recompute=None if recompute is None else bool(recompute),
        is_copy=bool(attributes.get("duplicated", 0)),
        copy_id=f"recompute {shared}" if shared is not None else unique[1] if unique is not None else "",
        region=attributes.get("recompute_sub_graph"),
        is_gate=bool(attributes.get("recompute_depend", 0) or attributes.get("added_recompute_depend", 0)),
        target=target[1] if target is not None else "",
        hands_over=head[3] == "Partial" and _BACKWARD_GRAPH in arguments,
    )


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` closes; text in quotes doesn't count."""
    depth, quoted = 1, False
    for place in range(start, len(line)):
        char = line[place]
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return place
    return len(line)
