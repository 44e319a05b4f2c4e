#!/usr/bin/env python3
"""Trainings on the emulated Ascend device under random schedules: numbers as in plain, and no race.

    bash scripts/ascend_emulator/run.sh python scripts/ascend_scenarios.py --seeds 50 --json races.json

Each seed is a process of its own, which runs every scenario with streams, copies and operators delayed at random. A
scenario fails if its numbers aren't those of plain training to the last bit, if bytes are left behind, or if the
emulator's race checker reports anything. `mutate_ascend.py` runs the same scenarios with one ordering action taken out.
"""

import argparse
import concurrent.futures
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
from ascend_training import NETS, SWAPPING, Outcome, Size, Trainer, batch, build, digest, train
from rich.console import Console
from rich.progress import track

from hyper_parallel import SwapManager
from ms_ops.ascend import order

SIZE = Size()
TIGHT = {"min_bytes": 0, "fuse_below": 0, "pending": 1024, "window": 16384}
"""Limits that everything runs into: each region's tensors leave, and come back in several pieces."""
LOOSE = {"min_bytes": 0, "pending": 65536, "window": 65536}

Reference = Callable[[str], Outcome]


def same(net: str, mode: str, plain: Reference, **settings: Any) -> str:
    """Three optimizer steps; what differs from plain, in words."""
    SwapManager().configure(**settings)
    return _difference(train(net, mode, SIZE), plain(net))


def _difference(found: Outcome, plain: Outcome) -> str:
    wrong = [name for name, value in asdict(plain).items() if getattr(found, name) != value]
    return f"{', '.join(wrong)} differ from plain" if wrong else ""


def abandoned(plain: Reference) -> str:
    """Forwards without backward between steps: their copies are in flight when nobody needs the bytes any more."""
    SwapManager().configure(**TIGHT)
    trainer = Trainer(build("transformer", "swap", SIZE))
    done = []
    for step in range(3):
        for other in range(2):
            output, backward = ms.vjp(trainer.net, batch(SIZE, 50 + other))
            del output, backward
        gc.collect()  # a graph is part of a cycle
        done.append(trainer.step(batch(SIZE, step)))
    return _difference(_outcome(trainer, done), plain("transformer"))


def settings_change(plain: Reference) -> str:
    """Between steps pinned memory goes back and is taken anew, while copies of an abandoned forward are in flight."""
    trainer = Trainer(build("transformer", "swap", SIZE))
    done = []
    for step in range(3):
        SwapManager().configure(**TIGHT | {"host_budget": 2**24 + 4096 * step})
        output, backward = ms.vjp(trainer.net, batch(SIZE, 50 + step))
        del output, backward
        gc.collect()
        SwapManager().configure(**TIGHT | {"host_budget": 2**25 + 4096 * step})
        done.append(trainer.step(batch(SIZE, step)))
    return _difference(_outcome(trainer, done), plain("transformer"))


def two_owners(plain: Reference) -> str:
    """Two nets are trained in turn on two compute streams, over one pinned pool."""
    SwapManager().configure(**TIGHT)
    trainers = {net: Trainer(build(net, "swap", SIZE)) for net in NETS}
    streams = {net: ms.runtime.Stream() for net in NETS}
    done: dict[str, list[Any]] = {net: [] for net in NETS}
    for step in range(3):
        for net, trainer in trainers.items():
            with ms.runtime.StreamCtx(streams[net]):
                done[net].append(trainer.step(batch(SIZE, step)))
    ms.runtime.synchronize()
    return "; ".join(filter(None, (_difference(_outcome(trainers[net], done[net]), plain(net)) for net in NETS)))


def _outcome(trainer: Trainer, done: Sequence[Any]) -> Outcome:
    if live := SwapManager().stats().live_bytes:
        raise RuntimeError(f"{live} bytes are still swapped after the last step")
    return Outcome(
        tuple(float(loss.asnumpy()).hex() for loss, _ in done),
        tuple(digest(gradients) for _, gradients in done),
        digest(trainer.net.get_parameters()),
    )


SCENARIOS: dict[str, Callable[[Reference], str]] = {
    **{
        f"{net}, {mode}": lambda plain, net=net, mode=mode: same(net, mode, plain, **TIGHT)
        for net in NETS
        for mode in ("recompute", *SWAPPING)
    },
    "transformer, swap, loose limits": lambda plain: same("transformer", "swap", plain, **LOOSE),
    "transformer, swap, verified": lambda plain: same("transformer", "swap", plain, **TIGHT, verify=True),
    "abandoned forwards": abandoned,
    "settings change": settings_change,
    "two owners": two_owners,
}
"""By name: a function that says what is wrong, or nothing."""


