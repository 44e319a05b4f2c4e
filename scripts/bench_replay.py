#!/usr/bin/env python3
"""What it costs to make sure that a replay is exact, on the reference net of `bench_activation.py`.

Thread time (CPU time of the calling thread) of a forward per operator: nothing, saved-tensor hooks that drop
everything, a do-nothing `MsDispatchMode`, both, and a replayed region, whose forward records names, plain arguments,
shapes and dtypes. The least of `--rounds` rounds counts: the machine is shared, and others only add.

The fixed cost of one call of a block's region: looking at its Python state and tensors before the forward, sealing it,
putting it back and checking for writes before the replay, and the listening wrappers of `ms_ops.writes`.

Operators of one step: how many a forward and a replay of a block run, how many the replay leaves out.

Kept by a region with dropout: bytes on the tape and in autograd, against the mask and the result in floating point.

Kept by the presets of operator policies: how much more resident memory blocks 5 to 12 add to a forward than those of a
full recompute do, the median of three fresh processes each, beside what the shapes of the operators that they keep say.
Resident memory is known to 1 or 2 %, less on a busy machine; `tests/ascend/backend/test_held.py` has it to the byte.
Some of what a preset keeps is alive anyway, as the input of the next block.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from bench_activation import Verdict, batch, build, step
from mindspore import Tensor, nn, ops
from mindspore.utils import MsDispatchMode
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hyper_parallel import CheckpointPolicy, activation_policy, checkpoint
from hyper_parallel.core.activation_memory import operator_log, replay
from hyper_parallel.core.activation_memory.operator_choice import OperatorChoice
from hyper_parallel.core.activation_memory.operator_policy import Operator
from hyper_parallel.core.activation_memory.replay import Invocation
from hyper_parallel.core.activation_memory.scopes import Kept
from hyper_parallel.core.activation_memory.tape import Tape

OPERATORS = 200


class DoNothing(MsDispatchMode):
    """The least that any interception costs."""

    def __ms_dispatch__(self, func: Any, args: tuple, kwargs: Any = None) -> Any:
        return func(*args)


def chain(x: Tensor) -> Tensor:
    """Small operators, every other one saves its result."""
    for _ in range(OPERATORS // 2):
        x = ops.tanh(x) * 1.01
    return x


def hooked(x: Tensor) -> Tensor:
    with ms.saved_tensors_hooks(lambda tensor: tensor.shape, lambda packed: packed):
        return chain(x)


def intercepted(x: Tensor) -> Tensor:
    with DoNothing():
        return chain(x)


def both(x: Tensor) -> Tensor:
    with DoNothing():
        return hooked(x)


def replays_all(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
    """The least that a policy function can do."""
    return CheckpointPolicy.PREFER_RECOMPUTE


FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": chain,
    "hooks that drop everything": hooked,
    "do-nothing MsDispatchMode": intercepted,
    "both": both,
    "replayed region": lambda x: checkpoint(chain, x),
    "replayed region, table of operators": lambda x: checkpoint(chain, x, ops={"MatMul": CheckpointPolicy.MUST_SAVE}),
    "replayed region, operators asked": lambda x: checkpoint(chain, x, policy_fn=replays_all),
}


def per_operator(rounds: int) -> dict[str, float]:
    """Microseconds of thread time per operator of a forward under a gradient."""
    x, best = Tensor(np.ones((4, 4), np.float32)), dict.fromkeys(FORWARDS, float("inf"))
    took = [0.0]

    def timed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        begin = time.thread_time()
        forward(x)
        took[0] = time.thread_time() - begin
        return x.sum()  # nothing of the forward is differentiated: no replay, no unpack

    for _ in track(range(rounds), "operators", console=Console(stderr=True)):
        for name, forward in FORWARDS.items():
            ms.grad(lambda x, forward=forward: timed(forward, x))(x)
            best[name] = min(best[name], took[0] / OPERATORS * 1e6)
    return best


def per_call(rounds: int) -> dict[str, float]:
    """Microseconds of thread time per call of the reference block's region, besides its operators."""
    block, x = build(1, "recompute").layers[0], batch()
    found: dict[str, list[float]] = {"look": [], "seal": [], "restore": [], "verify": []}
    for _ in range(rounds):
        invocation = Invocation(block, block.construct, "block", Tape(), (None, None), OperatorChoice(None, Kept))
        marks = [time.thread_time()]
        invocation._look_at((x,), {})
        marks.append(time.thread_time())
        invocation.state.seal()
        marks.append(time.thread_time())
        with invocation.provided.restored(), invocation.state.restored():
            pass
        marks.append(time.thread_time())
        invocation.watch.verify()
        marks.append(time.thread_time())
        for name, begin, end in zip(found, marks, marks[1:], strict=False):
            found[name].append((end - begin) * 1e6)
    return {name: min(times) for name, times in found.items()}


