"""``hyper-parallel check``: what a policy file does to a model, before anything is trained."""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from typing import Any

import click
from mindspore import nn
from rich.console import Console

from hyper_parallel.cli.errors import UserError, user_errors
from hyper_parallel.policy_file import PlanRow
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.resolve import resolve
from hyper_parallel.report.tables import table


def load_model(reference: str) -> nn.Cell:
    """Import a factory and call it.

    Args:
        reference: ``module:factory``; the factory takes no arguments and returns a Cell, or (Cell, tuple of inputs).

    Returns:
        The Cell.

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
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        raise UserError(f"--model {reference}: can't import {module_name}: {_in_words(error)}") from error
    factory: Any = module
    for name in factory_name.split("."):
        if not hasattr(factory, name):
            raise UserError(f"--model {reference}: {module_name} has no {factory_name}")
        factory = getattr(factory, name)
    if not callable(factory):
        raise UserError(f"--model {reference}: {factory_name} must be callable, but is a {type(factory).__name__}")
    try:
        made = factory()
    except (Exception, SystemExit) as error:  # whatever the user's factory raises
        raise UserError(f"--model {reference}: {factory_name}() raised {_in_words(error)}") from error
    net = made[0] if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple) else made
    if not isinstance(net, nn.Cell):
        raise UserError(
            f"--model {reference}: {factory_name}() must return a Cell, or (Cell, tuple of inputs), "
            f"but returned {_kind(made)}"
        )
    return net


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


@click.command()
@click.argument("policy", metavar="POLICY")
@click.option("--model", required=True, metavar="MODULE:FACTORY", help="What makes the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check(policy: str, model: str, as_json: bool) -> None:
    """Validate the policy file POLICY against a model, and print what each cell gets.

    MODULE:FACTORY names a function without arguments that returns a Cell, or (Cell, tuple of inputs). The module is
    looked for in the current directory too. Note that this imports the module and runs the factory: it executes their
    code.
    """
    with user_errors():
        source = read_policy_file(policy)
        # What the module prints must not get into the JSON.
        with contextlib.redirect_stdout(sys.stderr):
            net = load_model(model)
        resolution = resolve(source, net, source.file.swap)
    if as_json:
        plan = {"policy_file": policy, "model": model, "rows": [_plain(row) for row in resolution.rows]}
        click.echo(json.dumps(plan | {"notes": resolution.notes}, indent=2))
        return
    columns = [(heading, "left") for heading in ("cell", "class", "policy", "why", "what it keeps")]
    cells = [(row.path or "(the net)", row.class_name, row.policy_text, row.why, row.keeps) for row in resolution.rows]
    console = Console()
    console.print(table(f"{policy} on {model}", columns, cells))
    for note in resolution.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _plain(row: PlanRow) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"policy": row.policy.name.lower()}
