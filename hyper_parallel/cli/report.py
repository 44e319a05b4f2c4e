"""``hyper-parallel report``: a page of what was swapped, from a trace."""

import json
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from hyper_parallel.cli.errors import UserError, user_errors
from hyper_parallel.report.cell_table import swap_table
from hyper_parallel.report.run import read_run
from hyper_parallel.report.run_summary import RunSummary, summarize
from hyper_parallel.report.tables import megabytes, table


@click.command()
@click.argument("run", metavar="RUN")
@click.option("-o", "--out", default="report.html", show_default=True, metavar="FILE", help="Where the page goes.")
@click.option("--between", nargs=2, type=float, metavar="BEGIN END", help="Only these seconds of the trace.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def report(run: str, out: str, between: tuple[float, float] | None, as_json: bool) -> None:
    """Make a page of RUN, the file that SwapManager().trace(FILE) wrote.

    The page shows what was computed, copied and waited for, the memory of swapped tensors against their limits, the
    largest tensors, and what was swapped and left alone in each cell. It is one HTML file that needs no network.
    """
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(f"the page needs {' and '.join(missing)}; install with: pip install 'hyper-parallel[report]'")
    with user_errors():
        found = read_run(run)
        if between is not None:
            found = found.between(*between)
    summary = summarize(found)

    # matplotlib takes a second to import, which a wrong file shouldn't cost
    from hyper_parallel.report.page import page

    text = page(found, summary, Path(run).name)
    try:
        Path(out).write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: can't be written: {error.strerror}") from error
    if as_json:
        click.echo(json.dumps({"run": run, **summary.as_json()}, indent=2))
        return
    console = Console()
    console.print(_places(summary, Path(run).name))
    if found.stats is not None and found.stats.cells:
        console.print(swap_table(found.stats))
    Console(soft_wrap=True).print(f"page: {out}", highlight=False, markup=False)


def _places(summary: RunSummary, name: str) -> object:
    columns = [("place", "left"), ("", "left"), ("peak MB", "right"), ("limit MB", "right")]
    rows = [
        (
            row.place,
            row.meaning,
            megabytes(row.peak_bytes),
            "none" if row.limit_bytes is None else megabytes(row.limit_bytes),
        )
        for row in summary.places
    ]
    share = summary.wait_seconds / summary.seconds if summary.seconds else 0
    caption = (
        f"to host: {megabytes(summary.offloads.bytes)} MB in {summary.offloads.count} copies, back: "
        f"{megabytes(summary.loads.bytes)} MB in {summary.loads.count}\n"
        f"waits: {summary.wait_seconds * 1e3:.1f} ms, {share:.1%} of the time"
    )
    return table(f"{name}, {summary.seconds:.3f} s", columns, rows, caption)
