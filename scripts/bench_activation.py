#!/usr/bin/env python3
"""Step time and peak memory of every mode, beside plain and MindSpore's own recompute, in one run.

The net: pre-LayerNorm transformer blocks, batch 4 x 256 tokens x 512, 8 heads, GELU, no mask, no dropout, fp32, no
optimizer.

Peak: growth of the highest resident memory (VmHWM) over 5 training steps in a fresh process, above its value once every
parameter has been touched and a tiny step has run, with MALLOC_MMAP_THRESHOLD_=1048576: glibc otherwise raises its
threshold as blocks are freed, and fragmentation hides what is measured. Reported per depth, and as growth per added
block (least squares over the depths), beside the floor (the bytes of the gradients).

Step: the modes interleaved in random order in one process; the ratio to plain per round; rounds go on until every 95 %
bootstrap interval of the median ratio is within +/- 1 %, or `--rounds`. A target holds if the interval's upper end is
within it, is missed if the lower end is beyond it, and is undecided otherwise.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy, is_recomputing, presets
from hyper_parallel.report.resident import peak_resident_bytes
from ms_ops.autograd import wait_for_operators
from ms_ops.dispatch import Interception


class Block(nn.Cell):
    """Pre-LayerNorm transformer block of width `d` with `h` heads."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.d, self.h = d, h
        self.norm1, self.norm2 = nn.LayerNorm((d,)), nn.LayerNorm((d,))
        self.qkv, self.out = nn.Dense(d, 3 * d), nn.Dense(d, d)
        self.up, self.act, self.down = nn.Dense(d, 4 * d), nn.GELU(), nn.Dense(4 * d, d)
        self.softmax = nn.Softmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, s, 3, self.h, d // self.h).transpose(2, 0, 3, 1, 4).split(1, 0)
        a = self.softmax(ops.matmul(q.squeeze(0), k.squeeze(0).swapaxes(-1, -2)) / (d // self.h) ** 0.5)
        x = x + self.out(ops.matmul(a, v.squeeze(0)).transpose(0, 2, 1, 3).reshape(b, s, d))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Net(nn.Cell):
    """A stack of blocks with a mean-square output."""

    def __init__(self, depth: int, d: int = 512, h: int = 8) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(d, h) for _ in range(depth)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def on_every_layer(policy: CheckpointPolicy | None = None, **options: Any) -> Callable[[Net], None]:
    """A mode: one policy on every block."""

    def apply(net: Net) -> None:
        for layer in net.layers:
            activation_policy(policy, **options)(layer)

    return apply


def do_nothing_hooks(net: Net) -> None:
    """The cost, or gain, of saved-tensor hooks alone: they switch off a pipeline of MindSpore's."""
    forward = net.construct

    def construct(x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: t, lambda t: t):
            return forward(x)

    object.__setattr__(net, "construct", construct)


MODES: dict[str, Callable[[Net], Any]] = {
    "plain": lambda net: None,
    "hooks": do_nothing_hooks,
    "native_reentrant": lambda net: [layer.recompute() for layer in net.layers],
    "native": lambda net: [layer.recompute(use_reentrant=False, early_stop=False) for layer in net.layers],
    "native_early_stop": lambda net: [layer.recompute(use_reentrant=False) for layer in net.layers],
    "identity": on_every_layer(CheckpointPolicy.PREFER_SAVE),
    "recompute": on_every_layer(CheckpointPolicy.MUST_RECOMPUTE),
    "swap": on_every_layer(CheckpointPolicy.MUST_SWAP),
    "recompute_swap_inputs": on_every_layer(CheckpointPolicy.MUST_RECOMPUTE, swap_inputs=True),
    "selective": on_every_layer(**presets.selective()),
    "every_other_matmul": on_every_layer(**presets.every_other_matmul()),
    "attention_only": on_every_layer(**presets.attention_only()),
}


def build(depth: int, mode: str) -> Net:
    """A net with seeded weights and biases under a mode."""
    net = Net(depth)
    for i, p in enumerate(net.get_parameters()):
        p.set_data(Tensor((np.random.RandomState(i).randn(*p.shape) * 0.02).astype(np.float32)))
    MODES[mode](net)
    return net


def batch(b: int = 4, s: int = 256, d: int = 512) -> Tensor:
    """The input: b x s tokens of width d."""
    return Tensor(np.random.RandomState(1).randn(b, s, d).astype(np.float32))


def step(net: Net, x: Tensor, frozen: bool = False) -> None:
    """One training step, finished when it returns."""
    if frozen:
        ms.grad(net, 0)(x).asnumpy()
        return
    _, grads = ms.value_and_grad(net, None, net.trainable_params())(x)
    for g in grads:
        g.asnumpy()


def peak_of(mode: str, depth: int, frozen: bool) -> tuple[float, float]:
    """Peak and bytes of the gradients in MB, in this process."""
    net, x = build(depth, mode), batch()
    for p in net.get_parameters():
        p.asnumpy().sum()
    step(build(1, mode), batch(1, 8))
    base = peak_resident_bytes()
    for _ in range(5):
        step(net, x, frozen)
    grads = 0 if frozen else sum(p.nbytes for p in net.trainable_params()) / 2**20
    peak = (peak_resident_bytes() - base) / 2**20
    if live := SwapManager().stats().live_bytes:
        raise RuntimeError(f"{mode}: {live} bytes are still swapped after the last step")
    return peak, grads


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    what: str
    limit: float
    low: float
    high: float

    @property
    def answer(self) -> str:
        if self.high <= self.limit:
            return "holds"
        return "missed" if self.low > self.limit else "undecided"


def measure_peaks(modes: list[str], depths: list[int], frozen: bool, progress: Progress) -> dict[str, Any]:
    """Peaks per mode and depth, each in a fresh process."""
    result: dict[str, Any] = {}
    what = "peaks, frozen weights" if frozen else "peaks"
    task = progress.add_task(what, total=len(modes) * len(depths))
    for mode in modes:
        peaks, floor = {}, 0.0
        for depth in depths:
            command = [sys.executable, os.path.abspath(__file__), "--one", mode, str(depth)]
            run = subprocess.run(
                command + (["--frozen"] if frozen else []),
                capture_output=True,
                text=True,
                env=dict(os.environ, MALLOC_MMAP_THRESHOLD_="1048576"),
            )
            if run.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
            peak, grads = json.loads(run.stdout.strip().splitlines()[-1])
            peaks[depth], floor = round(peak, 1), grads / depth
            progress.advance(task)
        growth = float(np.polyfit(depths, list(peaks.values()), 1)[0]) if len(depths) > 1 else None
        result[mode] = {"peak_mb": peaks, "growth_mb": growth and round(growth, 2), "floor_mb": round(floor, 2)}
    return result


def measure_steps(modes: list[str], depth: int, rounds: int, progress: Progress) -> dict[str, Any]:
    """Seconds per step of every mode in every round, modes in random order within a round."""
    nets, x = {mode: build(depth, mode) for mode in modes}, batch()
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    task = progress.add_task("rounds of steps", total=rounds)
    rng = random.Random(0)
    for i in range(rounds + 1):
        for mode in rng.sample(modes, len(modes)):
            begin = time.perf_counter()
            step(nets[mode], x)
            if i:  # the first round warms up
                times[mode].append(time.perf_counter() - begin)
        progress.advance(task, bool(i))
        if i >= 10 and i % 10 == 0 and all(h - lo <= 0.02 for lo, h in (interval(ratio(times, m)) for m in modes)):
            break
    return times


def seconds_of_what_is_replayed(mode: str, depth: int, rounds: int) -> float:
    """What the operators that a mode replays take by themselves, in seconds per step: the median of some rounds.

    The operators of one step's replays are noted with their arguments, then run again in their order, from an empty
    queue until all of them have run.
    """
    net, x = build(depth, mode), batch()
    replayed: list[tuple[Callable[..., Any], tuple]] = []

    def note(name: str, run: Callable[..., Any], args: tuple) -> Any:
        if is_recomputing():
            replayed.append((run, args))
        return run(*args)

    step(net, x)
    with Interception(note):
        step(net, x)
    wait_for_operators()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for run, args in replayed:
            run(*args)
        wait_for_operators()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def ratio(times: dict[str, list[float]], mode: str, to: str = "plain") -> list[float]:
    """Step time of `mode` by that of `to`, round by round."""
    return [a / b for a, b in zip(times[mode], times[to], strict=True)]


def verdicts(times: dict[str, Any], peaks: dict[str, Any], frozen: dict[str, Any], replayed: float) -> list[Verdict]:
    """The targets, as far as what they need was measured."""
    found: list[Verdict] = []

    def timed(mode: str, limit: float, to: str = "plain") -> None:
        if mode in times and to in times:
            found.append(Verdict(f"step time, {mode} / {to}", limit, *interval(ratio(times, mode, to))))

    def peaked(mode: str, limit: float) -> None:
        for depth in (8, 12):
            if mode in peaks and depth in peaks.get("native", {}).get("peak_mb", {}):
                value = peaks[mode]["peak_mb"][depth] / peaks["native"]["peak_mb"][depth]
                found.append(Verdict(f"peak at {depth} blocks, {mode} / native", limit, value, value))

    timed("recompute", 1.03, "native")
    timed("recompute", 1.03, "native_early_stop")
    peaked("recompute", 1.03)
    timed("swap", 1.05)
    peaked("swap", 1.10)
    for mode in ("swap", "recompute_swap_inputs"):
        if mode in peaks and peaks[mode]["growth_mb"]:
            value = peaks[mode]["growth_mb"] / peaks[mode]["floor_mb"]
            found.append(Verdict(f"growth per block, {mode} / floor", 1.06, value, value))
        if mode in frozen and "native" in frozen and frozen["native"]["growth_mb"]:
            value = frozen[mode]["growth_mb"] / frozen["native"]["growth_mb"]
            found.append(Verdict(f"growth per block, frozen weights, {mode} / native", 0.3, value, value))
    timed("identity", 1.02)
    if replayed:
        over = [(a - b) / replayed for a, b in zip(times["selective"], times["plain"], strict=True)]
        found.append(Verdict("selective above plain / forward of what it replays", 1.2, *interval(over)))
        timed("selective", 1.0, "recompute")
    return found


def tables(times: dict[str, Any], peaks: dict[str, Any], frozen: dict[str, Any], answers: list[Verdict]) -> list[Table]:
    """What was measured, and the targets."""
    measured = Table(title="measured")
    for column in ("mode", "step / plain [95 %]", "peak MB (blocks: MB)", "MB per block", "floor", "the same, frozen"):
        measured.add_column(column)
    for mode in dict.fromkeys([*times, *peaks]):
        cell = ""
        if mode in times:
            low, high = interval(ratio(times, mode))
            cell = f"{statistics.median(ratio(times, mode)):.3f} [{low:.3f}, {high:.3f}]"
        p, f = peaks.get(mode, {}), frozen.get(mode, {})
        measured.add_row(
            mode,
            cell,
            ", ".join(f"{d}: {v:.0f}" for d, v in p.get("peak_mb", {}).items()),
            f"{p['growth_mb']:.1f}" if p.get("growth_mb") else "",
            f"{p['floor_mb']:.1f}" if p else "",
            f"{f['growth_mb']:.1f} ({', '.join(f'{v:.0f}' for v in f['peak_mb'].values())})" if f else "",
        )
    targets = Table(title="targets")
    for column in ("what", "at most", "measured", "answer"):
        targets.add_column(column)
    for v in answers:
        value = f"{v.low:.3f}" if v.low == v.high else f"[{v.low:.3f}, {v.high:.3f}]"
        targets.add_row(v.what, f"{v.limit:.2f}", value, v.answer)
    return [measured, targets]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--depths", default="4,8,12")
    parser.add_argument("--time-depth", type=int, default=2, help="blocks of the timed nets")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds of steps; 0: no timing")
    parser.add_argument("--no-peaks", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a first look: depths 4,8 and 10 rounds")
    parser.add_argument("--out", type=Path, default=Path("bench_activation.json"), help="where the figures go")
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, metavar=("MODE", "DEPTH"), help="one peak, in this process")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    if a.one:
        print(json.dumps(peak_of(a.one[0], int(a.one[1]), a.frozen)))
        return
    out = a.out.resolve()
    modes, depths = a.modes.split(","), [int(d) for d in a.depths.split(",")]
    if a.quick:
        depths, a.rounds = [4, 8], min(a.rounds, 10)
    if unknown := set(modes) - set(MODES):
        sys.exit(f"unknown modes {sorted(unknown)}; there are {', '.join(MODES)}")
    modes = list(dict.fromkeys(["plain", *modes]))
    peaks: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    times: dict[str, Any] = {}
    replayed = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        if not a.no_peaks:
            peaks = measure_peaks(modes, depths, False, progress)
            some = [m for m in modes if m in ("native", "swap", "recompute_swap_inputs")]
            frozen = measure_peaks(some, depths, True, progress)
        if a.rounds:
            times = measure_steps(modes, a.time_depth, a.rounds, progress)
            if "selective" in modes:
                replayed = seconds_of_what_is_replayed("selective", a.time_depth, 10)
        os.chdir(out.parent)
    answers = verdicts(times, peaks, frozen, replayed)
    console = Console()
    for table in tables(times, peaks, frozen, answers):
        console.print(table)
    figures = {
        "mindspore": ms.__version__,
        "time_depth": a.time_depth,
        "step_seconds": times,
        "step_ratio": {m: [statistics.median(ratio(times, m)), *interval(ratio(times, m))] for m in times},
        "selective_replays_seconds": replayed,
        "peaks": peaks,
        "peaks_frozen": frozen,
        "targets": [{**v.__dict__, "answer": v.answer} for v in answers],
    }
    out.write_text(json.dumps(figures, indent=1))
    console.print(f"{len(times.get('plain', []))} rounds; figures in {out}")


if __name__ == "__main__":
    main()
