"""``hyper-parallel check``: whether a policy file is right, and what it does to a model, before anything is trained."""

import dataclasses
import json
from typing import Any

import click
from rich.console import Console

from hyper_parallel.cli.errors import policy_errors, user_errors
from hyper_parallel.cli.options import json_option, model_of, model_option, stage_option, stages_option
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file import PlanRow, load_policy
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.resolve import resolve
from hyper_parallel.report.tables import table


@click.command()
@click.argument("policy", metavar="POLICY")
@model_option(required=False)
@stage_option
@stages_option
@json_option
def check(policy: str, model: str | None, stage: int | None, stages: int | None, as_json: bool) -> None:
    """Validate the policy file POLICY, and print what each cell of a model gets.

    Without a model only the file is looked at, and its rules are printed. MODULE:FACTORY names a function without
    arguments that returns a Cell, or (Cell, tuple of inputs). The module is looked for in the current directory too.
    Note that this imports the module and runs the factory: it executes their code. Nothing in POLICY is ever executed.

    The exit status is 2 if something is wrong. With --json, the mistakes of the file are then printed one by one, each
    with its place.
    """
    with policy_errors(as_json, policy_file=policy):
        if model is None:
            _check_file(policy, stage, stages, as_json)
        else:
            _check_model(policy, model, stage, stages, as_json)


def _check_file(policy: str, stage: int | None, stages: int | None, as_json: bool) -> None:
    with user_errors(but=PolicyError):
        plan = load_policy(policy, stage=stage, stages=stages)
    if as_json:
        click.echo(json.dumps({"policy_file": policy, "problems": [], "policy": plan.to_plain_values()}, indent=2))
    else:
        click.echo(plan.describe())


def _check_model(policy: str, model: str, stage: int | None, stages: int | None, as_json: bool) -> None:
    with user_errors(but=PolicyError):
        source = read_policy_file(policy)
        source.check_stages(stages)
        net, _ = model_of(model)
        resolution = resolve(source, net, source.file.swap, stage)
    if as_json:
        plan = {"policy_file": policy, "model": model, "problems": [], "rows": [_plain(row) for row in resolution.rows]}
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
