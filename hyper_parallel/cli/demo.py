"""``hyper-parallel demo``: what the policies do to a small GPT on real text."""

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click
from pydantic import ValidationError
from rich.console import Console

from hyper_parallel.cli.demo_progress import DemoProgress
from hyper_parallel.cli.errors import UserError, user_errors
from hyper_parallel.demo.model import build_model
from hyper_parallel.demo.modes import MODES, PLAIN
from hyper_parallel.demo.results import ModeResult, Row, Task, compare, summary
from hyper_parallel.demo.runner import WorkerFailedError, run_task, versions
from hyper_parallel.demo.settings import DemoSettings, describe_errors
from hyper_parallel.policy_file import load_policy
from hyper_parallel.report.tables import megabytes, table, yes_no

_DEFAULTS = DemoSettings()


@click.command()
@click.option("--layers", type=int, default=_DEFAULTS.layers, show_default=True, help="Blocks in the net.")
@click.option("--dim", type=int, default=_DEFAULTS.dim, show_default=True, help="Width; a multiple of 4 (the heads).")
@click.option("--batch", type=int, default=_DEFAULTS.batch, show_default=True, help="Sequences in a step.")
@click.option("--seq", type=int, default=_DEFAULTS.seq, show_default=True, help="Characters in a sequence.")
@click.option("--steps", type=int, default=_DEFAULTS.steps, show_default=True, help="Optimizer steps.")
@click.option("--modes", default=",".join(MODES), show_default=True, help="Which modes, separated by commas.")
@click.option("--policy", metavar="FILE", help="A policy file to run as one more mode.")
@click.option("--out", default="demo_out", show_default=True, metavar="DIR", help="Where the picture and figures go.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def demo(
    layers: int, dim: int, batch: int, seq: int, steps: int, modes: str, policy: str | None, out: str, as_json: bool
) -> None:
    """Train a small GPT on the source of Python's standard library, once per mode.

    Each mode runs in a fresh process and is compared with plain training: numbers, time and memory. The exit status is
    1 if a mode's losses and weights aren't bit-identical to plain training's.
    """
    settings = _settings(layers=layers, dim=dim, batch=batch, seq=seq, steps=steps)
    tasks = _tasks(settings, modes, policy)
    if find_spec("matplotlib") is None:
        raise UserError("the demo's picture needs matplotlib; install with: pip install 'hyper-parallel[demo]'")
    folder = _writable_folder(out)

    console = Console(stderr=True)
    if PLAIN not in _names(modes):
        console.print(f"{PLAIN} runs too: the other modes are compared with it")
    results = _run(tasks, console)
    rows = compare(results, reference=results[0])
    picture, figures = folder / "memory.png", folder / "results.json"
    _write(results, rows, settings, picture, figures)

    if as_json:
        click.echo(json.dumps(summary(settings, rows, versions()), indent=2))
    else:
        _print_table(settings, rows)
        Console(soft_wrap=True).print(f"picture: {picture}\nfigures: {figures}", highlight=False)
    if not all(row.passed for row in rows):
        failed = ", ".join(row.mode for row in rows if not row.passed)
        click.echo(f"not bit-identical to {PLAIN}, or something was left on host: {failed}", err=True)
        raise SystemExit(1)


def _settings(**values: int) -> DemoSettings:
    try:
        return DemoSettings(**values)
    except ValidationError as error:
        raise UserError(describe_errors(error)) from error


def _names(modes: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip()))


def _tasks(settings: DemoSettings, modes: str, policy: str | None) -> list[Task]:
    """Give the tasks in the order in which they run: plain training first, since the others are compared with it."""
    names = _names(modes)
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise UserError(f"unknown mode {', '.join(map(repr, unknown))}; the modes are {', '.join(MODES)}")
    if not names and policy is None:
        raise UserError(f"--modes names no mode; the modes are {', '.join(MODES)}")
    tasks = [Task(mode=name, settings=settings) for name in [PLAIN, *(name for name in names if name != PLAIN)]]
    if policy is not None:
        with user_errors():
            load_policy(policy).resolve(build_model(settings)[0])
        path = Path(policy).resolve()
        tasks.append(Task(mode=f"policy:{path.name}", policy=path, settings=settings))
    return tasks


def _writable_folder(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: can't write there: {error.strerror}") from error
    return folder


def _run(tasks: list[Task], console: Console) -> list[ModeResult]:
    results = []
    with DemoProgress(console, [task.mode for task in tasks], tasks[0].settings.steps) as progress:
        for task in tasks:
            with progress.mode(task.mode) as on_step:
                try:
                    results.append(run_task(task, on_step))
                except ValueError as error:
                    raise UserError(str(error)) from error
                except WorkerFailedError as error:
                    raise click.ClickException(str(error)) from error
    return results


def _write(results: list[ModeResult], rows: list[Row], settings: DemoSettings, picture: Path, figures: Path) -> None:
    # matplotlib takes a second to import, which a wrong option shouldn't cost.
    from hyper_parallel.report.memory_plot import Curve, plot_memory

    details = summary(settings, rows, versions()) | {"details": [result.model_dump() for result in results]}
    figures.write_text(json.dumps(details, indent=1), "utf-8")
    curves = [
        Curve(result.mode, result.samples, result.step_starts, result.step_seconds, result.peak_growth_bytes)
        for result in results
    ]
    subtitle = (
        f"GPT with {settings.layers} blocks of width {settings.dim}, "
        f"{settings.batch} sequences of {settings.seq} characters, {settings.steps} Adam steps"
    )
    plot_memory(curves, subtitle, picture)


def _print_table(settings: DemoSettings, rows: list[Row]) -> None:
    columns = [
        ("mode", "left"),
        ("last loss", "right"),
        ("identical", "left"),
        ("time", "right"),
        ("peak MB", "right"),
        (f"% {PLAIN}", "right"),
        ("host MB", "right"),
    ]
    cells = [
        (
            row.mode,
            f"{row.final_loss:.6f}",
            yes_no(row.bit_identical),
            f"{row.step_ratio:.2f}x",
            megabytes(row.peak_growth_bytes),
            f"{row.peak_ratio:.0%}",
            megabytes(row.offloaded_bytes) if row.offloaded_bytes else "-",
        )
        for row in rows
    ]
    title = f"{settings.layers} blocks of width {settings.dim}, {settings.batch} x {settings.seq} characters"
    caption = (
        f"identical: every loss and the final weights are those of {PLAIN}, bit for bit\n"
        f"time: median step, as a multiple of {PLAIN}'s (other load on the machine shows)\n"
        "peak: growth of resident memory over its value before the first step\n"
        "host: offloaded there, over all steps (MB are 2**20 bytes)"
    )
    Console().print(table(f"{title}, {settings.steps} steps", columns, cells, caption))
