"""``hyper-parallel verify``: what MindSpore's compiler makes of a policy file."""

import contextlib
import json
import sys

import click
import mindspore as ms
from rich.console import Console

from hyper_parallel.cli.errors import UserError, policy_errors, user_errors
from hyper_parallel.cli.loading import in_words
from hyper_parallel.cli.options import json_option, model_of, model_option, stage_option
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.graph.report import HEADINGS, GraphReport
from hyper_parallel.policy_file import apply_policy, load_policy, verify_policy
from hyper_parallel.report.tables import table
from ms_ops.graph_compile import JIT_LEVELS


@click.command()
@model_option()
@click.option("--policy", required=True, metavar="FILE", help="The policy file.")
@stage_option
@click.option("--jit-level", metavar="|".join(JIT_LEVELS), help="MindSpore's level of optimisation.")
@click.option("--jit", is_flag=True, help="As a function under ms.jit in PyNative mode, not in GRAPH_MODE.")
@json_option
def verify(model: str, policy: str, stage: int | None, jit_level: str | None, jit: bool, as_json: bool) -> None:
    """Apply a policy file to a model in graph mode, compile it, and print what became of each cell.

    MODULE:FACTORY names a function without arguments that returns (Cell, tuple of inputs). The module is looked for in
    the current directory too. Note that this imports the module and runs the factory: it executes their code. The model
    is compiled with its gradient, and doesn't run.

    The exit status is 1 if something isn't as planned, and 2 if something is wrong.
    """
    with policy_errors(as_json, policy_file=policy, model=model):
        report = _verified(model, policy, stage, jit_level, jit)
    if as_json:
        click.echo(json.dumps({"policy_file": policy, "model": model, **report.as_json()}, indent=2))
    else:
        _show(report, f"{policy} on {model}")
    if not report.honoured:
        raise SystemExit(1)


def _verified(model: str, policy: str, stage: int | None, jit_level: str | None, jit: bool) -> GraphReport:
    with user_errors(but=PolicyError):
        plan = load_policy(policy, stage=stage)
        net, inputs = model_of(model)
        if not inputs:
            raise UserError(f"--model {model}: verifying needs inputs; let the factory return (Cell, tuple of inputs)")
    # what is compiled must not write into the JSON
    with contextlib.redirect_stdout(sys.stderr):
        before = ms.get_context("mode")
        ms.set_context(mode=ms.PYNATIVE_MODE if jit else ms.GRAPH_MODE)
        try:
            plan = apply_policy(net, plan, mode="graph")
            return verify_policy(net, *inputs, jit_level=jit_level)
        except PolicyError:
            raise
        except Exception as error:  # whatever MindSpore's compiler raises
            raise UserError(f"--model {model}: compiling it raised {in_words(error)}") from error
        finally:
            ms.set_context(mode=before)


def _show(report: GraphReport, title: str) -> None:
    columns = [(heading, "left") for heading in HEADINGS]
    console = Console()
    console.print(table(title, columns, report.lines()))
    for line in report.totals():
        console.print(line, markup=False, highlight=False)
