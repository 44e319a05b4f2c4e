"""`CellPattern`: which cells of a net a rule names.

A pattern is a dotted path in which some segments are left open:

- `*` stands for one segment, or for any part of one: `layers.*`, `layers.*.norm*`;
- `**`, alone between dots, for any number of segments, none included: `**.mlp`, `layers.**.norm1`;
- `[a-b]` for an index from a to b, both included, and `[a]` for the index a: `layers.[0-5]`, `block[0-3].mlp`.

Both levels (segments in a path, characters in a segment) are matched by following the set of positions that can be
reached. No backtracking takes place, so no pattern is slow.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.core.errors import PolicyError

_RANGE = re.compile(r"\[([0-9]{1,9})(?:-([0-9]{1,9}))?\]")
# An index is a whole number, written in one way: neither the 1 nor the 2 of `block12` is one, nor is `02`.
_INDEX = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,8})(?![0-9])")
_ANY_DEPTH = "**"


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


_Token = _Literal | _Star | _Range


@dataclass(frozen=True)
class CellPattern:
    """A dotted path with open segments. `parse_pattern` makes one from its text."""

    text: str
    """The pattern as it was written."""
    segments: tuple[tuple[_Token, ...] | None, ...]
    """What each segment must look like; None stands for any number of segments."""

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
        names = path.split(".")
        reached = {0}
        for segment in self.segments:
            if segment is None:
                reached = set(range(min(reached), len(names) + 1))
            else:
                reached = {i + 1 for i in reached if i < len(names) and _segment_matches(segment, names[i])}
            if not reached:
                return False
        return len(names) in reached

    def __str__(self) -> str:
        return self.text


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
        >>> parse_pattern("layers.[5-2]")
        Traceback (most recent call last):
        ...
        hyper_parallel.core.errors.PolicyError: malformed pattern 'layers.[5-2]': the range [5-2] is empty; write [2-5]
    """
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
        elif char == "]":
            raise _malformed(text, "']' closes a range that no '[' opened")
        else:
            start = position
            while position < len(segment) and segment[position] not in "*[]":
                position += 1
            yield _Literal(segment[start:position])


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


def _segment_matches(tokens: tuple[_Token, ...], name: str) -> bool:
    reached = {0}
    for token in tokens:
        reached = token.ends(name, reached)
        if not reached:
            return False
    return len(name) in reached


def _is_digit(char: str) -> bool:
    return char.isascii() and char.isdigit()


def _malformed(text: str, why: str) -> PolicyError:
    return PolicyError(f"malformed pattern {text!r}: {why}")
