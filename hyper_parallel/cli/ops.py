"""``hyper-parallel ops``: which operators a model really runs, and what each gives and takes."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable

import click
import mindspore as ms
from rich.console import Console

from hyper_parallel.cli.errors import UserError
from hyper_parallel.cli.loading import in_words, load_model_and_inputs
from hyper_parallel.cli.options import json_option, model_option
from hyper_parallel.report.operators import OperatorRow, measure_operators
from hyper_parallel.report.tables import table

_ORDERS: dict[str, Callable[[OperatorRow], float]] = {
    "bytes": lambda row: row.output_bytes,
    "time": lambda row: row.seconds,
    "count": lambda row: row.calls,
}
_CELLS_SHOWN = 3


@click.command()
@model_option()
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Forwards that are timed.")
@click.option("--sort", type=click.Choice(list(_ORDERS)), default="bytes", show_default=True, help="Largest first.")
@json_option
def ops(model: str, steps: int, sort: str, as_json: bool) -> None:
    """List the operators that a forward of a model runs, by the names that a policy's `ops` takes.

    MODULE:FACTORY names a function without arguments that returns (Cell, tuple of inputs), or a Cell that is called
    without inputs. The module is looked for in the current directory too. Note that this imports the module, runs the
    factory and the model: it executes their code.
    """
    ms.runtime.launch_blocking()  # before the model is made: see measure_operators
    # What the model prints must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        net, inputs = load_model_and_inputs(model)
        try:
            rows = measure_operators(net, inputs, steps)
        except (Exception, SystemExit) as error:  # whatever the user's model raises
            given = f"{len(inputs)} input{'' if len(inputs) == 1 else 's'}"
            raise UserError(
                f"--model {model}: the forward with the factory's {given} raised {in_words(error)}"
                + ("" if inputs else "; a factory gives inputs by returning (Cell, tuple of inputs)")
            ) from error
    rows.sort(key=lambda row: (-_ORDERS[sort](row), row.name, row.dispatch_name))
    if as_json:
        found = {"model": model, "steps": steps, "sort": sort, "rows": [dataclasses.asdict(row) for row in rows]}
        click.echo(json.dumps(found, indent=2))
        return
    columns = [("name", "left"), ("dispatched as", "left"), ("calls", "right"), ("output bytes", "right")]
    cells = [
        (row.name, row.dispatch_name, str(row.calls), f"{row.output_bytes:,}", f"{row.seconds * 1e3:.3f}", _where(row))
        for row in rows
    ]
    caption = (
        "output bytes: of all its results in one forward; views of an argument count as none\n"
        f"ms: all its calls, each waited for; fastest of {steps} forwards (other load on the machine shows)"
    )
    Console().print(table(f"operators of {model}", [*columns, ("ms", "right"), ("cells", "left")], cells, caption))


def _where(row: OperatorRow) -> str:
    shown = ", ".join(path or "(the net)" for path in row.cells[:_CELLS_SHOWN])
    rest = len(row.cells) - _CELLS_SHOWN
    return f"{shown}, {rest} more" if rest > 0 else shown
