"""Layers by number: ranges such as ``0-5, 8``, and the container that they count in."""

import re
from collections.abc import Iterator
from typing import Any

from mindspore import nn

from hyper_parallel.policy_file.cells import Node

EXPECTED_LAYERS = "layer numbers such as 3, '0-5, 8' or [0-5, 8]"

_RANGE = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")
_MOST_LAYERS = 100_000


def layers_as_text(value: Any) -> str:
    """Write numbers of layers in one way, whatever way a file chose.

    Args:
        value: A number, a text such as ``"0-5, 8"``, or a list of both.

    Returns:
        Text, e.g. ``"0-5, 8"``, in the order that was given.

    Raises:
        ValueError: It is something else, a range is empty, or a layer is named twice.
    """
    items = value if isinstance(value, (list, tuple)) else [value]
    ranges: list[tuple[int, int]] = []
    for item in items:
        if isinstance(item, bool):
            raise ValueError(f"expected {EXPECTED_LAYERS}; true and false are no layers")
        if isinstance(item, int):
            item = str(item)
        if not isinstance(item, str):
            raise ValueError(f"expected {EXPECTED_LAYERS}")
        ranges.extend(_ranges(item))
    if not ranges:
        raise ValueError(f"expected {EXPECTED_LAYERS}, but it names no layer")
    last = -1
    for low, high in sorted(ranges):
        if low <= last:
            raise ValueError(f"layer {low} is named twice")
        last = high
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def layer_numbers(text: str) -> list[int]:
    """Give the numbers that `layers_as_text` wrote, one by one."""
    return [number for low, high in _ranges(text) for number in range(low, high + 1)]


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"expected {EXPECTED_LAYERS}")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise ValueError(f"the range {part.strip()} is empty; write {high}-{low}")
        if high >= _MOST_LAYERS:
            raise ValueError(f"expected layer numbers below {_MOST_LAYERS:,}")
        yield low, high


def container_of(root: Node, path: str | None) -> Node:
    """Find the numbered container whose cells are the layers.

    Args:
        root: The net.
        path: The container's path, if the file gives it. Without it, it is the one CellList of the net that is in no
            other numbered container; in a net without one, the one SequentialCell of that kind.

    Returns:
        The container.

    Raises:
        ValueError: There is none, there are several, or `path` names none. The message lists what there is.
    """
    found = list(_outermost_numbered(root))
    if path is not None:
        everywhere = [node for node in [root, *root.below()] if _is_numbered(node)]
        named = [node for node in everywhere if node.path == path]
        if named:
            return named[0]
        raise ValueError(f"`{path}` is no numbered container of the net; {_offer(everywhere)}")
    lists = [node for node in found if isinstance(node.cell, nn.CellList)]
    candidates = lists or found
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise ValueError("the net has no numbered container (a CellList or SequentialCell); use `cells` instead")
    first = candidates[0].path
    raise ValueError(
        f"several containers have numbered cells: {_offer(candidates)}; say which, as `container: {first}`"
    )


def _outermost_numbered(node: Node) -> Iterator[Node]:
    if _is_numbered(node):
        yield node
    else:
        for child in node.children:
            yield from _outermost_numbered(child)


def _is_numbered(node: Node) -> bool:
    is_list = isinstance(node.cell, (nn.CellList, nn.SequentialCell)) and bool(node.children)
    return is_list and all(child.name.isdigit() for child in node.children)


def _offer(nodes: list[Node]) -> str:
    shown = ", ".join(f"{node.path or '(the net)'} ({len(node.children)} cells)" for node in nodes[:8])
    return (shown or "it has none") + (", ..." if len(nodes) > 8 else "")
