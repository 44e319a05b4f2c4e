#!/usr/bin/env python3
"""Peaks, schedules and host costs of the Ascend back end, on the emulated device.

    bash scripts/ascend_emulator/run.sh python scripts/bench_ascend.py --json docs/ascend_bench.json

- Peaks: MindSpore's own `max_memory_allocated()` over training steps of 8 blocks, with reserved bytes beside it; plain,
  `Cell.recompute`, and the modes. The measured drop is that of the peak below plain's; `ascend_peaks.py` says how it is
  predicted.
- Schedules: operators take a fixed time, and copies have a bandwidth. First one at which the copies fit under
  computation, then half of one at which they just do. `limit` is plain's step plus max(0, bytes / bandwidth -
  computation), of forward for copies to host, of backward for copies to the device, with the bytes that were copied.
  Plain and swap take turns in one process; medians.
- Host: the main thread's processor time to queue a step, and the ACL calls of a step, beyond plain's, per swapped
  tensor; and the calls of a step with which the host waits for the device. The time is also given beyond that of
  regions that keep what they save: where saved tensors are watched, MindSpore runs its front end on the main thread.

All figures are of the emulator: they say how work is queued, not how fast a device is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindspore as ms
from ascend_peaks import peaks
from ascend_process import environment, need_emulator
from ascend_training import MODES, Size, Trainer, batch, build
from rich.console import Console
from rich.table import Table

from hyper_parallel import SwapManager

SIZES = {
    "small": Size(blocks=6, width=32, heads=4, batch=2, tokens=32),
    "large": Size(blocks=8, width=64, heads=4, batch=2, tokens=64),
}
OPERATOR_US = 1500
"""Far above what the emulator needs to compute one of these operators, so that a step takes what is asked for."""


def _finish() -> None:
    ms.runtime.synchronize()


def _seconds(run: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        _finish()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _copied(trainer: Trainer, x: Any) -> tuple[int, int]:
    """Bytes that a step copies to host, and to the device."""
    import ascsim

    _finish()
    ascsim.reset_counters()
    trainer.step(x)
    _finish()
    counters = ascsim.counters()
    return counters["d2h_async_bytes"], counters["h2d_async_bytes"]


def schedules(size: Size, rounds: int, pending: float = 2, window: float = 2) -> dict[str, Any]:
    """With room for so many regions' bytes on their way to host, and loaded ahead."""
    import ascsim

    ascsim.set_knob("ASCSIM_OP_DELAY_US", OPERATOR_US)
    x = batch(size, 0)
    plain, swap = (Trainer(build("transformer", mode, size)) for mode in ("plain", "swap"))
    SwapManager().configure(min_bytes=1024)
    swap.step(x)
    _finish()
    saved = SwapManager().stats().resident_peak_bytes // size.blocks
    SwapManager().configure(min_bytes=1024, pending=int(pending * saved), window=int(window * saved))
    for trainer in (plain, swap, plain, swap):
        trainer.step(x)
        _finish()
    sent, loaded = (of_swap - of_plain for of_swap, of_plain in zip(_copied(swap, x), _copied(plain, x), strict=True))
    forward = _seconds(lambda: plain.net(x), rounds)
    backward = _seconds(lambda: plain.gradient(x), rounds) - forward
    # The last region isn't sent: what is computed beside copies is the rest.
    fitting = {"to host": sent / (0.8 * forward), "to device": loaded / (0.8 * backward)}
    found: dict[str, Any] = {
        "size": asdict(size),
        "regions_pending": pending,
        "regions_window": window,
        "operator_us": OPERATOR_US,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "cases": [],
    }
    for case, to_host, to_device in (
        ("copies fit", 1.0, 1.0),
        ("half bandwidth to host", 0.4, 1.0),
        ("half bandwidth to the device", 1.0, 0.4),
    ):
        bandwidths = fitting["to host"] * to_host, fitting["to device"] * to_device
        ascsim.set_knob("ASCSIM_D2H_GBPS", bandwidths[0] / 1e9)
        ascsim.set_knob("ASCSIM_H2D_GBPS", bandwidths[1] / 1e9)
        times: dict[str, list[float]] = {"plain": [], "swap": []}
        for _ in range(rounds):
            times["plain"].append(_seconds(lambda: plain.step(x), 1))
            times["swap"].append(_seconds(lambda: swap.step(x), 1))
        plain_step, swap_step = statistics.median(times["plain"]), statistics.median(times["swap"])
        sent, loaded = _copied(swap, x)
        late = max(0.0, sent / bandwidths[0] - forward) + max(0.0, loaded / bandwidths[1] - backward)
        limit = plain_step + late
        found["cases"].append(
            {
                "case": case,
                "bytes_sent": sent,
                "bytes_loaded": loaded,
                "to_host_gbps": bandwidths[0] / 1e9,
                "to_device_gbps": bandwidths[1] / 1e9,
                "plain_seconds": plain_step,
                "swap_seconds": swap_step,
                "limit_seconds": limit,
                "swap_by_limit": swap_step / limit,
                "at_most": 1.10 if late else 1.05,
            }
        )
    return found


def hosts(size: Size, rounds: int) -> dict[str, Any]:
    """What a step costs the host, each tensor as a transfer of its own, and small ones together."""
    cases = {
        "each tensor on its own": {"fuse_below": 0, "pending": "128KiB"},
        "small tensors together": {"pending": "128KiB"},
    }
    return {case: host(size, rounds, **settings) for case, settings in cases.items()}