def operators_of_a_step(depth: int) -> dict[str, int]:
    """Operators that the forward and the replay of the reference net run, and those that the replay leaves out."""
    counts = {"forward": 0, "replay": 0, "left out": 0, "regions": 0, "replays": 0}
    write, begins, stand_in, run = (
        operator_log.OperatorLog.write,
        operator_log.LogReader.begins,
        operator_log.LogReader.stand_in,
        replay.Invocation.replay,
    )

    def counted(key: str, function: Callable[..., Any], counts_it: Callable[[Any], bool] = lambda result: True) -> Any:
        def wrapper(*args: Any) -> Any:
            result = function(*args)
            counts[key] += counts_it(result)
            return result

        return wrapper

    operator_log.OperatorLog.write = counted("forward", write)
    operator_log.LogReader.begins = counted("replay", begins)
    operator_log.LogReader.stand_in = counted("left out", stand_in, lambda result: result is not None)
    replay.Invocation.replay = counted("replays", run)
    try:
        net = build(depth, "recompute")
        counts["regions"] = depth
        step(net, batch())
    finally:
        operator_log.OperatorLog.write, operator_log.LogReader.begins = write, begins
        operator_log.LogReader.stand_in, replay.Invocation.replay = stand_in, run
    counts["replay"] -= counts["left out"]
    return counts


class WithDropout(nn.Cell):
    """Dropout between two operators that save their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=0.1)

    def construct(self, x: Tensor) -> Tensor:
        return ops.sin(self.dropout(ops.sin(x)))


def kept_by_dropout(packed: bool, layers: int = 16) -> float:
    """MB of memory that a forward through layers with dropout leaves behind, per layer."""
    from hyper_parallel.core.activation_memory import dropout

    if not packed:
        dropout._DTYPES.clear()
    cells = [activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(WithDropout().set_train()) for _ in range(layers)]
    x = Tensor(np.random.RandomState(0).randn(1024, 2048).astype(np.float32))
    used = [0.0]

    def forward(x: Tensor) -> Tensor:
        x = cells[0](cells[0](x))  # scratch memory of the first calls
        x.asnumpy()
        begin = resident()
        for cell in cells[1:]:
            x = cell(x)
        x.asnumpy()
        used[0] = (resident() - begin) / (layers - 1)
        return x.sum()

    ms.grad(forward)(x).asnumpy()
    return used[0]


def resident() -> float:
    """MB of memory that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def resident_after_forward(mode: str, depth: int) -> float:
    """MB that the forward of so many blocks leaves, in this process: what is kept, and scratch memory."""
    net, x, found = build(depth, mode), batch(), [0.0]

    def forward(x: Tensor) -> Tensor:
        begin = resident()
        loss = net(x)
        loss.asnumpy()
        found[0] = resident() - begin
        return loss

    ms.grad(forward)(x).asnumpy()
    return found[0]


def kept_by_8_blocks(mode: str) -> float:
    """MB that blocks 5 to 12 add to what a forward leaves: scratch memory, which doesn't grow, is left out."""
    few, many = (
        statistics.median(in_a_fresh_process("--resident", mode, str(depth)) for _ in range(3)) for depth in (4, 12)
    )
    return many - few


