#!/usr/bin/env python3
"""Train a small net for many steps with everything swapped, and show that nothing is left and nothing grows.

The net mixes swapped cells, recomputed cells with swapped inputs and a recomputed cell whose matrix products wait on
host. Now and then there is an evaluation, a forward whose gradient is never taken, two micro-batches, or an exception
in forward or backward. Every step's gradients are compared with plain's, to the last bit; after every step nothing must
be live. Resident memory, open files, threads and Python objects are written down as it goes on.

MindSpore 2.10 itself keeps some 40 KiB of every gradient call of such a net. A tenth of the steps is therefore taken
with the plain net twice, before the others: their growth of resident memory per step stands beside that of the soak.

    python scripts/soak.py --steps 10000 --write docs/soak.json
"""

import argparse
import gc
import json
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy

P = CheckpointPolicy
WIDTH, ROWS, CLASSES = 16, 32, 64


class Layer(nn.Cell):
    """Two matrix products around a tanh, and a skip connection; fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)
        self.fails = False

    def construct(self, x: Tensor) -> Tensor:
        y = self.second(ops.tanh(self.first(x)))
        if self.fails:
            raise LookupError("on purpose, in forward")
        return x + y


class FailsBackward(nn.Cell):
    """Gives its input; its gradient fails if it is told to."""

    fails = False

    def construct(self, x: Tensor) -> Tensor:
        return x * 1

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple:
        if self.fails:
            raise LookupError("on purpose, in backward")
        return (dout,)


class Net(nn.Cell):
    """Five layers, and a head that is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(5)])
        self.backward, self.head = FailsBackward(), nn.Dense(WIDTH, CLASSES)
        self.with_head = False

    def construct(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 2:
                x = self.backward(x)
        used, unused = (x**2).mean(), self.head(x)
        return used + unused.mean() if self.with_head else used


def under_policies(net: Net) -> Net:
    """The mix that is soaked."""
    for index in (0, 3):
        activation_policy(P.MUST_SWAP)(net.layers[index])
    for index in (1, 4):
        activation_policy(P.MUST_RECOMPUTE, swap_inputs=True)(net.layers[index])
    activation_policy(ops={"MatMul": P.MUST_SWAP, "*": P.PREFER_RECOMPUTE})(net.layers[2])
    activation_policy(P.MUST_SWAP)(net.head)
    return net


def same_weights(net: Net, other: Net) -> None:
    for one, two in zip(net.get_parameters(), other.get_parameters(), strict=True):
        two.set_data(Tensor(one.asnumpy()))


class Soak:
    """A net under policies, the same net plain, and what happened so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.plain, self.net = Net(), under_policies(Net())
        same_weights(self.net, self.plain)
        self.steps = [ms.value_and_grad(net, 0, net.trainable_params()) for net in (self.net, self.plain)]
        self.inputs = [Tensor(np.random.RandomState(k).randn(ROWS, WIDTH).astype(np.float32)) for k in range(8)]
        self.happened: Counter[str] = Counter()
        self.wrong: list[str] = []

    def numbers(self, which: int, x: Tensor) -> list[bytes]:
        value, (of_x, of_weights) = self.steps[which](x)
        return [tensor.asnumpy().tobytes() for tensor in (value, of_x, *of_weights)]

    def plain_step(self) -> None:
        """What a step takes without this library: two plain ones."""
        x = self.random.choice(self.inputs)
        for _ in range(2):
            self.numbers(1, x)

    def step(self, index: int) -> None:
        """One training step, and perhaps something beside it."""
        x = self.random.choice(self.inputs)
        self.net.with_head = self.plain.with_head = bool(index % 2)
        event = self.random.choices(list(EVENTS), weights=[weight for weight, _ in EVENTS.values()])[0]
        EVENTS[event][1](self, x)
        self.happened[event] += 1
        if self.numbers(0, x) != self.numbers(1, x):
            self.wrong.append(f"step {index}, after {event}: the gradients differ from plain's")
        engine = SwapManager().engine
        if live := SwapManager().stats().live_bytes:
            self.wrong.append(f"step {index}, after {event}: {live} bytes are live")
        if any(engine.ledger.now.values()) or engine.tier.used:
            self.wrong.append(f"step {index}, after {event}: {engine.ledger.now}, {engine.tier.used} bytes of slots")


def nothing(soak: Soak, x: Tensor) -> None:
    pass


def evaluation(soak: Soak, x: Tensor) -> None:
    soak.net.set_train(False)
    soak.net(x).asnumpy()
    soak.net.set_train(True)


def abandoned(soak: Soak, x: Tensor) -> None:
    """A forward that is recorded, whose gradient nobody takes: MindSpore keeps its graph until it is told."""
    ms.vjp(soak.net, x)
    _pynative_executor.clear_res()


def two_forwards(soak: Soak, x: Tensor) -> None:
    """Two micro-batches, whose backwards run in one gradient call."""
    one, other = (ms.grad(lambda x, net=net: net(x) + net(x * 2))(x).asnumpy() for net in (soak.net, soak.plain))
    if one.tobytes() != other.tobytes():
        soak.wrong.append("two micro-batches: the gradients differ from plain's")


def fails_forward(soak: Soak, x: Tensor) -> None:
    layer = soak.random.choice(list(soak.net.layers))
    layer.fails = True
    fails(soak, x)
    layer.fails = False


def fails_backward(soak: Soak, x: Tensor) -> None:
    soak.net.backward.fails = True
    fails(soak, x)
    soak.net.backward.fails = False


def fails(soak: Soak, x: Tensor) -> None:
    try:
        soak.steps[0](x)
    except LookupError:
        return
    soak.wrong.append("an exception on purpose did not arrive")


EVENTS: dict[str, tuple[int, Callable[[Soak, Tensor], None]]] = {
    "nothing": (80, nothing),
    "evaluation": (5, evaluation),
    "abandoned forward": (4, abandoned),
    "two micro-batches": (4, two_forwards),
    "exception in forward": (4, fails_forward),
    "exception in backward": (3, fails_backward),
}


def figures(step: int, seconds: float) -> dict[str, Any]:
    """What must not grow."""
    gc.collect()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "step": step,
        "seconds": round(seconds, 1),
        "resident_kib": int(resident.split()[1]),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "python_objects": len(gc.get_objects()),
        "allocated_bytes": SwapManager().stats().allocated_bytes,
    }


def growth(rows: list[dict[str, Any]]) -> float:
    """KiB of resident memory per step, after the first rows."""
    if not rows:
        return 0.0
    first, last = rows[min(2, len(rows) - 1)], rows[-1]
    steps = last["step"] - first["step"]
    return round((last["resident_kib"] - first["resident_kib"]) / steps, 2) if steps else 0.0


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="what must not grow")
    for name in rows[0]:
        found.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        found.add_row(*(str(value) for value in row.values()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the events beside the steps")
    parser.add_argument("--minutes", type=float, help="stop after so many, if the steps are not done by then")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)

    ms.set_context(runtime_num_threads=1)  # kernels of this size need no pool: a quarter of the time
    SwapManager().configure(min_bytes=0, window="16KiB", pending="16KiB", fuse_below="1KiB", slab="1MiB")
    soak, plain, rows, begin, index = Soak(arguments.seed), [], [], time.monotonic(), 0
    every = max(1, arguments.steps // 40)
    counted: Counter[str] = Counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        warming = arguments.steps // 10
        task = progress.add_task("plain", total=warming)
        for index in range(1, warming + 1):
            soak.plain_step()
            progress.advance(task)
            seconds = time.monotonic() - begin
            is_late = arguments.minutes is not None and seconds > 6 * arguments.minutes
            if index in (1, 20, 40) or index % every == 0 or is_late:
                plain.append(figures(index, seconds))
            if is_late:
                break
        task = progress.add_task("steps", total=arguments.steps)
        for index in range(1, arguments.steps + 1):
            soak.step(index)
            progress.advance(task)
            seconds = time.monotonic() - begin
            is_late = arguments.minutes is not None and seconds > 60 * arguments.minutes
            if index in (1, 20, 40) or index % every == 0 or is_late:
                rows.append(figures(index, seconds))
            if is_late or len(soak.wrong) > 20:
                break
    stats = SwapManager().stats()
    counted.update({name: int(getattr(stats, name)) for name in ("offloaded_bytes", "loaded_bytes", "cancelled_bytes")})
    console.print(table(rows))
    for line in soak.wrong:
        console.print(line, style="red")
    kept = {"plain_kib_per_step": growth(plain), "kib_per_step": growth(rows)}
    console.print(f"{index} steps, {kept}, {dict(soak.happened)}, {dict(counted)}: {len(soak.wrong)} were wrong")
    if arguments.write is not None:
        about = {"mindspore": ms.__version__, "python": platform.python_version(), "seed": arguments.seed}
        text = {
            **about,
            "steps": index,
            "beside": dict(soak.happened),
            **counted,
            **kept,
            "wrong": soak.wrong,
            "figures": rows,
        }
        arguments.write.write_text(json.dumps(text, indent=1) + "\n")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
