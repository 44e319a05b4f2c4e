#!/usr/bin/env python3
"""What swapping costs and saves, beside plain and MindSpore's own recompute, on the net of `bench_activation.py`.

Peaks: as `bench_activation.py` defines them, each the median of `--repeat` fresh processes, with the floor beside it:
the gradients, what may be resident (the settings `window` and `pending`), and one block's own working set, which is
what a net of one block grows by when its hooks drop everything.

Steps: plain and swap in turn; the ratio per round, with a 95 % bootstrap interval of its median; the share of the step
that was spent waiting for copies.

Python: thread time of the main thread in what swapping adds to a forward and a backward, per swapped tensor, for
regions that save 24 tensors each. Waiting for operators is left out, and the clock's own time. The median of 100 steps
in each of 27 fresh processes, and the median of these. In some processes MindSpore's own threads spin, so that on two
cores a plain step takes 290 ms instead of 8, and every line of Python twice as long: these are shown, but don't count.

Largest batch: 24 blocks, batches of 4 x n x 256 tokens whose peak over 5 steps stays below that of plain at 4 x 256.

One configuration for all of it: the defaults.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_activation as reference
import mindspore as ms
import numpy as np
from bench_activation import Verdict, batch, build, interval, ratio, step
from mindspore import Tensor
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapGroup, SwapHandle
from ms_ops.autograd import wait_for_operators

SWAPPED = ("swap", "recompute_swap_inputs")


def drop_everything(net: reference.Net) -> None:
    """Hooks that keep nothing: what is left is the working set. The gradients are wrong."""
    forward = net.construct

    def construct(x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: (t.shape, t.dtype), lambda kept: ms.mint.empty(kept[0], dtype=kept[1])):
            return forward(x)

    object.__setattr__(net, "construct", construct)


reference.MODES["nothing_kept"] = drop_everything


def peak(mode: str, depth: int, repeat: int, frozen: bool = False, batches: int = 4) -> dict[str, Any]:
    """MB over 5 steps, the median of so many fresh processes."""
    found = []
    for _ in range(repeat):
        options = ["--one", mode, str(depth), str(batches), *(["--frozen"] if frozen else [])]
        found.append(fresh_process(*options))
    return {"mb": statistics.median(mb for mb, _ in found), "all_mb": [round(mb, 1) for mb, _ in found]}


def peak_here(mode: str, depth: int, batches: int, frozen: bool) -> tuple[float, float]:
    """As `bench_activation.peak_of`, with batches of another size."""
    reference.batch = lambda b=batches, s=256, d=512: batch(b, s, d)
    return reference.peak_of(mode, depth, frozen)


def measure_peaks(
    chosen: list[str], depths: list[int], repeat: int, kinds: list[str], progress: Progress
) -> dict[str, Any]:
    modes = {kind: chosen if kind == "trained" else [mode for mode in chosen if mode != "plain"] for kind in kinds}
    task = progress.add_task("peaks", total=sum(map(len, modes.values())) * len(depths))
    result: dict[str, Any] = {}
    for kind, names in modes.items():
        result[kind] = {}
        for mode in names:
            peaks = {}
            for depth in depths:
                peaks[depth] = peak(mode, depth, repeat, kind == "frozen")
                progress.advance(task)
            growth = float(np.polyfit(depths, [found["mb"] for found in peaks.values()], 1)[0])
            result[kind][mode] = {"peaks": peaks, "growth_mb": round(growth, 2)}
    return result


def measure_steps(depth: int, rounds: int, progress: Progress) -> dict[str, Any]:
    nets, x = {mode: build(depth, mode) for mode in ("plain", "swap")}, batch()
    times: dict[str, list[float]] = {mode: [] for mode in nets}
    waits = []
    task = progress.add_task("rounds of steps", total=rounds)
    for i in range(rounds + 1):
        for mode in ("plain", "swap") if i % 2 else ("swap", "plain"):
            before = SwapManager().stats().wait_seconds
            begin = time.perf_counter()
            step(nets[mode], x)
            took = time.perf_counter() - begin
            if i:  # the first round warms up
                times[mode].append(took)
                if mode == "swap":
                    waits.append((SwapManager().stats().wait_seconds - before) / took)
                    progress.advance(task)
    return {"seconds": times, "wait_share": waits}


class Chain(reference.nn.Cell):
    """Saves as many tensors as a transformer block."""

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(24):
            x = reference.ops.tanh(x)
        return x


def measure_direct_io(depth: int, rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Seconds per step with and without the page cache, each after a step that fills the files anew."""
    net, x = build(depth, "swap"), batch()
    times: dict[str, list[float]] = {"plain": [], "swap": []}  # the names that `ratio` compares
    task = progress.add_task("direct I/O", total=rounds)
    for i in range(rounds):
        for direct in (False, True) if i % 2 else (True, False):
            SwapManager().configure(direct_io=direct)
            step(net, x)
            begin = time.perf_counter()
            step(net, x)
            times["swap" if direct else "plain"].append(time.perf_counter() - begin)
        progress.advance(task)
    SwapManager().configure()
    return times