def _queueing(trainers: dict[str, Trainer], x: Any, rounds: int) -> dict[str, float]:
    """Seconds of this thread to queue a step, medians."""
    found: dict[str, list[float]] = {mode: [] for mode in trainers}
    for _ in range(rounds):
        for mode, trainer in trainers.items():
            begin = time.thread_time()
            trainer.step(x)
            found[mode].append(time.thread_time() - begin)
            _finish()
    return {mode: statistics.median(times) for mode, times in found.items()}


def host(size: Size, rounds: int, **settings: Any) -> dict[str, Any]:
    """Of steps after the first ones."""
    import ascsim

    x = batch(size, 0)
    SwapManager().configure(min_bytes=1024, window="1MiB", **settings)
    trainers = {mode: Trainer(build("transformer", mode, size)) for mode in ("plain", "swap")}
    calls: dict[str, Any] = {}
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step(x)
        _finish()
    queueing = _queueing(trainers, x, rounds)
    for mode, trainer in trainers.items():
        SwapManager().reset()
        ascsim.reset_counters()
        trainer.step(x)
        time.sleep(0.5)  # everything is queued, and nobody has waited for it
        calls[mode] = ascsim.counters()
        _finish()
    stats = SwapManager().stats()
    tensors = calls["swap"]["d2h_async"] - calls["plain"]["d2h_async"]
    more = {
        name: count - calls["plain"]["calls"].get(name, 0)
        for name, count in calls["swap"]["calls"].items()
        if count != calls["plain"]["calls"].get(name, 0)
    }
    waits = {name: calls["swap"]["host_syncs"][name] - count for name, count in calls["plain"]["host_syncs"].items()}
    SwapManager().configure(min_bytes=2**40)  # regions watch what is saved, and keep all of it
    for _ in range(3):
        trainers["swap"].step(x)
        _finish()
    kept = _queueing({"swap": trainers["swap"]}, x, rounds)["swap"]
    return {
        "size": asdict(size),
        "tensors": tensors,
        "host_us_per_tensor": (queueing["swap"] - queueing["plain"]) * 1e6 / tensors,
        "host_us_per_tensor_beyond_watching": (queueing["swap"] - kept) * 1e6 / tensors,
        "acl_calls_per_tensor": sum(more.values()) / tensors,
        "acl_calls_beyond_plain": more,
        "host_waits_beyond_plain": waits,
        "late_loads": stats.late_loads,
    }


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "peaks": lambda rounds: peaks(tuple(MODES)),
    "schedule, small": lambda rounds: schedules(SIZES["small"], rounds),
    "schedule, large": lambda rounds: schedules(SIZES["large"], rounds),
    "host": lambda rounds: hosts(SIZES["small"], rounds),
}
MARK = "found: "


def in_a_process(part: str, rounds: int) -> dict[str, Any]:
    variables = environment(ASCSIM_RACES="off" if part != "peaks" else "report")
    command = [sys.executable, os.path.abspath(__file__), "--part", part, "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{part} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, float, bool]]:
    """What, target, measured, whether it holds."""
    rows: list[tuple[str, str, float, bool]] = []
    if "peaks" in found:
        for case, each in found["peaks"]["cases"].items():
            value, drop = each["swap_by_native"], each["drop_by_predicted"]
            rows.append((f"peak, {case}: swap / Cell.recompute", "<= 1.05", value, value <= 1.05))
            rows.append((f"drop, {case}: measured / predicted", ">= 0.99", drop, drop >= 0.99))
    for name in (name for name in found if name.startswith("schedule")):
        for case in found[name]["cases"]:
            value, limit = case["swap_by_limit"], case["at_most"]
            what = "step / plain" if limit < 1.1 else "step / limit"
            rows.append((f"{name}, {case['case']}: {what}", f"<= {limit:.2f}", value, value <= limit))
    if "host" in found:
        for case, each in found["host"].items():
            waits = sum(each["host_waits_beyond_plain"].values())
            rows.append((f"{case}: host waits for the device in a step", "0", waits, waits == 0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(name.replace(", ", " ") for name in PARTS), help="some of them")
    parser.add_argument("--rounds", type=int, default=9, help="of timed steps")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    a = parser.parse_args()
    need_emulator()
    if a.part:
        ms.set_device("Ascend")
        print(MARK + json.dumps(PARTS[a.part](a.rounds)))
        return
    chosen = [name for name in PARTS if name.replace(", ", " ") in a.parts.split(",")]
    found = {part: in_a_process(part, a.rounds) for part in chosen}
    table = Table(title="emulated")
    for heading in ("what", "target", "measured", ""):
        table.add_column(heading)
    for what, target, value, holds in verdicts(found):
        table.add_row(what, target, f"{value:.3f}", "holds" if holds else "[bold red]MISSED")
    if "host" in found:
        for case, each in found["host"].items():
            for name in ("host_us_per_tensor", "host_us_per_tensor_beyond_watching", "acl_calls_per_tensor"):
                table.add_row(f"{case}: {name.replace('_', ' ')}", "", f"{each[name]:.1f}", "")
    Console().print(table)
    if a.json:
        a.json.write_text(json.dumps({"emulated": True, "mindspore": ms.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
