"""How the command's errors look: one message on standard error, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from hyper_parallel.core.errors import ActivationMemoryError


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