def fresh_process(*options: str) -> Any:
    """What this script prints with these options, in a process of its own."""
    run = subprocess.run(
        [sys.executable, os.path.abspath(__file__), *options],
        capture_output=True,
        text=True,
        env=dict(os.environ, MALLOC_MMAP_THRESHOLD_="1048576"),
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(options)} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


_SPINS_MS = 100
"""A plain step that takes longer shows that MindSpore's threads spin."""


def measure_python(processes: int, progress: Progress) -> dict[str, Any]:
    found = []
    task = progress.add_task("Python per tensor", total=processes)
    for _ in range(processes):
        found.append(fresh_process("--python"))
        progress.advance(task)
    quiet = [one["us"] for one in found if one["plain_ms"] < _SPINS_MS] or [one["us"] for one in found]
    return {"median_us": statistics.median(quiet), "processes": found}


def python_here(steps: int) -> dict[str, float]:
    """Microseconds of the main thread per tensor in all that swapping adds, and milliseconds of a plain step: medians.

    What the clock itself takes is measured beside each call, and left out: it is a call of the system.
    """
    main, spent, fetched = threading.get_ident(), [0.0], [0]

    def timed(function: Callable[..., Any], counts: bool = False) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if function.__name__ == "__exit__":
                wait_for_operators()  # that wait is no work of Python's
            before = time.thread_time()
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                end = time.thread_time()
                if threading.get_ident() == main:
                    spent[0] += (end - begin) - (begin - before)
                    fetched[0] += counts

        return wrapper

    places = (
        (SwapGroup, "save", False),
        (SwapGroup, "is_given", False),
        (SwapGroup, "passes", False),
        (SwapGroup, "__exit__", False),
        (SwapEngine, "open_group", False),
        (SwapEngine, "region_begins", False),
        (SwapHandle, "get", True),
    )
    x = Tensor(np.random.RandomState(0).randn(128, 128).astype(np.float32))
    plain = [Chain() for _ in range(3)]
    cells = [activation_policy(CheckpointPolicy.MUST_SWAP)(Chain()) for _ in range(3)]

    def run(cells: list[Any]) -> float:
        begin = time.perf_counter()
        ms.grad(lambda x: cells[2](cells[1](cells[0](x))).sum())(x).asnumpy()
        return time.perf_counter() - begin

    SwapManager().configure(min_bytes="16KiB", fuse_below=0)
    for _ in range(3):
        run(cells)
    found = []
    for cls, name, counts in places:
        setattr(cls, name, timed(getattr(cls, name), counts))
    for _ in range(steps):
        spent[0], fetched[0] = 0.0, 0
        run(cells)
        found.append(spent[0] / fetched[0] * 1e6)
    return {
        "us": round(statistics.median(found), 2),
        "least_us": round(min(found), 2),
        "plain_ms": round(statistics.median(run(plain) for _ in range(20)) * 1e3, 1),
    }


def largest_batches(limits: dict[str, int], progress: Progress) -> dict[str, Any]:
    """How many times plain's batch fits below plain's peak, at 24 blocks, looked for up to `limits`."""
    task = progress.add_task("largest batch", total=sum(limits.values()) + 1)
    ceiling = peak("plain", 24, 1)["mb"]
    progress.advance(task)
    found: dict[str, Any] = {"plain_mb": ceiling}
    for mode, most in limits.items():
        fits: dict[int, float] = {}
        for times in range(most, 0, -1):
            fits[times] = peak(mode, 24, 1, batches=4 * times)["mb"]
            progress.advance(task)
            if fits[times] < ceiling:
                break
        found[mode] = {"times": min(fits) if fits[min(fits)] < ceiling else 0, "peaks_mb": fits}
    return found


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found: list[Verdict] = []

    def at_most(what: str, limit: float, value: float, high: float | None = None) -> None:
        found.append(Verdict(what, limit, value, value if high is None else high))

    if steps := figures.get("steps"):
        at_most("step time, swap / plain", 1.02, *interval(ratio(steps["seconds"], "swap")))
        at_most("waits, share of the step", 0.02, *interval(steps["wait_share"]))
    if direct := figures.get("direct_io"):
        at_most("step time, page cache / direct I/O", 1.0, *interval([1 / value for value in ratio(direct, "swap")]))
    if peaks := figures.get("peaks"):
        trained, frozen = peaks.get("trained", {}), peaks.get("frozen", {})
        for mode in [mode for mode in SWAPPED if mode in trained and "native" in trained]:
            for depth, of_native in trained["native"]["peaks"].items():
                if depth in (8, 12):
                    value = trained[mode]["peaks"][depth]["mb"] / of_native["mb"]
                    at_most(f"peak at {depth} blocks, {mode} / native", 1.0, value)
            at_most(f"growth per block, {mode} / gradients", 1.03, trained[mode]["growth_mb"] / figures["gradients_mb"])
        for mode in [mode for mode in SWAPPED if mode in frozen and "native" in frozen]:
            value = frozen[mode]["growth_mb"] / frozen["native"]["growth_mb"]
            at_most(f"growth per block, frozen weights, {mode} / native", 0.15, value)
    if python := figures.get("python"):
        at_most("microseconds of Python per swapped tensor", 15, python["median_us"])
    if batches := figures.get("largest_batch"):
        for mode, times in (("swap", 4), ("recompute_swap_inputs", 5)):
            # a target of at least so many times, as a verdict of at most
            if mode in batches:
                at_most(f"{times} / largest batch under {mode}", 1.0, times / max(batches[mode]["times"], 0.1))
    return found


