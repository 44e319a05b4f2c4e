"""``hyper-parallel diff``: what changes for a model from one policy file to another."""

import dataclasses
import json
from typing import Any

import click
from rich.console import Console

from hyper_parallel.cli.errors import user_errors
from hyper_parallel.cli.options import json_option, model_of, model_option, stage_option, worked_out
from hyper_parallel.policy_file import PlanRow
from hyper_parallel.policy_file.compare import Change, changes_between
from hyper_parallel.report.tables import table

DIFFERENT = 1
"""Exit status if the two differ."""


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@model_option()
@stage_option
@json_option
def diff(before: str, after: str, model: str, stage: int | None, as_json: bool) -> None:
    """Compare what the policy files A and B do to a model, cell by cell.

    Cells for which both say the same aren't listed, however the files say it. The exit status is 0 if nothing differs,
    1 if something does, 2 on an error. MODULE:FACTORY names a function without arguments that returns a Cell, or (Cell,
    tuple of inputs); note that it is executed.
    """
    with user_errors():
        net, _ = model_of(model)
        first, second = worked_out(before, net, stage), worked_out(after, net, stage)
    changes, settings = changes_between(first, second)
    if as_json:
        found = [
            dataclasses.asdict(change) | {"before": _plain(change.before), "after": _plain(change.after)}
            for change in changes
        ]
        click.echo(
            json.dumps({"a": before, "b": after, "model": model, "cells": found, "settings": settings}, indent=2)
        )
    elif not changes and not settings:
        click.echo(f"{before} and {after} do the same to {model}")
    else:
        _print(before, after, model, changes, settings)
    if changes or settings:
        raise SystemExit(DIFFERENT)


def _print(before: str, after: str, model: str, changes: list[Change], settings: list[str]) -> None:
    console = Console()
    if changes:
        columns = [(heading, "left") for heading in ("cell", f"A: {before}", f"B: {after}")]
        cells = [(change.path or "(the net)", _told(change.before), _told(change.after)) for change in changes]
        console.print(table(f"{before} and {after} on {model}", columns, cells))
    for line in settings:
        console.print(line, markup=False, highlight=False)


def _told(row: PlanRow | None) -> str:
    return f"{row.policy_text} ({row.why}): {row.keeps}" if row is not None else "nobody decides"


def _plain(row: PlanRow | None) -> dict[str, Any] | None:
    return None if row is None else dataclasses.asdict(row) | {"policy": row.policy.name.lower()}
