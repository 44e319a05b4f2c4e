"""Regular expressions that can't be slow.

Note: [Why Rust's regular expressions]
A policy file may come from anywhere, and Python's `re` takes exponential time for `(a*)*b`. pydantic, which validates
the files, brings the `regex` crate of Rust along: it matches in time linear in the text, refuses what would need
backtracking (look-around, back references), and bounds the size of what it compiles. So no expression has to be timed,
and no further package is needed. What compiling costs is bounded here: the length of an expression, its repetitions,
and all expressions of a file together.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

_LONGEST = 250
_MOST_REPETITIONS = 100
_MOST_COST = 60_000
"""Of all expressions of a file together; a second or two of compiling."""
_CLASS_COST = 40
"""What a class such as `\\w` costs to compile, in characters."""
_CLASSES = re.compile(r"\\[wWdDsSbBpP]")
_COUNTS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


class RegularExpression:
    """An expression that is matched with whole texts.

    Args:
        text: The expression.

    Raises:
        ValueError: It is malformed, or larger than anybody would write it; the message says why.
    """

    def __init__(self, text: str) -> None:
        _refuse_the_large(text)
        if not _is_surely_balanced(text):
            _compiled(text)  # alone first: `a)|(b` would be well formed between the brackets
        self.matches: Callable[[str], bool] = _compiled(rf"\A(?:{text})\z").isinstance_python
        """Whether the expression describes a whole text."""


@lru_cache(maxsize=1024)
def regular_expression(text: str) -> RegularExpression:
    """The `RegularExpression` of a text, compiled once."""
    return RegularExpression(text)


def too_many(texts: Iterable[str]) -> bool:
    """Whether it would take seconds to compile these expressions.

    Args:
        texts: The expressions, before any is compiled.

    Returns:
        True if they are to be refused together.
    """
    cost = 0
    for text in set(texts):
        cost += len(text) + _CLASS_COST * len(_CLASSES.findall(text)) * min(_repetitions(text), _MOST_REPETITIONS)
    return cost > _MOST_COST


def _repetitions(text: str) -> int:
    product = 1
    for counts in _COUNTS.finditer(text[:_LONGEST]):
        product *= max([1, *(int(count[:9]) for count in counts.groups() if count)])
    return product


def _is_surely_balanced(text: str) -> bool:
    """Whether no bracket can close one that stands before the text; False where only compiling can tell."""
    if "[" in text or "(?" in text:
        return False
    depth = 0
    for char in re.sub(r"\\.", "", text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth < 0:
            return False
    return depth == 0


def _refuse_the_large(text: str) -> None:
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text)} characters, expected at most {_LONGEST}")
    repetitions = _repetitions(text)
    if repetitions > _MOST_REPETITIONS:
        raise ValueError(f"its counts {{n}} repeat a part {repetitions} times, expected at most {_MOST_REPETITIONS}")


def _compiled(text: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=text, strict=True))
    except SchemaError as error:
        lines = str(error).splitlines()
        why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1].strip())
        raise ValueError(why.removeprefix("SchemaError: ")) from None
