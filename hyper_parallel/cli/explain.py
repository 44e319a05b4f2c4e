"""``hyper-parallel explain``: why a cell or an operator gets what it gets, and what that means in bytes."""

import contextlib
import dataclasses
import json
import sys
from typing import Any

import click
from mindspore import nn
from rich.console import Console

from hyper_parallel.cli.errors import UserError, user_errors
from hyper_parallel.cli.loading import in_words
from hyper_parallel.cli.options import json_option, model_of, model_option, stage_option, worked_out
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.explain import (
    CellExplanation,
    OperatorExplanation,
    RuleSays,
    explain_cell,
    explain_operator,
    find_cell,
    is_operator,
    paths_of,
)
from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.names import PathNames, did_you_mean
from hyper_parallel.policy_file.resolve import Resolution
from hyper_parallel.policy_file.sizes import size_in_words
from hyper_parallel.report.activation_bytes import Bytes, Measured, measure_bytes
from hyper_parallel.report.tables import table
from ms_ops.catalogue import close_names, dispatch_names, why_refused

NO_BYTES = "bytes need inputs: let the factory return (Cell, tuple of inputs), and they are estimated from one forward"


@click.command()
@click.argument("policy", metavar="POLICY")
@click.argument("target", metavar="[CELL|OPERATOR]", required=False)
@model_option()
@stage_option
@json_option
def explain(policy: str, target: str | None, model: str, stage: int | None, as_json: bool) -> None:
    """Explain what the policy file POLICY does to a model, to one CELL of it, or to an OPERATOR.

    For a cell (a dotted path): which rule decided, which rules it overruled, what happens in forward and in backward.
    For an operator (its name, as `hyper-parallel ops` lists it): the same, for each region. Without either, a line per
    cell that is decided.

    MODULE:FACTORY names a function without arguments that returns a Cell, or (Cell, tuple of inputs). With inputs, one
    forward without policies is run, and the bytes that are kept, on host and replayed are estimated from it. Note that
    this executes the code of the module, the factory and the model.
    """
    with user_errors():
        net, inputs = model_of(model)
        source, resolution = worked_out(policy, net, stage)
        kind = _kind_of(target, resolution)
    besides = find_cell(resolution, target) if target is not None else None
    measured = _measured(model, net, inputs, source, resolution, besides)
    if kind == "cell":
        assert target is not None
        _explain_cell(policy, target, source, resolution, measured, as_json)
    elif kind == "operator":
        assert target is not None
        _explain_operator(policy, target, resolution, measured, as_json)
    else:
        _explain_all(policy, model, source, resolution, measured, as_json)


def _kind_of(target: str | None, resolution: Resolution) -> str:
    if target is None:
        return "all"
    if find_cell(resolution, target) is not None:
        return "cell"
    if is_operator(target):
        return "operator"
    if why_refused(target):
        raise ValueError(f"operator {target!r}: {why_refused(target)}")
    close = PathNames(paths_of(resolution)).closest(target)
    offer = f"; the net has `{close}`" if close else did_you_mean(target, close_names(target))
    raise ValueError(f"{target!r} is neither a cell of the model nor an operator{offer}")


def _measured(
    model: str,
    net: nn.Cell,
    inputs: tuple[Any, ...],
    source: Source,
    resolution: Resolution,
    besides: Node | None,
) -> Measured | None:
    if not inputs:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return measure_bytes(net, inputs, resolution.regions, source.file.swap, besides)
    except (Exception, SystemExit) as error:  # whatever the user's model raises
        raise UserError(f"--model {model}: the forward with the factory's inputs raised {in_words(error)}") from error


# ---- one cell


def _explain_cell(
    policy: str, path: str, source: Source, resolution: Resolution, measured: Measured | None, as_json: bool
) -> None:
    node = find_cell(resolution, path)
    assert node is not None
    found = explain_cell(source, resolution, node)
    decision = resolution.regions.of(node)
    figures = measured.by_cell[decision.node.path if decision is not None else path] if measured is not None else None
    if as_json:
        _echo({"policy_file": policy, "cell": dataclasses.asdict(found), "bytes": _plain(figures)})
        return
    click.echo("\n".join(_cell_lines(found)))
    click.echo(f"  bytes      {_bytes_line(figures)}")


def _cell_lines(found: CellExplanation) -> list[str]:
    lines = [f"{found.path or '(the net)'} ({found.class_name})"]
    lines.append(f"  policy     {found.policy or 'none of its own'}")
    lines += [f"  decided    {_rule(rule)}" for rule in found.decided_by]
    if not found.decided_by or len(found.decided_by) < len(found.why.split(", ")):
        lines.append(f"  decided    {found.why}")
    lines += [f"  overruled  {_rule(rule)}" for rule in found.overruled]
    if found.region:
        lines.append(f"  inside     {found.region}")
    return [*lines, f"  forward    {found.forward}", f"  backward   {found.backward}"]


