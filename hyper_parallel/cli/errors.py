"""How the command's errors look: one message on standard error, no traceback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import click

from hyper_parallel.core.errors import ActivationMemoryError, PolicyError


class UserError(click.ClickException):
    """A mistake in what the user gave: one message on standard error, exit status 2."""

    exit_code = 2


@contextmanager
def user_errors(but: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors about what the user gave into a `UserError`.

    Args:
        but: Errors that are left as they are, for the caller.

    Raises:
        UserError: The body raised an ActivationMemoryError, ValueError or TypeError.
    """
    try:
        yield
    except but:
        raise
    except (ActivationMemoryError, ValueError, TypeError) as error:
        raise UserError(str(error) or type(error).__name__) from error


@contextmanager
def policy_errors(as_json: bool, **named: str) -> Iterator[None]:
    """Show the mistakes of a policy file: as a `UserError`, or as JSON on standard output, each with its place.

    Args:
        as_json: Whether the command prints JSON.
        **named: What the JSON says besides.

    Raises:
        UserError: The body raised a PolicyError.
        SystemExit: The same, with status 2, where JSON is printed.
    """
    try:
        yield
    except PolicyError as error:
        if as_json and error.problems:
            problems = [
                {"message": problem.message} | (problem.position._asdict() if problem.position is not None else {})
                for problem in error.problems
            ]
            click.echo(json.dumps({**named, "problems": problems}, indent=2))
            raise SystemExit(UserError.exit_code) from error
        raise UserError(str(error)) from error
