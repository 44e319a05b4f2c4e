"""One policy file, or one dict: where its content comes from, and where in it something stands."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import ValidationError

from hyper_parallel.policy_file.patterns import REGEX
from hyper_parallel.policy_file.problems import Position, Problem, policy_error
from hyper_parallel.policy_file.regular import too_many
from hyper_parallel.policy_file.rule import OFFERS
from hyper_parallel.policy_file.schema import PolicyFile
from hyper_parallel.policy_file.wording import Loc, brief, in_words, is_consequence, place_of, sentence
from hyper_parallel.policy_file.yaml_text import YamlText

DICT_SOURCE = "dict"

_MOST_BYTES = 2**20
_MOST_DETAILS = 1000
_MOST_OFFERS = 20
"""Unknown operators for which the closest names are looked up: comparing names takes time."""

_path = Repr()
_path.maxstring = 400


class Document:
    """One policy file, or one dict.

    Args:
        content: Plain values.
        name: Short name for messages: the file's name, or `dict`.
        path: Where the file is; None for a dict.
        text: The text of the file, with the places of the values in it.
    """

    def __init__(self, content: Any, name: str, path: Path | None = None, text: YamlText | None = None) -> None:
        self.content = content
        self.name = name
        self.path = path
        self._text = text

    def problem(self, loc: Loc, message: str, of_key: bool = False) -> Problem:
        """Something that is wrong at a place.

        Args:
            loc: The place.
            message: What is wrong; begins with the place in words.
            of_key: The key is wrong, not its value.
        """
        return Problem(message, self._text.position(loc, of_key) if self._text is not None else None)

    def wrong(self, loc: Loc, what: str) -> Problem:
        """The same, with the place put into words."""
        return self.problem(loc, f"{in_words(loc)}: {what}")

    def validated(self) -> tuple[PolicyFile | None, list[Problem]]:
        """Check the content.

        Returns:
            The file, or None if it has mistakes; and all of these.
        """
        problems = list(self._text.problems) if self._text is not None else []
        if too_many(text.removeprefix(REGEX) for text in _texts(self.content) if text.startswith(REGEX)):
            return None, [*problems, Problem("it has too many regular expressions; use layers, [a-b] or {a,b}")]
        try:
            file = PolicyFile.model_validate(self.content, context={OFFERS: _MOST_OFFERS})
        except ValidationError as failure:
            told = {problem.position for problem in problems} - {None}
            details = failure.errors(include_url=False)
            if len(details) > _MOST_DETAILS:
                problems.append(Problem(f"{self.name} has {len(details)} mistakes; here are the first {_MOST_DETAILS}"))
            for detail in details[:_MOST_DETAILS]:
                if is_consequence(detail):
                    continue
                loc, of_key = place_of(detail)
                problem = self.problem(loc, sentence(detail), of_key)
                if problem.position not in told:
                    problems.append(problem)
            return None, problems
        return (None if problems else file), problems


def document_of(path: Path, shown: str | None = None) -> Document:
    """Read a YAML file.

    Args:
        path: Where it is.
        shown: How messages name it; by default the last part of its path.

    Returns:
        Its content, not checked yet.

    Raises:
        PolicyError: It can't be read, is no text, or no YAML.
    """
    name = shown or path.name
    text = YamlText(text_of(path, name), name)
    if not isinstance(text.content, dict):
        what = "it is empty" if text.content is None else f"it holds {brief(text.content)}"
        raise policy_error(name, [Problem(f"it must be a mapping that begins with `version: 1`, but {what}")])
    return Document(text.content, name, path, text)


def text_of(path: Path, name: str) -> str:
    """Read a text file that is no larger than a policy file may be.

    Args:
        path: Where it is.
        name: How messages name it.

    Returns:
        Its text.

    Raises:
        PolicyError: It can't be read, or is no text.
    """

    def refused(why: str) -> Exception:
        return policy_error(f"policy file {_path.repr(str(path))}", [Problem(why)])

    try:
        status = os.stat(path)
        is_regular = stat.S_ISREG(status.st_mode)
        data = _first_bytes(path) if is_regular else b""
    except FileNotFoundError:
        raise refused("it doesn't exist (a str is a path, not YAML)") from None
    except (OSError, ValueError) as error:
        raise refused(f"it can't be read: {error.strerror if isinstance(error, OSError) else error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise refused("it is a folder; give the path of a YAML file")
    if not is_regular:
        raise refused("it is no regular file (a device, pipe or socket); give the path of a YAML file")
    if len(data) > _MOST_BYTES:
        size = f"{max(status.st_size, len(data)) / 2**20:.1f} MiB"
        raise refused(f"it has {size}, but a policy file has at most {_MOST_BYTES // 2**20} MiB; is it another file?")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise policy_error(name, [Problem("it is UTF-16, by its byte-order mark; save it as UTF-8")])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig").split("\n")
        text = before[-1] + data[error.start :].partition(b"\n")[0].decode("utf-8", "replace")
        at = Position(name, len(before), len(before[-1]) + 1, text, 1)
        raise policy_error(name, [Problem(f"not UTF-8 (byte {data[error.start]:#04x})", at)]) from None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES + 1)


def _texts(content: Any) -> Iterator[str]:
    """Walk all strings in nested dicts and lists, which may be shared or contain themselves."""
    rest, seen = [content], set()
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            rest.extend(value.values() if isinstance(value, dict) else value)