def predicted_mb(mode: str, depth: int = 8) -> float:
    """MB of the results that a preset says are kept: shapes and dtypes of the operators that it names."""
    kept = [0]
    net = build(depth, mode)

    def wraps(choice: Any, *args: Any) -> Any:
        said, policy = ask(choice, *args)
        if not policy.replays:
            kept[0] += sum(math.prod(shape) * dtype.itemsize for shape, dtype in Operator(args[1], args[2], ()).outputs)
        return said, policy

    ask, OperatorChoice.ask = OperatorChoice.ask, wraps
    try:
        ms.grad(net)(batch()).asnumpy()
    finally:
        OperatorChoice.ask = ask
    return kept[0] / 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5, help="steps of the reference net, for the share of a step")
    parser.add_argument("--out", type=Path, default=Path("bench_replay.json"), help="where the figures go")
    parser.add_argument("--dropout", choices=["packed", "floats"], help=argparse.SUPPRESS)
    parser.add_argument("--resident", nargs=2, metavar=("MODE", "BLOCKS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_fresh_process(*options: str) -> float:
    command = [sys.executable, os.path.abspath(__file__), *options]
    environment = dict(os.environ, MALLOC_MMAP_THRESHOLD_="1048576")
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(run.stdout.strip().splitlines()[-1])


def main() -> None:
    a = arguments()
    if a.dropout:
        print(kept_by_dropout(a.dropout == "packed"))
        return
    if a.resident:
        print(resident_after_forward(a.resident[0], int(a.resident[1])))
        return
    out = a.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        operators, calls, depth = per_operator(a.rounds), per_call(a.rounds), 2
        counts = operators_of_a_step(depth)
        net, x, seconds = build(depth, "plain"), batch(), []
        for _ in range(a.steps + 1):
            begin = time.perf_counter()
            step(net, x)
            seconds.append(time.perf_counter() - begin)
        dropout = {name: in_a_fresh_process("--dropout", name) for name in ("packed", "floats")}
        base, kept = kept_by_8_blocks("recompute"), {}
        for mode in track(("selective", "every_other_matmul", "attention_only"), "kept", console=Console(stderr=True)):
            kept[mode] = {"measured_mb": kept_by_8_blocks(mode) - base, "predicted_mb": predicted_mb(mode)}
        os.chdir(out.parent)
    plain = statistics.median(seconds[1:])
    over = operators["replayed region"] - operators["both"]
    beside = {name: operators["replayed region"] / operators[name] for name in ("both", "do-nothing MsDispatchMode")}
    recording = over * (counts["forward"] + counts["replay"]) * 1e-6 / plain
    guard = sum(calls.values()) * depth * 1e-6 / plain
    asked = operators["replayed region, operators asked"]
    asking = (asked - operators["both"]) * (counts["forward"] + counts["replay"]) * 1e-6 / plain
    off = abs(kept["selective"]["measured_mb"] / kept["selective"]["predicted_mb"] - 1)
    targets = [
        Verdict("operator that is asked about / both", 3.0, *[asked / operators["both"]] * 2),
        Verdict("recording and asking, share of the reference step", 0.02, asking, asking),
        Verdict("selective keeps, measured / predicted, off 1 by", 0.01, off, off),
        *(Verdict(f"recorded operator / {name}", 2.5, value, value) for name, value in beside.items()),
        Verdict("recording, share of the reference step", 0.02, recording, recording),
        Verdict("state and guard, share of the reference step", 0.03, guard, guard),
        Verdict("replays / regions", 1.0, *[counts["replays"] / counts["regions"]] * 2),
    ]
    console = Console()
    measured = Table("what", "value", title="measured")
    for name, value in operators.items():
        measured.add_row(f"us per operator: {name}", f"{value:.1f}")
    for name, value in calls.items():
        measured.add_row(f"us per call of a block: {name}", f"{value:.0f}")
    for name, count in counts.items():
        measured.add_row(f"one step, {depth} blocks: {name}", str(count))
    for name, value in dropout.items():
        measured.add_row(f"MB kept per 8 MB layer with dropout, {name}", f"{value:.1f}")
    for mode, mb in kept.items():
        measured.add_row(f"MB kept by {mode}, 8 blocks: measured", f"{mb['measured_mb']:.1f}")
        measured.add_row(f"MB kept by {mode}, 8 blocks: predicted", f"{mb['predicted_mb']:.1f}")
    measured.add_row("plain step, s", f"{plain:.2f}")
    answers = Table("target", "at most", "measured", "answer", title="targets")
    for v in targets:
        answers.add_row(v.what, f"{v.limit:.2f}", f"{v.low:.4f}", v.answer)
    console.print(measured)
    console.print(answers)
    figures = {
        "mindspore": ms.__version__,
        "us_per_operator": operators,
        "us_per_call": calls,
        "operators_of_a_step": counts,
        "dropout_mb_per_layer": dropout,
        "kept_mb_of_8_blocks": kept,
        "plain_step_seconds": plain,
        "targets": [{**v.__dict__, "answer": v.answer} for v in targets],
    }
    out.write_text(json.dumps(figures, indent=1))
    console.print(f"figures in {out}")


if __name__ == "__main__":
    main()
