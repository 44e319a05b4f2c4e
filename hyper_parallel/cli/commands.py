"""The group of commands."""

import click

from hyper_parallel.cli.check import check
from hyper_parallel.cli.demo import demo
from hyper_parallel.cli.ops import ops
from hyper_parallel.cli.report import report


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hyper-parallel", message="%(prog)s %(version)s")
def command() -> None:
    """Say what happens to the activations that backward needs: keep, recompute or swap to host."""


command.add_command(check)
command.add_command(demo)
command.add_command(ops)
command.add_command(report)