def take_out(name: str) -> list[int]:
    """Let an ordering action do nothing; returns a list that holds how often it was asked for."""
    calls = [0]

    def nothing(*args: Any) -> bool:
        calls[0] += 1
        return True  # what is asked whether something has happened, says so at once

    setattr(order, name, nothing)
    return calls


def run_scenarios(without: str, names: Sequence[str]) -> dict[str, Any]:
    """Run scenarios in this process; stops at the first one that shows something if an action is taken out."""
    ms.set_device("Ascend")
    outcomes: dict[str, Outcome] = {}

    def plain(net: str) -> Outcome:
        if net not in outcomes:
            outcomes[net] = train(net, "plain", SIZE)
        return outcomes[net]

    for net in NETS:
        plain(net)  # before anything is taken out
    calls = take_out(without) if without else [0]
    wrong: dict[str, str] = {}
    for name in names:
        try:
            said = SCENARIOS[name](plain)
        except Exception as error:
            said = f"raised {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if not without:
                traceback.print_exc()
        if said:
            wrong[name] = said
            if without:
                break
    return {"wrong": wrong, "calls": calls[0]}


@dataclass(frozen=True)
class Seen:
    """What one process showed."""

    seed: int
    wrong: dict[str, str]
    """By scenario: numbers or errors."""
    races: list[str]
    """What the race checker reported."""
    ended: str
    """Why the process ended early; empty if it didn't."""
    calls: int
    """Of the action that was taken out."""
    seconds: float

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.races or self.ended)


def in_a_process(seed: int, without: str = "", names: Sequence[str] = (), timeout: float = 240) -> Seen:
    """Run scenarios (by default all) in a process of its own under the schedules of a seed."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        races = Path(folder, "races.json")
        environment = dict(os.environ, ASCSIM_SEED=str(seed), ASCSIM_RACES_FILE=str(races), GLOG_v="4")
        environment.pop("MS_SIMULATION_LEVEL", None)
        environment["PYTHONPATH"] = f"{Path(__file__).resolve().parents[1]}:{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, os.path.abspath(__file__), "--child", "--without", without]
        command += ["--scenarios", ";".join(names)]
        ended, found = "", {}
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            ended = f"still ran after {timeout:.0f} seconds"
        else:
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"wrong"')]
            found = json.loads(lines[-1]) if lines else {}
            if done.returncode or not lines:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                ended = f"exit status {done.returncode}: {last[:200]}"
        reports = [race["text"] for race in json.loads(races.read_text())] if races.exists() else []
    took = time.perf_counter() - begin
    return Seen(seed, found.get("wrong", {}), reports, ended, found.get("calls", 0), round(took, 1))


def in_processes(seeds: Sequence[int], jobs: int, **options: Any) -> list[Seen]:
    """The same for several seeds, some processes at a time."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(in_a_process, seed, **options) for seed in seeds]
        done = concurrent.futures.as_completed(running)
        console = Console(stderr=True)
        results = [each.result() for each in track(done, "schedules", len(running), console=console)]
    return sorted(results, key=lambda seen: seen.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="random schedules")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--scenarios", default="", help=f"some of: {'; '.join(SCENARIOS)}")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    a = parser.parse_args()
    names = [name.strip() for name in a.scenarios.split(";") if name.strip()] or list(SCENARIOS)
    if a.child:
        print(json.dumps(run_scenarios(a.without, names)))
        return
    if not os.environ.get("ASCSIM_LIBRARY"):
        sys.exit("no emulated device; start it with: bash scripts/ascend_emulator/run.sh python " + " ".join(sys.argv))
    if unknown := set(names) - set(SCENARIOS):
        sys.exit(f"unknown scenarios {sorted(unknown)}; there are {'; '.join(SCENARIOS)}")
    seen = in_processes(range(a.first_seed, a.first_seed + a.seeds), a.jobs, names=names)
    clean = sum(each.is_clean for each in seen)
    for each in seen:
        if not each.is_clean:
            print(f"seed {each.seed}: {each.ended} {each.wrong}", *each.races[:2], sep="\n  ")
    print(f"emulated: {clean} of {len(seen)} random schedules without a race and with plain's numbers")
    if a.json:
        a.json.write_text(json.dumps({"scenarios": names, "clean": clean, "seen": [asdict(each) for each in seen]}))
    sys.exit(clean != len(seen))


if __name__ == "__main__":
    main()