def _rule(rule: RuleSays) -> str:
    return f"{rule.label} ({rule.cells}): {rule.says}{f'  [{rule.where}]' if rule.where else ''}"


def _bytes_line(figures: Bytes | None) -> str:
    if figures is None:
        return NO_BYTES
    return (
        f"kept {size_in_words(figures.kept)}, on host {size_in_words(figures.host)}, "
        f"replayed {size_in_words(figures.replayed)} (estimated from one forward)"
    )


# ---- one operator


def _explain_operator(policy: str, name: str, resolution: Resolution, measured: Measured | None, as_json: bool) -> None:
    found = explain_operator(resolution, name)
    ran = [each for each in measured.operators if each.dispatch_name in dispatch_names(name)] if measured else []
    if measured is not None:
        found = [each for each in found if any(one.in_region and one.region == each.region for one in ran)]
    if as_json:
        regions = [
            dataclasses.asdict(each)
            | {"measured": [dataclasses.asdict(one) for one in ran if one.in_region and one.region == each.region]}
            for each in found
        ]
        outside = [dataclasses.asdict(one) for one in ran if not one.in_region]
        is_measured = measured is not None
        _echo(
            {"policy_file": policy, "operator": name, "measured": is_measured, "regions": regions, "outside": outside}
        )
        return
    columns = [(heading, "left") for heading in ("region", "why", "decided by", "forward", "backward", "results")]
    rows = [
        (each.region or "(the net)", each.why, each.says, each.forward, each.backward, _fates(each, ran))
        for each in found
    ]
    for one in ran:
        if not one.in_region:
            rows.append(("(no region)", "", "", "runs as without the file", "nothing runs again", _fate(one)))
    console = Console()
    if rows:
        console.print(table(f"{name} under {policy}", columns, rows))
    elif measured is not None:
        click.echo(f"the model doesn't run {name}")
    else:
        click.echo(f"{policy} decides about no cell, so that {name} runs as without the file")
    if measured is None:
        click.echo(f"whether a region runs {name} isn't known: " + NO_BYTES)


def _fates(found: OperatorExplanation, ran: list[Any]) -> str:
    return "; ".join(_fate(one) for one in ran if one.in_region and one.region == found.region)


def _fate(one: Any) -> str:
    calls = f"{one.calls} call{'s' if one.calls > 1 else ''}"
    return f"{one.dispatch_name}: {calls}, {size_in_words(one.output_bytes)} {one.fate}"


# ---- all cells


def _explain_all(
    policy: str, model: str, source: Source, resolution: Resolution, measured: Measured | None, as_json: bool
) -> None:
    decisions = resolution.regions.decisions
    found = [explain_cell(source, resolution, decision.node) for decision in decisions]
    figures = measured.by_cell if measured is not None else {}
    if as_json:
        cells = [dataclasses.asdict(each) | {"bytes": _plain(figures.get(each.path))} for each in found]
        whole = {"plan": _plain(measured.under_plan), "plain": measured.plain_bytes} if measured is not None else None
        _echo({"policy_file": policy, "model": model, "cells": cells, "bytes": whole, "notes": resolution.notes})
        return
    columns = [("cell", "left"), ("policy", "left"), ("why", "left"), ("overruled", "left")]
    columns += [("kept", "right"), ("on host", "right"), ("replayed", "right")] if measured is not None else []
    rows = []
    for each in found:
        row = [each.path or "(the net)", each.policy, each.why, ", ".join(rule.label for rule in each.overruled)]
        rows.append(row + (_columns(figures[each.path]) if measured is not None else []))
    console = Console()
    console.print(table(f"{policy} on {model}", columns, rows, _caption(measured)))
    for note in resolution.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _columns(figures: Bytes) -> list[str]:
    return [size_in_words(size) for size in (figures.kept, figures.host, figures.replayed)]


def _caption(measured: Measured | None) -> str:
    if measured is None:
        return NO_BYTES
    whole = measured.under_plan
    return (
        f"the net keeps {size_in_words(measured.plain_bytes)} for backward without policies; with them "
        f"{size_in_words(whole.kept)} are kept, {size_in_words(whole.host)} on host, {size_in_words(whole.replayed)} "
        "replayed\nestimated from one forward; what several tensors share counts once, and in every cell that has it"
    )


def _plain(figures: Bytes | None) -> dict[str, int] | None:
    return None if figures is None else dataclasses.asdict(figures)


def _echo(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, indent=2))
