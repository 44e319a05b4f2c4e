"""``hyper-parallel dryrun``: the peak of a training step on a simulated Ascend device, plain and under policies."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hyper_parallel._worker_environment import worker_environment
from hyper_parallel.cli.errors import UserError, user_errors
from hyper_parallel.cli.options import json_option, model_option
from hyper_parallel.policy_file.plan import load_policy
from hyper_parallel.report.dry_run import CANNOT_KNOW, OPTIMIZERS, PLAIN
from hyper_parallel.report.tables import megabytes, table
from ms_ops.dry_run import SIMULATION, is_emulated

WITHOUT_A_DEVICE = (
    "dryrun needs MindSpore's Ascend backend: the libraries of CANN (no device is needed), or the emulator of this "
    "repository. Start it there with:\n"
    "  bash scripts/ascend_emulator/run.sh hyper-parallel dryrun --model MODULE:FACTORY\n"
    "MindSpore says: "
)


@click.command()
@model_option()
@click.option("--policy", "policies", multiple=True, metavar="FILE", help="A policy file; may be given several times.")
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    default="adamw",
    show_default=True,
    help="What takes the step (of mindspore.mint.optim).",
)
@json_option
def dryrun(model: str, policies: tuple[str, ...], optimizer: str, as_json: bool) -> None:
    """Report the peak memory of training steps that are simulated, not computed.

    The model may be larger than this machine: operators are dispatched, and MindSpore counts the memory that an Ascend
    device would need. MODULE:FACTORY returns (Cell, tuple of inputs); the Cell's output is the loss. Parameters made
    with mindspore.common.initializer, as those of mindspore.nn are, take no memory here.

    What a policy swaps is counted as kept: a simulation copies nothing, and can't tell when memory would be free.
    """
    with user_errors():
        for policy in policies:
            load_policy(policy)
    files = [str(Path(policy).resolve()) for policy in policies]
    # Plain comes first, and it takes minutes for a large model: policies that don't fit are found there.
    rows = [_run({"mode": PLAIN, "model": model, "policy": None, "fits": files, "optimizer": optimizer})]
    rows += [
        _run({"mode": Path(file).stem, "model": model, "policy": file, "fits": [], "optimizer": optimizer})
        for file in files
    ]
    if as_json:
        found = {"model": model, "optimizer": optimizer, "emulated": is_emulated(), "rows": rows}
        click.echo(json.dumps({**found, "cannot_know": CANNOT_KNOW}, indent=2))
        return
    Console().print(_table(model, optimizer, rows))


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """Run one mode in a process of its own: what it chooses and needs is gone with it."""
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-dryrun-") as folder:
        task_file, result_file, log_file = (Path(folder, name) for name in ("task.json", "result.json", "log.txt"))
        task_file.write_text(json.dumps(task), "utf-8")
        command = [sys.executable, "-m", "hyper_parallel.cli.dryrun_worker", str(task_file), str(result_file)]
        # At a lower level MindSpore complains of CANN's Python packages, which nothing here needs.
        environment = worker_environment("4", **{SIMULATION: "1"})
        with log_file.open("w") as log:
            status = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if not result_file.exists():
            end = "\n".join(log_file.read_text("utf-8", "replace").splitlines()[-15:])
            raise click.ClickException(
                f"the dry run of {task['mode']} ended with exit status {status} and without a result; the end of its "
                f"output:\n{end}"
            )
        found: dict[str, Any] = json.loads(result_file.read_text("utf-8"))
    if "error" in found:
        raise UserError((WITHOUT_A_DEVICE if found["kind"] == "device" else "") + found["error"])
    return found


def _table(model: str, optimizer: str, rows: list[dict[str, Any]]) -> Any:
    columns = [
        ("mode", "left"),
        ("peak", "right"),
        (f"% {PLAIN}", "right"),
        ("reserved", "right"),
        ("standing", "right"),
        ("step", "right"),
        ("would swap", "right"),
    ]
    plain = rows[0]["peak_bytes"]
    cells = [
        (
            row["mode"],
            ("<= " if row["is_limit"] else "") + megabytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain:.0%}",
            megabytes(row["reserved_bytes"]),
            megabytes(row["standing_bytes"]),
            megabytes(row["step_bytes"]),
            megabytes(row["swapped_bytes"]) if row["is_limit"] else "-",
        )
        for row in rows
    ]
    source = "CANN is emulated: operators' workspaces are guesses" if is_emulated() else "operators' workspaces: CANN's"
    caption = "\n".join(
        [
            "in MB (2**20 bytes)",
            "reserved: what MindSpore's pool takes from the device for the peak",
            "standing: weights, the optimizer's state and inputs; step: what a step adds to it",
            f"simulated; {source}",
            "A dry run can't know",
            *(f"- {each}" for each in CANNOT_KNOW),
        ]
    )
    return table(f"{model}, {optimizer}", columns, cells, caption)
