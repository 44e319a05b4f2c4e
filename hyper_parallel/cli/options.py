"""Arguments and options that several commands have, and how they load what these name."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import click
from mindspore import nn

from hyper_parallel.cli.loading import load_model_and_inputs
from hyper_parallel.policy_file.loading import Source, read_policy_file
from hyper_parallel.policy_file.resolve import Resolution, resolve


def model_option(required: bool = True) -> Callable[..., Any]:
    """``--model``: the only way in which a command imports code."""
    return click.option(
        "--model",
        required=required,
        metavar="MODULE:FACTORY",
        help="What makes the model. Only this imports code: it executes the module and the factory. A policy file is "
        "never executed.",
    )


stage_option = click.option(
    "--stage", type=click.IntRange(min=0), metavar="K", help="Which stage of the pipeline the model is, from 0."
)
stages_option = click.option(
    "--stages", type=click.IntRange(min=1), metavar="P", help="How many stages the pipeline has, to check the file."
)
json_option: Callable[..., Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def model_of(reference: str) -> tuple[nn.Cell, tuple[Any, ...]]:
    """Make the model that `--model` names, with its inputs; what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        return load_model_and_inputs(reference)


def worked_out(policy: str, net: nn.Cell, stage: int | None) -> tuple[Source, Resolution]:
    """Read a policy file and work it out for a net.

    Args:
        policy: Path of the file.
        net: The net.
        stage: Which stage of the pipeline it is.

    Returns:
        The file, and what it means for the net.
    """
    source = read_policy_file(policy)
    return source, resolve(source, net, source.file.swap, stage)
