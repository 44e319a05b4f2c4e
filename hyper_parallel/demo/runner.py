"""Runs the demo's modes, each in a fresh process, so that no mode sees the memory of another one."""

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from hyper_parallel._worker_environment import worker_environment
from hyper_parallel.demo.results import ModeResult, Task

OnStep = Callable[[int, float], None]
"""Called after a step with its number, from 0, and its loss."""

MMAP_THRESHOLD = 2**20
"""Blocks from this size on go back to the system when they are freed. glibc otherwise raises its threshold as blocks
are freed and fragments, which hides what is measured."""


class WorkerFailedError(RuntimeError):
    """A worker ended without a result."""


def run_task(task: Task, on_step: OnStep) -> ModeResult:
    """Train one mode in a fresh process, in a temporary working directory.

    Args:
        task: The mode, and the size of the net and of the training.
        on_step: Called after every step.

    Returns:
        What the worker measured.

    Raises:
        ValueError: The mode's policy doesn't fit the net.
        WorkerFailedError: The worker failed for any other reason.
    """
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-demo-") as folder:
        task_file, result_file, log_file = (Path(folder, name) for name in ("task.json", "result.json", "log.txt"))
        task_file.write_text(task.model_dump_json(), "utf-8")
        command = [sys.executable, "-m", "hyper_parallel.demo.worker", str(task_file), str(result_file)]
        complaint = ""
        with log_file.open("w") as log, _process(command, folder, log.fileno()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = _event(line)
                if event.get("event") == "step":
                    on_step(int(event["step"]), float(event["loss"]))
                elif event.get("event") == "error":
                    complaint = event["message"]
                else:
                    log.write(line)
                    log.flush()
            status = process.wait()
        if complaint:
            raise ValueError(f"mode {task.mode}: {complaint}")
        if status or not result_file.exists():
            raise WorkerFailedError(
                f"mode {task.mode} ended with exit status {status} and without a result; the end of its output:\n"
                + "\n".join(log_file.read_text("utf-8", "replace").splitlines()[-15:])
            )
        return ModeResult.model_validate_json(result_file.read_text("utf-8"))


@contextmanager
def _process(command: list[str], folder: str, log: int) -> Iterator[subprocess.Popen[str]]:
    environment = worker_environment("3", MALLOC_MMAP_THRESHOLD_=str(MMAP_THRESHOLD))
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _event(line: str) -> dict:
    """Read a line of the worker's output; what isn't ours (MindSpore prints too) is an empty event."""
    if not line.startswith('{"event"'):
        return {}
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}


def versions() -> dict[str, str]:
    """Give the versions of what the demo's figures depend on.

    Returns:
        Version by name.
    """
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("mindspore", "numpy"):
        found[name] = metadata.version(name)
    return found
