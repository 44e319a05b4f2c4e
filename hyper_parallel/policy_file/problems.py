"""What is wrong with a policy file, as a compiler says it: file, line, column, the text with a caret, what to do."""

from collections.abc import Iterable
from typing import NamedTuple

from hyper_parallel.core.errors import PolicyError

_MOST_PROBLEMS = 2000
_WIDEST = 100
_BEFORE = 60
"""Characters of a long line that are shown before the column."""


class Position(NamedTuple):
    """Where in a file something stands."""

    file: str
    """The file's name."""
    line: int
    """From 1."""
    column: int
    """In characters, from 1."""
    text: str
    """The whole line."""
    width: int
    """How many characters it has."""

    def excerpt(self) -> str:
        """The line with carets under what is wrong; of a long line only what is around it."""
        line = "".join(char if char.isprintable() else " " for char in self.text)
        start = max(0, min(self.column - 1 - _BEFORE, len(line) - _WIDEST))
        shown, before = line[start : start + _WIDEST].rstrip(), "..." if start else ""
        column = self.column - 1 - start + len(before)
        width = max(1, min(self.width, len(before + shown) - column))
        number = str(self.line)
        after = "..." if len(line) > start + _WIDEST else ""
        return f"{number:>6} | {before}{shown}{after}\n{'':>6} | {' ' * column}{'^' * width}"


class Problem(NamedTuple):
    """One thing that is wrong."""

    message: str
    """Where in the format, what stands there, and what was expected."""
    position: Position | None = None
    """None in a dict, which has no lines."""

    def __str__(self) -> str:
        if self.position is None:
            return self.message
        return f"{self.position.file}:{self.position.line}:{self.position.column}: {self.message}"


def policy_error(name: str, problems: Iterable[Problem]) -> PolicyError:
    """Make one error out of all that is wrong with a file.

    Args:
        name: The file, or what else the policy came from.
        problems: What is wrong, at least one thing; given twice it is told once.

    Returns:
        The error, to be raised. Its `problems` are in the order of the file.
    """
    found = sorted(
        dict.fromkeys(problems), key=lambda problem: problem.position[:3] if problem.position else ("", 0, 0)
    )
    parts = [_told(name, problem, alone=len(found) == 1) for problem in found[:_MOST_PROBLEMS]]
    if len(found) > 1:
        parts.insert(0, f"{name} has {len(found)} errors:")
    if len(found) > _MOST_PROBLEMS:
        parts.append(f"and {len(found) - _MOST_PROBLEMS} more")
    error = PolicyError("\n".join(parts))
    error.problems = tuple(found)
    return error


def _told(name: str, problem: Problem, alone: bool) -> str:
    if problem.position is not None:
        return f"{problem}\n{problem.position.excerpt()}"
    return f"{name}: {problem}" if alone else f"  {problem}"
