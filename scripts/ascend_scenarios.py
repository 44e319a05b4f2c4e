#!/usr/bin/env python3
"""Trainings on the emulated Ascend device under random schedules: numbers as in plain, and no race.

    bash scripts/ascend_emulator/run.sh python scripts/ascend_scenarios.py --seeds 50 --json races.json

For each seed every scenario runs with streams, copies and operators delayed at random. A scenario fails if its numbers
aren't those of plain training to the last bit, if bytes are left behind, or if the emulator's race checker reports
anything. `mutate_ascend.py` runs the same scenarios with one ordering action taken out.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mindspore as ms
from ascend_process import environment, need_emulator
from ascend_training import NETS, SWAPPING, Outcome, Size, Trainer, batch, build, outcome, train

from hyper_parallel import SwapManager
from ms_ops import back_ends
from ms_ops.ascend import order
from ms_ops.memory import container_bytes, ranks_on_this_host

SIZE = Size()
TIGHT = {"min_bytes": 0, "fuse_below": 0, "pending": 1024, "window": 16384}
"""Limits that everything runs into: each region's tensors leave, and come back in several pieces."""
IN_FLIGHT = TIGHT | {"pending": 2**20}
"""No region has to wait for the copies of those before it, so that all are on their way at a time."""
LOOSE = {"min_bytes": 0, "pending": 65536, "window": 65536}
FEW = 32768
"""Bytes of pinned memory for less than a region's tensors."""

Reference = Callable[[str], Outcome]


def same(net: str, mode: str, plain: Reference, **settings: Any) -> str:
    """Three optimizer steps; what differs from plain, in words."""
    SwapManager().configure(**settings)
    before = SwapManager().stats()
    wrong = _difference(train(net, mode, SIZE), plain(net))
    after = SwapManager().stats()
    moved = after.offloaded_bytes > before.offloaded_bytes and after.loaded_bytes > before.loaded_bytes
    return wrong or ("nothing was moved" if mode in SWAPPING and not moved else "")


def _difference(found: Outcome, plain: Outcome) -> str:
    wrong = [name for name, value in asdict(plain).items() if getattr(found, name) != value]
    return f"{', '.join(wrong)} differ from plain" if wrong else ""


def abandoned(plain: Reference) -> str:
    """Forwards without backward between steps: their copies are in flight when nobody needs the bytes any more."""
    SwapManager().configure(**IN_FLIGHT)
    trainer = Trainer(build("transformer", "swap", SIZE))
    done = []
    for step in range(3):
        for other in range(2):
            _abandon(trainer, batch(SIZE, 50 + other))
        done.append(trainer.step(batch(SIZE, step)))
    return _difference(outcome(trainer, done), plain("transformer"))


class _Abandoned(Exception):
    pass


def _abandon(trainer: Trainer, x: Any) -> None:
    """A forward whose graph is let go as soon as it is queued."""

    def forward(x: Any) -> None:
        trainer.net(x)
        raise _Abandoned

    with contextlib.suppress(_Abandoned):
        ms.value_and_grad(forward, None, tuple(trainer.net.trainable_params()))(x)
    gc.collect()


def settings_change(plain: Reference) -> str:
    """Between steps pinned memory goes back and is taken anew, while copies of an abandoned forward are in flight."""
    trainer = Trainer(build("transformer", "swap", SIZE))
    done = []
    for step in range(3):
        SwapManager().configure(**IN_FLIGHT | {"host_budget": 2**24 + 4096 * step})
        _abandon(trainer, batch(SIZE, 50 + step))
        SwapManager().configure(**IN_FLIGHT | {"host_budget": 2**25 + 4096 * step})
        done.append(trainer.step(batch(SIZE, step)))
    return _difference(outcome(trainer, done), plain("transformer"))


