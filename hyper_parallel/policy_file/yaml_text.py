"""From the text of a YAML file to plain values, safely, and with the place of each.

Note: [What a hostile file can't do]
Only mappings, lists and plain scalars are made: no tag makes an object, imports or calls anything. Nesting is bounded,
and so is what aliases stand for when they are written out, so that nobody who walks the values walks for long. The tree
is composed from the parser's events, one by one, without recursion; libyaml does the parsing where PyYAML has it.
"""

import re
from typing import Any, NamedTuple

import yaml

from hyper_parallel.policy_file.problems import Position, Problem, policy_error

_MOST_LEVELS = 50
_MOST_NODES = 100_000
"""Values in a file, with aliases written out."""

_TOO_DEEP = f"it is nested too deeply: more than {_MOST_LEVELS} levels"
_CORE = "tag:yaml.org,2002:"
_SCALARS = frozenset(_CORE + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge"))
_NOT_TEXT = re.compile(f"{yaml.reader.Reader.NON_PRINTABLE.pattern}|\N{ZERO WIDTH NO-BREAK SPACE}")
_SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*:")

Parser = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Size(NamedTuple):
    nodes: int
    levels: int


class _Open:
    """A mapping or list whose end hasn't come yet."""

    def __init__(self, node: yaml.CollectionNode, anchor: str | None) -> None:
        self.node, self.anchor = node, anchor
        self.items: list[yaml.Node] = []
        self.nodes, self.levels = 1, 0

    def add(self, node: yaml.Node, size: _Size) -> None:
        self.items.append(node)
        self.nodes += size.nodes
        self.levels = max(self.levels, size.levels)


class YamlText:
    """The text of one file, and the values in it.

    Args:
        text: The text.
        name: The file's name, for messages.

    Raises:
        PolicyError: The text is no YAML, or too large to be meant: nothing can be read.
    """

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = text.splitlines()
        self.problems: list[Problem] = []
        """What is wrong so far, but doesn't keep the rest from being read."""
        self._root: yaml.Node | None = None
        self.content: Any = None
        """Plain values: dicts, lists, strings, numbers, booleans, None."""
        self._refuse_what_is_no_text(text)
        try:
            loader: Any = Parser(text)
            try:
                self._root = self._composed(loader)
                if self._root is not None:
                    self.content = self._plain(self._root, loader)
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            raise self._malformed(error) from None

    def position(self, loc: tuple[int | str, ...], of_key: bool = False) -> Position:
        """Say where something stands.

        Args:
            loc: Keys and indices that lead to it. Of what isn't there: where it is missing.
            of_key: Point to its key, not to its value.

        Returns:
            The place of the deepest part of `loc` that is in the file.
        """
        found = node = self._root
        for part in loc:
            below = self._below(node, part)
            if below is None:
                break
            key, node = below
            found = key if of_key and part == loc[-1] else node
        if found is None:
            return Position(self._name, 1, 1, self._lines[0] if self._lines else "", 1)
        end = found.end_mark.column if found.end_mark.line == found.start_mark.line else 10**6
        return self._at(found.start_mark.line, found.start_mark.column, end - found.start_mark.column)

    def _below(self, node: Any, part: int | str) -> tuple[Any, Any] | None:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            return node.value[part], node.value[part]
        if isinstance(node, yaml.MappingNode):
            for key, value in reversed(node.value):  # what is merged in comes first, and counts least
                if key.value == str(part):
                    return key, value
        return None

    def _at(self, line: int, column: int, width: int) -> Position:
        text = self._lines[line] if line < len(self._lines) else ""
        return Position(self._name, line + 1, column + 1, text, max(1, min(width, len(text) - column)))

    def _refuse_what_is_no_text(self, text: str) -> None:
        found = _NOT_TEXT.search(text)
        if found is None:
            return
        line = len(text[: found.start() + 1].splitlines()) - 1
        column = found.start() - (max(text.rfind("\n", 0, found.start()), text.rfind("\r", 0, found.start())) + 1)
        if found[0] == "\N{ZERO WIDTH NO-BREAK SPACE}":
            what = "a byte-order mark inside the file; delete it"
        else:
            what = f"the character {ord(found[0]):#04x} isn't allowed; a policy file is plain text"
        raise policy_error(self._name, [Problem(f"malformed YAML: {what}", self._at(line, column, 1))])

    def _malformed(self, error: yaml.MarkedYAMLError) -> Exception:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        if mark is None:
            return policy_error(self._name, [Problem(f"malformed YAML: {what}")])
        at = self._at(*_line_and_column(mark), 1)
        if "nesting depth" in what:
            what = _TOO_DEEP
        elif error.context == "while scanning an alias":
            what += "; a pattern that begins with * must be in quotes"
            at = self._at(*_line_and_column(error.context_mark or mark), 1)
        elif "\t" in at.text[: len(at.text) - len(at.text.lstrip())]:
            what = "a tab before the text; lines are indented with spaces"
            at = self._at(mark.line, at.text.index("\t"), 1)
        return policy_error(self._name, [Problem(f"malformed YAML: {what}", at)])

    # ---- from events to nodes

    def _composed(self, loader: Any) -> yaml.Node | None:
        open_ones: list[_Open] = []
        anchors: dict[str, tuple[yaml.Node, _Size | None]] = {}
        root: yaml.Node | None = None
        while not isinstance(event := loader.get_event(), yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _stop("a file holds one document; a second one begins here", event)
            node: Any
            if isinstance(event, yaml.CollectionEndEvent):
                done = open_ones.pop()
                node = done.node
                size = _Size(done.nodes, done.levels + 1)
                self._close(done, event)
                if done.anchor is not None:
                    anchors[done.anchor] = node, size
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    raise _stop(f"no anchor &{event.anchor} stands before this alias", event)
                node, known = anchors[event.anchor]
                if known is None:
                    raise _stop(f"the alias *{event.anchor} stands for something that contains it", event)
                size = known
            elif isinstance(event, yaml.NodeEvent):
                node, size = self._begun(event, loader), _Size(1, 0)
                is_open = isinstance(event, yaml.CollectionStartEvent)
                if event.anchor is not None:
                    if event.anchor in anchors:
                        raise _stop(f"the anchor &{event.anchor} is given twice", event)
                    anchors[event.anchor] = node, None if is_open else size
                if is_open:
                    open_ones.append(_Open(node, event.anchor))
                    _bounded(_Size(0, len(open_ones)), event)
                    continue
            else:
                continue
            if open_ones:
                open_ones[-1].add(node, size)
                _bounded(_Size(open_ones[-1].nodes, len(open_ones) + size.levels), event)
            else:
                root = node
        return root

    def _begun(self, event: Any, loader: Any) -> Any:
        tag = event.tag
        is_scalar = isinstance(event, yaml.ScalarEvent)
        if is_scalar:
            if tag in (None, "!"):
                tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
            if tag not in _SCALARS:
                raise _stop_at_tag(tag, event)
            return yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark, style=event.style)
        kind: Any = yaml.SequenceNode if isinstance(event, yaml.SequenceStartEvent) else yaml.MappingNode
        tag = _CORE + ("seq" if kind is yaml.SequenceNode else "map")
        if event.tag not in (None, "!", tag):
            raise _stop_at_tag(event.tag, event)
        return kind(tag, [], event.start_mark, event.end_mark)

    def _close(self, done: _Open, event: yaml.Event) -> None:
        done.node.end_mark = event.end_mark
        if isinstance(done.node, yaml.SequenceNode):
            done.node.value = done.items
            return
        first_lines: dict[tuple[str, str], int] = {}
        for key, value in zip(done.items[::2], done.items[1::2], strict=True):
            at = self._at(key.start_mark.line, key.start_mark.column, key.end_mark.column - key.start_mark.column)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem("a key must be a string, but here is a list or mapping", at))
                continue
            name = key.tag, key.value
            if name in first_lines and key.tag != _CORE + "merge":
                self.problems.append(
                    Problem(f"the key {key.value!r} is given twice (first in line {first_lines[name]})", at)
                )
                continue
            first_lines[name] = at.line
            if key.tag not in (_CORE + "str", _CORE + "merge"):
                kind = key.tag.removeprefix(_CORE)
                self.problems.append(
                    Problem(f"a key must be a string, but YAML reads {key.value!r} as {kind}; put it in quotes", at)
                )
                continue
            done.node.value.append((key, value))

    # ---- from nodes to values

    def _plain(self, node: yaml.Node, loader: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loader)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, loader) for item in node.value]
        loader.flatten_mapping(node)
        return {key.value: self._plain(value, loader) for key, value in node.value}

    def _scalar(self, node: yaml.ScalarNode, loader: Any) -> Any:
        def wrong(why: str) -> None:
            width = node.end_mark.column - node.start_mark.column
            at = self._at(node.start_mark.line, node.start_mark.column, width)
            self.problems.append(Problem(f"malformed YAML: {why}", at))

        if node.tag in (_CORE + "int", _CORE + "float") and _SIXTIES.match(node.value):
            wrong(f"YAML reads {node.value!r} as a number to the base of 60; put it in quotes")
            return node.value
        try:
            return loader.yaml_constructors[node.tag](loader, node) if node.tag != _CORE + "merge" else node.value
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            # what looks like a date or a number and is none, such as 2026-99-99; or `!!int x`
            wrong(f"{node.value[:40]!r} is no {node.tag.removeprefix(_CORE)} ({error}); put it in quotes")
            return node.value


def _line_and_column(mark: Any) -> tuple[int, int]:
    return mark.line, mark.column


def _bounded(size: _Size, event: yaml.Event) -> None:
    if size.levels > _MOST_LEVELS:
        raise _stop(_TOO_DEEP, event)
    if size.nodes > _MOST_NODES:
        raise _stop(f"it has too many values: more than {_MOST_NODES:,} with aliases written out", event)


def _stop_at_tag(tag: str, event: Any) -> yaml.MarkedYAMLError:
    short = tag.replace(_CORE, "!!")
    return _stop(f"the tag {short} isn't allowed; a policy file holds plain values, and runs no code", event)


def _stop(why: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, why, event.start_mark)
