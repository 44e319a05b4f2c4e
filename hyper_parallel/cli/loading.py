"""``module:factory``: from what stands on the command line to a model and its inputs."""

import importlib
import os
import sys
from typing import Any

from mindspore import nn

from hyper_parallel.cli.errors import UserError


def load_model_and_inputs(reference: str) -> tuple[nn.Cell, tuple[Any, ...]]:
    """Import a factory and call it once.

    Args:
        reference: ``module:factory``; the factory takes no arguments and returns a Cell, or (Cell, tuple of inputs).

    Returns:
        The Cell and its inputs; no inputs if the factory returns a Cell.

    Raises:
        UserError: The reference is malformed, the module or factory can't be imported, the factory fails, or it
            returns something else.
    """
    module_name, colon, factory_name = reference.partition(":")
    if not (module_name and colon and factory_name):
        raise UserError(f"--model must be module:factory, for example my_package.model:build, but got {reference!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        raise UserError(f"--model {reference}: can't import {module_name}: {in_words(error)}") from error
    for name in factory_name.split("."):
        if not hasattr(factory, name):
            raise UserError(f"--model {reference}: {module_name} has no {factory_name}")
        factory = getattr(factory, name)
    if not callable(factory):
        raise UserError(f"--model {reference}: {factory_name} must be callable, but is a {type(factory).__name__}")
    try:
        made = factory()
    except (Exception, SystemExit) as error:  # whatever the user's factory raises
        raise UserError(f"--model {reference}: {factory_name}() raised {in_words(error)}") from error
    pair = made if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple) else (made, ())
    if not isinstance(pair[0], nn.Cell):
        raise UserError(
            f"--model {reference}: {factory_name}() must return a Cell, or (Cell, tuple of inputs), "
            f"but returned {_kind(made)}"
        )
    return pair


def in_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
