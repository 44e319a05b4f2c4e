"""``hyper-parallel convert``: MindFormers' settings to a policy file, and back where they fit."""

import json
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console

from hyper_parallel.cli.errors import UserError, policy_errors, user_errors
from hyper_parallel.cli.options import json_option
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.mindformers import Conversion, as_yaml, convert_mindformers, mindformers_of_policy
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges
from hyper_parallel.report.tables import table

_HEADINGS = ("stage", "layers", "cells", "policy", "from")


@click.command()
@click.argument("config", metavar="CONFIG")
@click.option("--layers", type=click.IntRange(min=1), help="Layers of the decoder, where the file doesn't say.")
@click.option("--stages", type=click.IntRange(min=1), help="Pipeline stages.")
@click.option("--interleave", type=click.IntRange(min=1), help="Chunks of a stage.")
@click.option("--offset", metavar="LIST", help="Layers of each stage beside even, such as '[0, 1, 1, 0]'.")
@click.option("--mtp", type=click.IntRange(min=0), help="Layers for multi-token prediction.")
@click.option("--legacy/--mcore", default=None, help="Which models; by default what use_legacy says.")
@click.option("--container", metavar="CELLS", help="Pattern of the cell that holds the layers [default: **.layers].")
@click.option("--operator", "operators", multiple=True, metavar="NAME=OPERATOR", help="What an attribute holds.")
@click.option("--cell", "cells", multiple=True, metavar="NAME", help="An attribute that is a cell, no operator.")
@click.option("--leave-out", "leave_out", multiple=True, metavar="KEY", help="Leave out a key that can't be converted.")
@click.option("--per-chunk/--per-stage", default=None, help="Entries of `stages` [default: chunks in PyNative mode].")
@click.option("--to", "target", type=click.Choice(["native", "mindformers"]), default="native", show_default=True)
@click.option("--dialect", type=click.Choice(["pynative", "graph"]), default="pynative", help="Of --to mindformers.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write; standard output by default.")
@json_option
def convert(
    config: str,
    layers: int | None,
    stages: int | None,
    interleave: int | None,
    offset: str | None,
    mtp: int | None,
    legacy: bool | None,
    container: str | None,
    operators: tuple[str, ...],
    cells: tuple[str, ...],
    leave_out: tuple[str, ...],
    per_chunk: bool | None,
    target: str,
    dialect: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Convert the recompute and swap settings of a MindFormers configuration to a policy file.

    CONFIG is MindFormers' YAML for graph mode (recompute_config, swap_config) or PyNative mode (recompute,
    recompute_comm, swap). What it says about layers and stages is read from it; options go before it. With --to
    mindformers CONFIG is a policy file, and MindFormers' blocks are written, for PyNative mode or --dialect graph.
    """
    if output is not None and output.resolve() == Path(config).resolve():
        raise UserError(f"-o {output} is the file that is converted; give another name")
    if target == "mindformers":
        if layers is None:
            raise UserError("--to mindformers needs --layers: MindFormers' settings name layers by number")
        with policy_errors(as_json, source=config), user_errors(but=PolicyError):
            blocks = mindformers_of_policy(
                config,
                layers=layers,
                dialect=dialect,
                stages=stages or 1,
                interleave=interleave or 1,
                offset=0 if offset is None else _list(offset),
                mtp=mtp or 0,
                container=(container or "layers").split(".")[-1],
            )
        _write_blocks(blocks, config, output, as_json)
        return
    named: dict[str, str | tuple[str, ...]] = dict.fromkeys(cells, ())
    named |= dict(_operator(text) for text in operators)
    with policy_errors(as_json, source=config), user_errors(but=PolicyError):
        done = convert_mindformers(
            config,
            layers=layers,
            stages=stages,
            interleave=interleave,
            offset=None if offset is None else _list(offset),
            mtp=mtp,
            legacy=legacy,
            container=container,
            operators=named,
            leave_out=leave_out,
            per_chunk=per_chunk,
        )
    if output is not None:
        _write(output, as_yaml(done))
    if as_json:
        click.echo(json.dumps(done.as_json(), indent=2))
    elif output is None:
        click.echo(as_yaml(done), nl=False)
    else:
        _show(done, output)


def _write_blocks(blocks: dict[str, Any], config: str, output: Path | None, as_json: bool) -> None:
    text = f"# From {Path(config).name}, by `hyper-parallel convert --to mindformers`.\n"
    text += yaml.safe_dump(blocks, sort_keys=False) if blocks else "{}\n"
    if output is not None:
        _write(output, text)
    if as_json:
        click.echo(json.dumps(blocks, indent=2))
    else:
        click.echo(text if output is None else f"written to {output}\n", nl=False)


def _show(done: Conversion, output: Path) -> None:
    console = Console()
    rows = [
        (str(rule.stage), in_ranges(rule.layers), rule.rule["cells"], _policy(rule.rule), rule.source)
        for rule in done.rules
    ]
    title = f"{done.source} ({done.dialect.value} mode) to {output}"
    console.print(table(title, [(heading, "left") for heading in _HEADINGS], rows))
    console.print("layer numbers are global: in every stage those of the whole net", markup=False, highlight=False)
    for note in done.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _policy(rule: Any) -> str:
    inputs = " + swapped inputs" if rule.get("swap_inputs") else ""
    ops = "".join(f"\n{name}: {policy}" for name, policy in rule.get("ops", {}).items())
    return rule["policy"] + inputs + ops


def _operator(text: str) -> tuple[str, str]:
    name, equals, operator = text.partition("=")
    if not (name and equals and operator):
        raise UserError(f"--operator must be NAME=OPERATOR, such as activation_func=SiLU, but got {text!r}")
    return name, operator


def _list(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"--offset must be a number or a list, such as '[0, 1, 1, 0]', but got {text!r}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"-o {path}: can't be written: {error.strerror}") from error
