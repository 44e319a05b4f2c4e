"""The group of commands."""

import click

from hyper_parallel.cli.check import check
from hyper_parallel.cli.convert import convert
from hyper_parallel.cli.demo import demo
from hyper_parallel.cli.diff import diff
from hyper_parallel.cli.dryrun import dryrun
from hyper_parallel.cli.explain import explain
from hyper_parallel.cli.ops import ops
from hyper_parallel.cli.report import report
from hyper_parallel.cli.schema import schema
from hyper_parallel.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hyper-parallel", message="%(prog)s %(version)s")
def command() -> None:
    """Say what happens to the activations that backward needs: keep, recompute or swap to host."""


for each in (check, convert, demo, diff, dryrun, explain, ops, report, schema, verify):
    command.add_command(each)
