"""`CellPattern`: which cells of a net a rule names.

A pattern is a dotted path in which some segments are left open:

- `*` stands for one segment, or for any part of one: `layers.*`, `layers.*.norm*`;
- `**`, alone between dots, for any number of segments, none included: `**.mlp`, `layers.**.norm1`;
- `[a-b]` for an index from a to b, both included, and `[a]` for the index a: `layers.[0-5]`, `block[0-3].mlp`;
- `{a,b}` for a or b, each of them a part of a segment: `layers.*.{attention,mlp}`, `layers.{[0-3],8}`;

or, after `re:`, a regular expression for the whole path: `re:layers[.][0-5][.](attention|mlp)`.

Both levels (segments in a path, characters in a segment) are matched by following the set of positions that can be
reached. No backtracking takes place, so no pattern is slow.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.regular import regular_expression

REGEX = "re:"
"""How a pattern begins that is a regular expression."""

_RANGE = re.compile(r"\[([0-9]{1,9})(?:-([0-9]{1,9}))?\]")
# An index is a whole number, written in one way: neither the 1 nor the 2 of `block12` is one, nor is `02`.
_INDEX = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_ANY_DEPTH = "**"
_LONGEST = 1000


@dataclass(frozen=True)
class _Literal:
    text: str

    def ends(self, name: str, starts: set[int]) -> set[int]:
        return {start + len(self.text) for start in starts if name.startswith(self.text, start)}


@dataclass(frozen=True)
class _Star:
    def ends(self, name: str, starts: set[int]) -> set[int]:
        return set(range(min(starts), len(name) + 1))


@dataclass(frozen=True)
class _Range:
    low: int
    high: int

    def ends(self, name: str, starts: set[int]) -> set[int]:
        found = (_INDEX.match(name, start) for start in starts)
        return {index.end() for index in found if index and self.low <= int(index[0]) <= self.high}


@dataclass(frozen=True)
class _Choice:
    options: "tuple[tuple[_Token, ...], ...]"

    def ends(self, name: str, starts: set[int]) -> set[int]:
        return {end for option in self.options for end in _ends(option, name, starts)}


_Token = _Literal | _Star | _Range | _Choice
_Segments = tuple[tuple[_Token, ...] | None, ...]


class State:
    """How far a path has come in a pattern: the positions among its segments that it may have reached.

    Args:
        segments: Those of the pattern.
        positions: The positions, but those that only `**` for no segment reaches.
        states: All states of the pattern so far, by their positions: it has few, however many paths there are.
    """

    __slots__ = ("_positions", "_segments", "_states", "following", "is_end")

    def __init__(self, segments: _Segments, positions: frozenset[int], states: "dict[frozenset[int], State]") -> None:
        reached = set(positions)
        for at in positions:
            while at < len(segments) and segments[at] is None:
                at += 1
                reached.add(at)
        self._segments = segments
        self._positions = reached
        self._states = states
        self.following: dict[str, State | None] = {}
        """What `after` has found so far."""
        self.is_end = len(segments) in reached
        """Whether the pattern names a cell that has come this far."""

    def after(self, name: str) -> "State | None":
        """The state of a cell of this name in the one that has come this far; None: nothing below can match."""
        if name not in self.following:
            self.following[name] = self._after(name)
        return self.following[name]

    def _after(self, name: str) -> "State | None":
        found = set()
        for at in self._positions:
            if at < len(self._segments):
                segment = self._segments[at]
                if segment is None:
                    found.add(at)
                elif len(name) in _ends(segment, name, {0}):
                    found.add(at + 1)
        if not found:
            return None
        key = frozenset(found)
        if key not in self._states:
            self._states[key] = State(self._segments, key, self._states)
        return self._states[key]


class CellPattern:
    """A dotted path with open segments, or a regular expression. `parse_pattern` makes one from its text.

    Args:
        text: The pattern as it is written.
        segments: What each segment must look like; None stands for any number of segments.
    """

    def __init__(self, text: str, segments: _Segments) -> None:
        self.text = text
        self.begin = State(segments, frozenset({0}), {})
        """The state of the net itself, before any segment."""

    def matches(self, path: str) -> bool:
        """Tell whether the pattern names this cell.

        Args:
            path: Dotted path of a cell, as `Cell.cells_and_names()` gives it. The net itself has the empty path.

        Returns:
            True if the whole path matches. The net itself is never named: a file is about the cells below it.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from hyper_parallel.policy_file.patterns import parse_pattern
            >>> parse_pattern("layers.[0-5]").matches("layers.3")
            True
            >>> parse_pattern("layers.*").matches("layers.3.mlp")
            False
        """
        if not path:
            return False
        state: State | None = self.begin
        for name in path.split("."):
            state = state and state.after(name)
        return state is not None and state.is_end

    def __str__(self) -> str:
        return self.text


class RegexPattern(CellPattern):
    """A pattern that is a regular expression for the whole path.

    Args:
        text: The pattern as it is written, with `re:`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, ())
        self.matches_text = regular_expression(text.removeprefix(REGEX)).matches
        """Whether the expression describes a path that isn't empty."""

    def matches(self, path: str) -> bool:
        return bool(path) and self.matches_text(path)


