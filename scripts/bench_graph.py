#!/usr/bin/env python3
"""Policies in compiled nets: peak memory of every policy and training style, and what applying and verifying cost.

Peak: growth of the highest resident memory (VmHWM) over 2 training steps in a fresh process, above the memory after a
tiny net was compiled and has run, with MALLOC_MMAP_THRESHOLD_=1048576 (glibc otherwise raises it, and fragmentation
hides what is measured). Compiling the net is part of its first step. The net: 6 blocks of a product, GeLU, Tanh,
Sigmoid, a multiplication, a product and a sum, with 16 MB per wide activation.

Cost: seconds of `apply_policy` on a net of 96 blocks, and of `verify_policy` without the seconds that MindSpore
compiles the flagged net and its gradient, in a fresh process. The blocks are those of the peaks, but small: what counts
there is the number of operators. `--transformer` takes transformer blocks, which MindSpore compiles for minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from bench_activation import Block as TransformerBlock
from mindspore import Tensor, nn
from mindspore.ops import operations
from rich.console import Console
from rich.table import Table

from hyper_parallel import apply_policy, verify_policy
from hyper_parallel.report.resident import peak_resident_bytes, resident_bytes
from ms_ops import graph_compile

DEPTH = 6
BATCH, NARROW, WIDE = 1024, 64, 4096  # 1024 x 4096 float32: 16 MB

POLICIES: dict[str, Any] = {
    "plain": None,
    "full": {"cells": "layers.*", "policy": "must_recompute"},
    "selective": {"cells": "layers.*", "preset": "selective"},
    "every second block": {"cells": "layers.{0,2,4}", "policy": "must_recompute"},
}
LIMIT = 0.4
"""Of plain's growth: what full recomputation may take at most."""

WIDE_PER_BLOCK = 5
"""Wide tensors that a plain block keeps: results of the first product, GeLU, Tanh, Sigmoid and the multiplication."""
SPARED = {
    "full": (DEPTH - 1) * WIDE_PER_BLOCK,  # all but those of the block that is computed again just now
    "selective": DEPTH * (WIDE_PER_BLOCK - 1) - WIDE_PER_BLOCK,  # the product stays; the sum with its bias comes again
    "every second block": DEPTH // 2 * WIDE_PER_BLOCK,
}
"""Wide tensors by which a policy lowers the peak."""
PREDICTED_WITHIN = 0.8
"""Of that many bytes: by how much the peak has to drop at least."""


class Block(nn.Cell):
    """A wide multilayer perceptron with several activations."""

    def __init__(self, narrow: int = NARROW, wide: int = WIDE) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(narrow, wide), nn.Dense(wide, narrow)
        self.gelu, self.tanh, self.sigmoid = operations.GeLU(), operations.Tanh(), operations.Sigmoid()

    def construct(self, x: Tensor) -> Tensor:
        h = self.gelu(self.up(x))
        return x + self.down(self.tanh(h) * self.sigmoid(h))


class Net(nn.Cell):
    """Blocks and a mean square."""

    def __init__(self, blocks: list[nn.Cell]) -> None:
        super().__init__()
        self.layers = nn.CellList(blocks)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def under_jit(net: nn.Cell, level: str) -> Callable[[Tensor], Any]:
    gradient = ms.value_and_grad(net, None, net.trainable_params())

    @ms.jit(jit_level=level)
    def step(x: Tensor) -> Any:
        return gradient(x)

    return step


def train_one_step(net: nn.Cell, level: str) -> Callable[[Tensor], Any]:
    cell = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.01))
    cell.set_jit_config(ms.JitConfig(jit_level=level))
    return cell


STYLES: dict[str, tuple[int, Callable[[nn.Cell, str], Callable[[Tensor], Any]], str]] = {
    "jit O0": (ms.PYNATIVE_MODE, under_jit, "O0"),
    "jit O1": (ms.PYNATIVE_MODE, under_jit, "O1"),
    "TrainOneStepCell O0": (ms.GRAPH_MODE, train_one_step, "O0"),
    "TrainOneStepCell O1": (ms.GRAPH_MODE, train_one_step, "O1"),
}


def seeded(net: nn.Cell) -> nn.Cell:
    for i, p in enumerate(net.get_parameters()):
        p.set_data(Tensor((np.random.RandomState(i).randn(*p.shape) * 0.02).astype(np.float32)))
    return net


