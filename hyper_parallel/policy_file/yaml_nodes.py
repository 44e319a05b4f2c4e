"""From the events of a YAML parser to nodes: without recursion, bounded in depth and size, and plain values only.

Note: [What a hostile file can't do]
Only mappings, lists and plain scalars are made: no tag makes an object, imports or calls anything. Nesting is bounded,
and so is what aliases stand for when they are written out, so that nobody who walks the values walks for long.
"""

from collections.abc import Callable
from typing import Any

import yaml

CORE = "tag:yaml.org,2002:"
"""How the tags of plain values begin."""
MERGE = CORE + "merge"

_MOST_LEVELS = 50
_MOST_NODES = 100_000
"""Values in a file, with aliases written out."""
TOO_DEEP = f"it is nested too deeply: more than {_MOST_LEVELS} levels"

_SCALARS = frozenset(CORE + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge"))

Tell = Callable[[yaml.Node, str], None]
"""Takes something that is wrong with a node, but doesn't keep the rest from being read."""


class _Open:
    """A mapping or list whose end hasn't come yet; with how many values it has, and levels below it."""

    __slots__ = ("anchor", "items", "levels", "node", "nodes")

    def __init__(self, node: Any, anchor: str | None) -> None:
        self.node, self.anchor = node, anchor
        self.items: list[Any] = []
        self.nodes, self.levels = 1, 0


def compose(loader: Any, tell: Tell) -> yaml.Node | None:
    """Read one document.

    Args:
        loader: Gives the events, and resolves the tags of scalars.
        tell: Takes what is wrong with keys.

    Returns:
        Its root; None if there is no document.

    Raises:
        yaml.MarkedYAMLError: It is no YAML, or not what a policy file holds.
    """
    open_ones: list[_Open] = []
    anchors: dict[str, _Open | yaml.Node] = {}
    root: Any = None
    while not isinstance(event := loader.get_event(), yaml.StreamEndEvent):
        kind, nodes, levels = type(event), 1, 0
        if kind is yaml.ScalarEvent:
            node = _scalar(event, loader)
            _anchor(anchors, event, node)
        elif kind in (yaml.MappingEndEvent, yaml.SequenceEndEvent):
            done = open_ones.pop()
            node, nodes, levels = done.node, done.nodes, done.levels + 1
            _close(done, event, tell)
            if done.anchor is not None:
                node.size = nodes, levels
                anchors[done.anchor] = node
        elif kind in (yaml.MappingStartEvent, yaml.SequenceStartEvent):
            opened = _Open(_collection(event), event.anchor)
            _anchor(anchors, event, opened)
            open_ones.append(opened)
            if len(open_ones) > _MOST_LEVELS:
                raise stop(TOO_DEEP, event)
            continue
        elif kind is yaml.AliasEvent:
            node = _known(anchors, event)
            nodes, levels = getattr(node, "size", (1, 0))
        elif kind is yaml.DocumentStartEvent and root is not None:
            raise stop("a file holds one document; a second one begins here", event)
        else:
            continue
        if not open_ones:
            root = node
            continue
        around = open_ones[-1]
        around.items.append(node)
        around.nodes += nodes
        around.levels = max(around.levels, levels)
        if len(open_ones) + levels > _MOST_LEVELS:
            raise stop(TOO_DEEP, event)
        if around.nodes > _MOST_NODES:
            raise stop(f"it has too many values: more than {_MOST_NODES:,} with aliases written out", event)
    return root


def stop(why: str, event: Any) -> yaml.MarkedYAMLError:
    """What is raised where nothing more can be read."""
    return yaml.MarkedYAMLError(None, None, why, event.start_mark)


def _anchor(anchors: dict[str, Any], event: Any, meant: Any) -> None:
    if event.anchor is not None:
        if event.anchor in anchors:
            raise stop(f"the anchor &{event.anchor} is given twice", event)
        anchors[event.anchor] = meant


def _known(anchors: dict[str, Any], event: Any) -> Any:
    if event.anchor not in anchors:
        raise stop(f"no anchor &{event.anchor} stands before this alias", event)
    found = anchors[event.anchor]
    if isinstance(found, _Open):
        raise stop(f"the alias *{event.anchor} stands for something that contains it", event)
    return found


def _scalar(event: Any, loader: Any) -> yaml.ScalarNode:
    tag = event.tag
    if tag is None or tag == "!":
        tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag not in _SCALARS:
        raise _stop_at_tag(tag, event)
    return yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark, style=event.style)


def _collection(event: Any) -> yaml.CollectionNode:
    is_list = isinstance(event, yaml.SequenceStartEvent)
    tag = CORE + ("seq" if is_list else "map")
    if event.tag not in (None, "!", tag):
        raise _stop_at_tag(event.tag, event)
    return (yaml.SequenceNode if is_list else yaml.MappingNode)(tag, [], event.start_mark, event.end_mark)


def _close(done: _Open, event: Any, tell: Tell) -> None:
    done.node.end_mark = event.end_mark
    if isinstance(done.node, yaml.SequenceNode):
        done.node.value = done.items
        return
    first_lines: dict[tuple[str, str], int] = {}
    for key, value in zip(done.items[::2], done.items[1::2], strict=True):
        if not isinstance(key, yaml.ScalarNode):
            tell(key, "a key must be a string, but here is a list or mapping")
            continue
        name = key.tag, key.value
        if name in first_lines and key.tag != MERGE:
            tell(key, f"the key {key.value!r} is given twice (first in line {first_lines[name]})")
        elif key.tag not in (CORE + "str", MERGE):
            kind = key.tag.removeprefix(CORE)
            tell(key, f"a key must be a string, but YAML reads {key.value!r} as {kind}; put it in quotes")
        else:
            done.node.value.append((key, value))
        first_lines.setdefault(name, key.start_mark.line + 1)


def _stop_at_tag(tag: str, event: Any) -> yaml.MarkedYAMLError:
    short = tag.replace(CORE, "!!")
    return stop(f"the tag {short} isn't allowed; a policy file holds plain values, and runs no code", event)