def parse_pattern(text: str) -> CellPattern:
    """Read a pattern.

    Args:
        text: The pattern, e.g. ``"layers.[0-5].mlp"``.

    Returns:
        The pattern, ready to be matched against paths.

    Raises:
        PolicyError: The pattern is malformed; the message quotes it and says what was expected.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.patterns import parse_pattern
        >>> parse_pattern("**.mlp").matches("layers.0.mlp")
        True
        >>> parse_pattern("re:layers[.][0-9]+").matches("layers.10")
        True
        >>> parse_pattern("layers.[5-2]")
        Traceback (most recent call last):
        ...
        hyper_parallel.core.errors.PolicyError: malformed pattern 'layers.[5-2]': the range [5-2] is empty; write [2-5]
    """
    if len(text) > _LONGEST:
        raise PolicyError(
            f"malformed pattern '{text[:40]}...': it has {len(text)} characters, expected at most {_LONGEST}"
        )
    if text.startswith(REGEX):
        return _regex(text)
    if not text:
        raise PolicyError("malformed pattern '': it is empty; name a cell, such as 'layers.0', or '**' for every cell")
    segments: list[tuple[_Token, ...] | None] = []
    for segment in text.split("."):
        if segment == _ANY_DEPTH:
            segments.append(None)
        elif not segment:
            raise _malformed(text, "a segment is empty; a dot stands between two names")
        elif _ANY_DEPTH in segment:
            raise _malformed(text, f"'**' must stand alone between dots, not as a part of {segment!r}")
        else:
            segments.append(tuple(_tokens(segment, text)))
    return CellPattern(text, tuple(segments))


def _regex(text: str) -> RegexPattern:
    if text == REGEX:
        raise _malformed(text, "the regular expression is empty; it describes whole paths, such as 're:layers[.][0-9]'")
    try:
        return RegexPattern(text)
    except ValueError as error:
        raise _malformed(text, f"as a regular expression, {error}") from None


def _tokens(segment: str, text: str) -> Iterator[_Token]:
    position = 0
    while position < len(segment):
        char = segment[position]
        if char == "*":
            yield _Star()
            position += 1
        elif char == "[":
            found = _RANGE.match(segment, position)
            if found is None:
                raise _malformed(
                    text, f"expected an index [a] or a range [a-b] of whole numbers at {segment[position:]!r}"
                )
            position = found.end()
            yield _range(segment, found, text)
        elif char == "{":
            end = segment.find("}", position)
            if end < 0:
                raise _malformed(
                    text, f"expected alternatives such as {{a,b}}, without dots, at {segment[position:]!r}"
                )
            yield _choice(segment[position + 1 : end], text)
            position = end + 1
        elif char in "]}":
            what = "range that no '['" if char == "]" else "choice that no '{'"
            raise _malformed(text, f"{char!r} closes a {what} opened")
        else:
            start = position
            while position < len(segment) and segment[position] not in "*[]{}":
                position += 1
            yield _Literal(segment[start:position])


def _choice(inside: str, text: str) -> _Choice:
    options = inside.split(",")
    if len(options) < 2 or not all(options):
        raise _malformed(text, f"expected at least two alternatives such as {{a,b}}, but got '{{{inside}}}'")
    if "{" in inside:
        raise _malformed(text, "an alternative holds no further choice; write all alternatives in one {a,b,c}")
    return _Choice(tuple(tuple(_tokens(option, text)) for option in options))


def _range(segment: str, found: re.Match[str], text: str) -> _Range:
    before, after = segment[: found.start()][-1:], segment[found.end() :][:1]
    if before == "]" or after == "[" or _is_digit(before) or _is_digit(after):
        raise _malformed(
            text, f"{found[0]} stands for a whole number, so no digit or second range may touch it; write e.g. [10-19]"
        )
    low, high = int(found[1]), int(found[2] or found[1])
    if low > high:
        raise _malformed(text, f"the range {found[0]} is empty; write [{high}-{low}]")
    return _Range(low, high)


def _ends(tokens: tuple[_Token, ...], name: str, starts: set[int]) -> set[int]:
    """Where in a name the tokens can end that begin at `starts`."""
    for token in tokens:
        if not starts:
            break
        starts = token.ends(name, starts)
    return starts


def _is_digit(char: str) -> bool:
    return char.isascii() and char.isdigit()


def _malformed(text: str, why: str) -> PolicyError:
    return PolicyError(f"malformed pattern {text!r}: {why}")
