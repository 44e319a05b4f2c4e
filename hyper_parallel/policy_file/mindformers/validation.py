"""What several dialects check in the same way."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from hyper_parallel.policy_file.mindformers.targets import Reading
from hyper_parallel.policy_file.names import did_you_mean


def whole_number(value: Any) -> Any:
    """Refuse what Python takes for a number, and users don't."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number from 1 on")
    return value


def as_list(value: Any) -> Any:
    """Take one entry for a list of one, as MindFormers does."""
    return [value] if isinstance(value, (dict, str)) else value


def checked(model: type[BaseModel], block: Any, key: str, reading: Reading) -> Any:
    """Validate a block.

    Args:
        model: What it must look like.
        block: The block; None is an empty one.
        key: Its name, for messages.
        reading: Gets a problem for each mistake.

    Returns:
        The validated block; the model's defaults, if there are mistakes.
    """
    try:
        return model.model_validate({} if block is None else dict(block))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            loc = [part for part in detail["loc"] if not str(part).startswith(("list[", "dict["))]
            place = ", ".join([key, *(f"entry {part}" if isinstance(part, int) else str(part) for part in loc)])
            if detail["type"] == "extra_forbidden":
                unknown_key(reading, place, str(loc[-1]), model.model_fields if len(loc) == 1 else ())
            elif detail["type"] == "missing":
                reading.problem(place, "it is missing")
            else:
                reading.problem(place, f"got {detail['input']!r}: {detail['msg'].removeprefix('Value error, ')}")
        return model()


def unknown_key(reading: Reading, place: str, key: str, known: Iterable[str]) -> None:
    """Say that a key isn't known.

    Args:
        reading: Gets the problem.
        place: The key with its place, for messages.
        key: The key.
        known: Those that are.
    """
    known = tuple(known)
    offer = did_you_mean(key, known) or (f"; known are {', '.join(known)}" if known else "")
    reading.problem(place, f"unknown key{offer}")