def tables(figures: dict[str, Any], answers: list[Verdict]) -> list[Table]:
    found = []
    for kind, modes in figures.get("peaks", {}).items():
        table = Table("mode", "peak MB (blocks: MB, floor)", "MB per block", title=f"peaks, {kind} weights")
        floor_of_one = figures["one_block_mb"]
        for mode, row in modes.items():
            gradients = figures["gradients_mb"] if kind == "trained" else 0
            texts = []
            for depth, value in row["peaks"].items():
                floor = gradients * depth + figures["resident_mb"] + floor_of_one
                texts.append(f"{depth}: {value['mb']:.0f} ({floor:.0f})")
            table.add_row(mode, ", ".join(texts), f"{row['growth_mb']:.2f}")
        found.append(table)
    if batches := figures.get("largest_batch"):
        table = Table("mode", "times plain's batch", "peaks MB", title="24 blocks, below plain's peak at 4 x 256")
        for mode in batches:
            if mode != "plain_mb":
                peaks = ", ".join(f"{times}: {mb:.0f}" for times, mb in batches[mode]["peaks_mb"].items())
                table.add_row(mode, str(batches[mode]["times"]), f"{peaks} (plain: {batches['plain_mb']:.0f})")
        found.append(table)
    table = Table("what", "at most", "measured", "answer", title="targets")
    for v in answers:
        table.add_row(
            v.what, f"{v.limit:.2f}", f"{v.low:.3f}" if v.low == v.high else f"[{v.low:.3f}, {v.high:.3f}]", v.answer
        )
    return [*found, table]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="peaks,steps,direct,python,batch", help="what is measured")
    parser.add_argument("--depths", default="4,8,12")
    parser.add_argument("--modes", default=f"plain,native,{','.join(SWAPPED)},nothing_kept", help="whose peaks")
    parser.add_argument("--weights", default="trained,frozen", help="the weights whose peaks are measured")
    parser.add_argument(
        "--batches",
        default="native=4,swap=5,recompute_swap_inputs=6",
        help="the largest batch is looked for downwards from so many times plain's",
    )
    parser.add_argument("--repeat", type=int, default=3, help="processes per peak")
    parser.add_argument("--time-depth", type=int, default=2, help="blocks of the timed nets")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("bench_swap.json"), help="figures; parts not measured stay")
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--python", action="store_true", help="the part of that name, in this process")
    parser.add_argument("--one", nargs=3, metavar=("MODE", "DEPTH", "BATCH"), help="one peak, in this process")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    if a.python:
        print(json.dumps(python_here(100)))
        return
    if a.one:
        print(json.dumps(peak_here(a.one[0], int(a.one[1]), int(a.one[2]), a.frozen)))
        return
    out, parts = a.out.resolve(), a.parts.split(",")
    if unknown := set(parts) - {"peaks", "steps", "direct", "python", "batch"}:
        sys.exit(f"unknown parts {sorted(unknown)}; there are peaks, steps, direct, python, batch")
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    settings = SwapManager().settings
    weights = build(1, "plain").trainable_params()
    figures["mindspore"] = ms.__version__
    figures["gradients_mb"] = sum(p.nbytes for p in weights) / 2**20
    figures["resident_mb"] = (settings.window + settings.pending) / 2**20
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        if "python" in parts:
            figures["python"] = measure_python(27, progress)
        if "steps" in parts:
            figures["steps"] = measure_steps(a.time_depth, a.rounds, progress)
        if "direct" in parts:
            figures["direct_io"] = measure_direct_io(a.time_depth, a.rounds // 2, progress)
        if "peaks" in parts:
            figures["one_block_mb"] = peak("nothing_kept", 1, a.repeat, frozen=True)["mb"]
            depths = [int(d) for d in a.depths.split(",")]
            found = measure_peaks(a.modes.split(","), depths, a.repeat, a.weights.split(","), progress)
            figures["peaks"] = {**figures.get("peaks", {}), **found}
        if "batch" in parts:
            limits = dict(each.split("=") for each in a.batches.split(","))
            figures["largest_batch"] = largest_batches({mode: int(most) for mode, most in limits.items()}, progress)
        os.chdir(out.parent)
    out.write_text(json.dumps(figures, indent=1))
    figures = json.loads(out.read_text(), object_hook=_with_numbers)
    answers = verdicts(figures)
    console = Console()
    for table in tables(figures, answers):
        console.print(table)
    figures["targets"] = [{**v.__dict__, "answer": v.answer} for v in answers]
    out.write_text(json.dumps(figures, indent=1))
    console.print(f"figures in {out}")


def _with_numbers(found: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


if __name__ == "__main__":
    main()
