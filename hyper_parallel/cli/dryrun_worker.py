"""One mode of a dry run in a process of its own: ``python -m hyper_parallel.cli.dryrun_worker TASK RESULT``."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hyper_parallel.cli.errors import UserError
from hyper_parallel.cli.loading import in_words, load_model_and_inputs
from hyper_parallel.core.errors import ActivationMemoryError
from hyper_parallel.policy_file.plan import load_policy
from hyper_parallel.report.dry_run import DryRun, dry_run, keep_what_is_swapped
from ms_ops.dry_run import choose_simulated_ascend, parameters_without_values


def run(task: dict[str, Any]) -> DryRun:
    """Make the model, put it under its policy, and take the steps.

    Args:
        task: What to run.

    Returns:
        What it needed.

    Raises:
        UserError: The model can't be made, or its steps fail.
        ActivationMemoryError: The policy doesn't fit the model.
    """
    model = task["model"]
    with parameters_without_values(), tempfile.TemporaryDirectory() as folder:
        net, inputs = load_model_and_inputs(model)
        if not inputs:
            raise UserError(
                f"--model {model}: a dry run calls the model, so the factory must return (Cell, tuple of inputs), but "
                f"it returned a Cell alone"
            )
        for policy in task["fits"]:
            load_policy(policy).resolve(net)
        if task["policy"] is not None:
            keep_what_is_swapped(net, load_policy(task["policy"]))
        before = os.getcwd()
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        try:
            return dry_run(task["mode"], net, inputs, task["optimizer"])
        except ActivationMemoryError:
            raise
        except Exception as error:  # whatever the user's model raises
            raise UserError(f"--model {model}: a training step raised {in_words(error)}") from error
        finally:
            os.chdir(before)


def outcome(task: dict[str, Any]) -> dict[str, Any]:
    """What goes into the result file."""
    try:
        choose_simulated_ascend()
    except RuntimeError as error:
        return {"kind": "device", "error": in_words(error)}
    try:
        return run(task).as_json()
    except UserError as error:
        return {"kind": "user", "error": error.message}
    except (ActivationMemoryError, ValueError) as error:
        return {"kind": "user", "error": str(error)}


if __name__ == "__main__":
    task_file, result_file = sys.argv[1:]
    found = outcome(json.loads(Path(task_file).read_text("utf-8")))
    Path(result_file).write_text(json.dumps(found), "utf-8")