def peak_of(policy: str, style: str) -> dict[str, float]:
    """Growth in MB, and a checksum of what the last step gave."""
    mode, make, level = STYLES[style]
    net, x = seeded(Net([Block() for _ in range(DEPTH)])), Tensor(np.random.RandomState(1).randn(BATCH, NARROW) * 1.0)
    x = x.astype(ms.float32)
    ms.set_context(mode=mode)
    if POLICIES[policy] is not None:
        apply_policy(net, {"version": 1, "rules": [POLICIES[policy]]}, mode="graph")
    step = make(net, level)
    for p in net.get_parameters():
        p.asnumpy().sum()
    tiny = make(seeded(Net([Block(8, 16)])), level)
    tiny(Tensor(np.ones((2, 8), np.float32)))
    x.asnumpy()
    before = resident_bytes()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        value = step(x)
        loss = value[0] if isinstance(value, tuple) else value
        loss.asnumpy()
        seconds.append(time.perf_counter() - begin)
    return {"mb": (peak_resident_bytes() - before) / 2**20, "loss": float(loss.asnumpy()), "seconds": seconds[1]}


def cost_of(depth: int, what: str) -> dict[str, float]:
    """Seconds of applying and verifying, in this process."""
    make: Any = TransformerBlock if what == "transformer" else Block
    net, x = seeded(Net([make(16, 2) for _ in range(depth)])), Tensor(np.ones((2, 4, 16), np.float32))
    warm = Net([make(16, 2)])
    apply_policy(warm, {"version": 1, "rules": [POLICIES["full"]]}, mode="graph")
    verify_policy(warm, x)
    begin = time.perf_counter()
    apply_policy(net, {"version": 1, "rules": [POLICIES["selective"]]}, mode="graph")
    applied = time.perf_counter()
    own = compile_seconds()
    report = verify_policy(net, x)
    verified = time.perf_counter()
    return {
        "apply": applied - begin,
        "compile": own[0],
        "verify": verified - applied - own[0],
        "copies": sum(report.recomputed.values()),
        "honoured": report.honoured,
    }


def compile_seconds() -> list[float]:
    """A list whose one number becomes the seconds that MindSpore's compiler takes from now on."""
    found = [0.0]
    compiles = graph_compile.api._JitExecutor.compile

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return compiles(self, *args, **kwargs)
        finally:
            found[0] += time.perf_counter() - begin

    graph_compile.api._JitExecutor.compile = timed
    return found


def in_a_process(*arguments: str) -> Any:
    command = [sys.executable, os.path.abspath(__file__), "--one", *arguments]
    env = dict(os.environ, MALLOC_MMAP_THRESHOLD_="1048576", GLOG_v="3")
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", default=",".join(STYLES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--blocks", type=int, default=96, help="of the net whose verification is timed; 0: not timed")
    parser.add_argument("--transformer", action="store_true", help="time the verification of transformer blocks")
    parser.add_argument("--out", type=Path, default=Path("bench_graph.json"), help="where the figures go")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "HOW"), help="one measurement, in this process")
    a = parser.parse_args()
    if a.one:
        what, how = a.one
        print(json.dumps(cost_of(int(how), what) if what in ("small", "transformer") else peak_of(what, how)))
        return
    out = a.out.resolve()
    figures: dict[str, Any] = {"mindspore": ms.__version__, "peaks": {}, "cost": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        for style in filter(None, a.styles.split(",")):
            figures["peaks"][style] = {policy: in_a_process(policy, style) for policy in a.policies.split(",")}
        if a.blocks:
            kind = "transformer" if a.transformer else "small"
            figures["cost"] = {"blocks": a.blocks, "kind": kind, **in_a_process(kind, str(a.blocks))}
        os.chdir(out.parent)
    table = Table(title=f"growth of resident memory, {DEPTH} blocks")
    for column in ("style", "policy", "MB", "of plain", "drop, of predicted", "seconds per step", "same loss"):
        table.add_column(column)
    holds = True
    for style, peaks in figures["peaks"].items():
        for policy, found in peaks.items():
            part = found["mb"] / peaks["plain"]["mb"]
            same = found["loss"] == peaks["plain"]["loss"]
            drop = peaks["plain"]["mb"] - found["mb"]
            spared = found["predicted_drop"] = SPARED.get(policy, 0) * BATCH * WIDE * 4 / 2**20
            holds = holds and same and drop >= PREDICTED_WITHIN * spared and (policy != "full" or part <= LIMIT)
            table.add_row(
                style,
                policy,
                f"{found['mb']:.0f}",
                f"{part:.2f}",
                f"{drop:.0f} of {spared:.0f}",
                f"{found['seconds']:.2f}",
                "yes" if same else "NO",
            )
    figures["full_at_most"] = LIMIT
    figures["holds"] = holds
    out.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console()
    console.print(table)
    if figures["cost"]:
        console.print(figures["cost"])
    console.print(
        f"the peak drops by at least {PREDICTED_WITHIN} of what each policy spares, full recomputation takes at most "
        f"{LIMIT} of plain's growth, and losses are plain's: {holds}; figures in {out}"
    )


if __name__ == "__main__":
    main()
