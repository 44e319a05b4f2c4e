"""From the text of a YAML file to plain values, and to the place of each.

libyaml does the parsing where PyYAML has it: it is several times as fast.
"""

import re
from typing import Any

import yaml

from hyper_parallel.policy_file.problems import Position, Problem, policy_error
from hyper_parallel.policy_file.yaml_nodes import CORE, MERGE, TOO_DEEP, compose

_NOT_TEXT = re.compile(f"{yaml.reader.Reader.NON_PRINTABLE.pattern}|\N{ZERO WIDTH NO-BREAK SPACE}")
_SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*:")

Parser = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


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
        self._pairs: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = {}
        """By mapping: keys, with the nodes of key and value."""
        self.content: Any = None
        """Plain values: dicts, lists, strings, numbers, booleans, None."""
        self._refuse_what_is_no_text(text)
        try:
            loader: Any = Parser(text)
            try:
                self._root = compose(loader, self._tell)
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
        return self._position_of(found)

    def _below(self, node: Any, part: int | str) -> tuple[Any, Any] | None:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            return node.value[part], node.value[part]
        if isinstance(node, yaml.MappingNode):
            if id(node) not in self._pairs:  # what is merged in comes first, and counts least
                self._pairs[id(node)] = {key.value: (key, value) for key, value in node.value}
            return self._pairs[id(node)].get(str(part))
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
            what = TOO_DEEP
        elif error.context == "while scanning an alias":
            what += "; a pattern that begins with * must be in quotes"
            at = self._at(*_line_and_column(error.context_mark or mark), 1)
        elif "\t" in at.text[: len(at.text) - len(at.text.lstrip())]:
            what = "a tab before the text; lines are indented with spaces"
            at = self._at(mark.line, at.text.index("\t"), 1)
        return policy_error(self._name, [Problem(f"malformed YAML: {what}", at)])

    def _plain(self, node: yaml.Node, loader: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loader)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, loader) for item in node.value]
        loader.flatten_mapping(node)
        return {key.value: self._plain(value, loader) for key, value in node.value}

    def _scalar(self, node: yaml.ScalarNode, loader: Any) -> Any:
        if node.tag in (CORE + "int", CORE + "float") and _SIXTIES.match(node.value):
            self._tell(node, f"YAML reads {node.value!r} as a number to the base of 60; put it in quotes")
            return node.value
        try:
            return loader.yaml_constructors[node.tag](loader, node) if node.tag != MERGE else node.value
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            # what looks like a date or a number and is none, such as 2026-99-99; or `!!int x`
            what = f"{node.value[:40]!r} is no {node.tag.removeprefix(CORE)} ({error}); put it in quotes"
            self._tell(node, what)
            return node.value

    def _tell(self, node: yaml.Node, what: str) -> None:
        self.problems.append(Problem(f"malformed YAML: {what}", self._position_of(node)))

    def _position_of(self, node: Any) -> Position:
        start, end = node.start_mark, node.end_mark
        width = end.column - start.column if end.line == start.line else 10**6
        return self._at(start.line, start.column, width)


def _line_and_column(mark: Any) -> tuple[int, int]:
    return mark.line, mark.column
