"""One mode, trained and measured in a process of its own: ``python -m hyper_parallel.demo.worker TASK RESULT``.

It reads a `Task` from the file TASK, writes one JSON object per line to standard output as it goes, and leaves a
`ModeResult` in the file RESULT.
"""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from hyper_parallel import ActivationMemoryError, SwapManager
from hyper_parallel.demo.model import GPT, build_model
from hyper_parallel.demo.modes import apply_mode
from hyper_parallel.demo.results import ModeResult, Task
from hyper_parallel.demo.settings import DemoSettings
from hyper_parallel.demo.text import Array, Batches, load_text
from hyper_parallel.report.resident import ResidentSampler, peak_resident_bytes, reset_peak, resident_bytes

Report = Callable[..., None]


class Trainer:
    """Trains a net with Adam, one batch at a time.

    Args:
        net: A net that returns its loss.
        learning_rate: Of Adam.
    """

    def __init__(self, net: GPT, learning_rate: float) -> None:
        self._weights = net.trainable_params()
        self._gradient = ms.value_and_grad(net, None, self._weights)
        self._optimizer = nn.Adam(self._weights, learning_rate)
        for state in self._optimizer.get_parameters():
            # Zeros that nobody has written take no memory yet; the array is the tensor's own memory.
            array = state.asnumpy()
            np.copyto(array, array.copy())

    def step(self, tokens: Array, targets: Array) -> float:
        """Take one step and wait until it is done.

        Args:
            tokens: Indices of characters, of shape (batch, seq).
            targets: The characters that follow.

        Returns:
            The loss before the step.
        """
        loss, gradients = self._gradient(Tensor(tokens), Tensor(targets))
        self._optimizer(gradients)
        for weight in self._weights:
            weight.asnumpy()
        return float(loss.asnumpy())


def train(task: Task, report: Report) -> ModeResult:
    """Train the demo's net in one mode.

    Args:
        task: The mode, and the size of the net and of the training.
        report: Called with the event's name and its values.

    Returns:
        What was measured.

    Raises:
        ActivationMemoryError: The mode's policy doesn't fit the net.
    """
    settings = task.settings
    net, _ = build_model(settings)
    apply_mode(net, task.mode, task.policy)
    report("ready")
    trainer = Trainer(net, settings.learning_rate)
    batches = Batches(load_text(), settings.batch, settings.seq, settings.seed)
    _warm_up(net)

    losses, starts, seconds, live = [], [], [], []
    reset_peak()
    resident_before, peak_before = resident_bytes(), peak_resident_bytes()
    with ResidentSampler() as sampler:
        begin = time.perf_counter()
        for step in range(settings.steps):
            tokens, targets = batches[step]
            start = time.perf_counter()
            loss = trainer.step(tokens, targets)
            seconds.append(time.perf_counter() - start)
            starts.append(start - begin)
            losses.append(loss.hex())
            live.append(SwapManager().stats().live_bytes)
            report("step", step=step, loss=loss)
        peak_growth = max(peak_resident_bytes() - peak_before, 0)
    return ModeResult(
        mode=task.mode,
        losses=losses,
        weights_sha256=_hash(net),
        step_starts=starts,
        step_seconds=seconds,
        peak_growth_bytes=peak_growth,
        samples=[(at - begin, resident - resident_before) for at, resident in sampler.samples],
        live_bytes=live,
        swap=_numbers(SwapManager().stats()),
    )


def _warm_up(net: GPT) -> None:
    """Touch every weight and take a tiny step with another net, so that what happens once isn't counted."""
    for parameter in net.get_parameters():
        parameter.asnumpy().sum()
    tiny = DemoSettings(layers=1, dim=16, heads=2, batch=1, seq=8)
    tokens, targets = Batches(load_text(limit=1000), tiny.batch, tiny.seq)[0]
    Trainer(build_model(tiny)[0], tiny.learning_rate).step(tokens, targets)


def _hash(net: nn.Cell) -> str:
    digest = hashlib.sha256()
    for parameter in net.get_parameters():
        digest.update(parameter.asnumpy().tobytes())
    return digest.hexdigest()


def _numbers(stats: Any) -> dict[str, float]:
    values = dataclasses.asdict(stats)
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _print_event(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def main(arguments: list[str]) -> int:
    """Run one task.

    Args:
        arguments: The files to read the task from and to write the result to.

    Returns:
        The exit status: 0, or 2 if the policy doesn't fit the net.
    """
    task_file, result_file = arguments
    task = Task.model_validate_json(Path(task_file).read_text("utf-8"))
    try:
        result = train(task, _print_event)
    except ActivationMemoryError as error:
        _print_event("error", message=f"{type(error).__name__}: {error}")
        return 2
    Path(result_file).write_text(result.model_dump_json(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