def engine_breaks(plain: Reference) -> str:
    """An interrupt breaks the engine while its copies are in flight, and the next one pins the same memory."""
    SwapManager().configure(**IN_FLIGHT)
    trainer = Trainer(build("transformer", "swap", SIZE))
    done = []
    for step in range(3):
        with slow_copies():
            _abandon(trainer, batch(SIZE, 50 + step))
            SwapManager().engine.breaks(KeyboardInterrupt())
            assert SwapManager().engine.ledger.broken is None, "it has been replaced"
        gc.collect()
        done.append(trainer.step(batch(SIZE, step)))
    return _difference(outcome(trainer, done), plain("transformer"))


def little_pinned_memory(plain: Reference) -> str:
    """Pinned memory in front of the file tier takes a few tensors: forward waits for files, backward for pinned blocks.

    A forward without a backward leaves blocks that nobody needs while they are still written.
    """
    with patch.object(back_ends, "STAGING_SHARE", container_bytes() // ranks_on_this_host() // FEW), slow_copies():
        SwapManager().configure()  # with the same settings as before the engine would stay
        SwapManager().configure(**TIGHT, tier="file")
        trainer = Trainer(build("mlp", "swap", SIZE))
        done = []
        for step in range(3):
            _abandon(trainer, batch(SIZE, 50 + step))
            done.append(trainer.step(batch(SIZE, step)))
        SwapManager().configure()
    return _difference(outcome(trainer, done), plain("mlp"))


@contextlib.contextmanager
def slow_copies() -> Iterator[None]:
    """Each copy takes a millisecond more, so that what doesn't wait for it comes first."""
    import ascsim

    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 1000)
    try:
        yield
    finally:
        ascsim.set_knob("ASCSIM_COPY_DELAY_US", float(os.environ.get("ASCSIM_COPY_DELAY_US", 0)))


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
    return "; ".join(filter(None, (_difference(outcome(trainers[net], done[net]), plain(net)) for net in NETS)))


SCENARIOS: dict[str, Callable[[Reference], str]] = {
    **{
        f"{net}, {mode}": lambda plain, net=net, mode=mode: same(net, mode, plain, **TIGHT)
        for net in NETS
        for mode in ("recompute", *SWAPPING)
    },
    "transformer, swap, loose limits": lambda plain: same("transformer", "swap", plain, **LOOSE),
    "transformer, swap, verified": lambda plain: same("transformer", "swap", plain, **TIGHT, verify=True),
    "mlp, swap, file tier": lambda plain: same("mlp", "swap", plain, **TIGHT, tier="file"),
    "abandoned forwards": abandoned,
    "settings change": settings_change,
    "an engine breaks": engine_breaks,
    "file tier, little pinned memory": little_pinned_memory,
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


def run_scenarios(seeds: Sequence[int], without: str, names: Sequence[str]) -> None:
    """Run scenarios in this process, and print a line for each that has run.

    With an action taken out it stops as soon as something shows.
    """
    import ascsim

    ms.set_device("Ascend")
    plain = {net: train(net, "plain", SIZE) for net in NETS}  # before anything is taken out
    calls = take_out(without) if without else [0]
    for seed in seeds:
        ascsim.set_knob("ASCSIM_SEED", seed)
        for name in names:
            begin = time.perf_counter()
            try:
                wrong = SCENARIOS[name](plain.__getitem__) or _taken()
            except Exception as error:
                wrong = f"raised {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                if not without:
                    traceback.print_exc()
            ms.runtime.synchronize()
            seen = Seen(seed, name, wrong, [race["text"] for race in ascsim.races()], calls[0], _since(begin))
            ascsim.forget_races()
            print(MARK + json.dumps(asdict(seen)), flush=True)
            if without and not seen.is_clean:
                os._exit(0)  # what is broken may not end by itself


def _taken() -> str:
    """What is wrong if slots are still taken after a scenario."""
    SwapManager().stats()  # lets go of what can be
    taken = SwapManager().engine.tier.used
    return f"{taken} bytes on host are still taken" if taken else ""


def _since(begin: float) -> float:
    return round(time.perf_counter() - begin, 2)


MARK = "seen: "


@dataclass(frozen=True)
class Seen:
    """What one scenario showed under one schedule."""

    seed: int
    scenario: str
    wrong: str
    """Numbers that differ, or what it raised."""
    races: list[str]
    """What the race checker reported."""
    calls: int
    """Of the action that was taken out, up to now."""
    seconds: float

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.races)


