"""``hyper-parallel check``: what a policy file does to a model, before anything is trained."""

import contextlib
import dataclasses
import json
import sys
from typing import Any

import click
from rich.console import Console

from hyper_parallel.cli.errors import user_errors
from hyper_parallel.cli.loading import load_model_and_inputs
from hyper_parallel.policy_file import PlanRow
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.resolve import resolve
from hyper_parallel.report.tables import table


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
            net, _ = load_model_and_inputs(model)
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