def in_a_process(
    seeds: Sequence[int], without: str = "", names: Sequence[str] = (), timeout: float = 3600
) -> tuple[list[Seen], str]:
    """Run scenarios (by default all) under some schedules, in a process of its own.

    Returns:
        What ran, and why the process ended early; empty if it didn't.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(ASCSIM_SEED=str(seeds[0]))
        variables.setdefault("ASCSIM_STRICT_PINNED", "1")  # nobody else pins memory here
        variables.setdefault("ASCSIM_JITTER_US", "100")  # steps have many operators, and most of their time is this
        variables.pop("MS_SIMULATION_LEVEL", None)
        command = [sys.executable, os.path.abspath(__file__), "--child", ",".join(map(str, seeds))]
        command += ["--without", without, "--scenarios", ";".join(names)]
        output = Path(folder, "output.txt")
        with output.open("w") as out:
            try:
                status = subprocess.run(
                    command, env=variables, cwd=folder, stdout=out, stderr=subprocess.STDOUT, timeout=timeout
                ).returncode
                ended = f"exit status {status}" if status else ""
            except subprocess.TimeoutExpired:
                ended = f"still ran after {timeout:.0f} seconds"
        lines = output.read_text("utf-8", "replace").splitlines()
    seen = [Seen(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    others = [line for line in lines if not line.startswith(MARK) and "CRITICAL" not in line]
    return seen, f"{ended}: {' / '.join(others[-3:])[:300]}" if ended else ""


_MOST_IN_A_PROCESS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="random schedules")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--scenarios", default="", help=f"some of: {'; '.join(SCENARIOS)}")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    a = parser.parse_args()
    names = [name.strip() for name in a.scenarios.split(";") if name.strip()] or list(SCENARIOS)
    need_emulator()
    if unknown := set(names) - set(SCENARIOS):
        sys.exit(f"unknown scenarios {sorted(unknown)}; there are {'; '.join(SCENARIOS)}")
    if a.child:
        run_scenarios([int(seed) for seed in a.child.split(",")], a.without, names)
        return
    seeds = range(a.first_seed, a.first_seed + a.seeds)
    # one process would find no pinned memory from its 19th schedule of "two owners" on: docs/ascend_proof.md
    size = min(_MOST_IN_A_PROCESS, -(-len(seeds) // a.jobs))
    parts = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        results = list(pool.map(lambda part: in_a_process(part, names=names), parts))
    seen = sorted((each for some, _ in results for each in some), key=lambda each: each.seed)
    ended = [why for _, why in results if why]
    clean = [seed for seed in seeds if _is_clean(seed, seen, len(names))]
    for each in seen:
        if not each.is_clean:
            print(f"seed {each.seed}, {each.scenario}: {each.wrong}", *each.races[:1], sep="\n  ")
    print(*ended, sep="\n")
    print(f"emulated: {len(clean)} of {a.seeds} random schedules without a race and with plain's numbers")
    if a.json:
        about = {"emulated": True, "mindspore": ms.__version__, "schedules": a.seeds, "clean": len(clean)}
        failed = [asdict(each) for each in seen if not each.is_clean]
        a.json.write_text(json.dumps({**about, "scenarios": names, "failed": failed, "ended": ended}, indent=1) + "\n")
    sys.exit(len(clean) != a.seeds)


def _is_clean(seed: int, seen: Sequence[Seen], scenarios: int) -> bool:
    own = [each for each in seen if each.seed == seed]
    return len(own) == scenarios and all(each.is_clean for each in own)


if __name__ == "__main__":
    main()
