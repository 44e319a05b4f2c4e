#!/usr/bin/env python3
"""Take every ordering action of the Ascend back end out in turn, and see whether anybody notices.

    bash scripts/ascend_emulator/run.sh python scripts/mutate_ascend.py --json docs/ascend_mutations.json

The actions are the functions of `ms_ops.ascend.order`, found there, so that a new one can't be forgotten. With one of
them doing nothing, the scenarios of `ascend_scenarios.py` run under random schedules until something shows: a race,
numbers other than plain's, an error, a crash, a process that hangs. An action that nothing shows the lack of, or that
no scenario asks for, is a survivor: it is useless, or the proof is too weak. The exit status is 1 if there is one.
"""

import argparse
import concurrent.futures
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mindspore as ms
from ascend_process import need_emulator
from ascend_scenarios import in_a_process
from rich.console import Console
from rich.table import Table

from ms_ops.ascend import order

SHOWING = (
    "mlp, swap",
    "file tier, little pinned memory",
    "an engine breaks",
    "abandoned forwards",
    "two owners",
    "settings change",
    "mlp, selective_swap",
    "mlp, recompute_swap_inputs",
    "transformer, swap, loose limits",
    "transformer, swap, verified",
)
"""Scenarios in which copies are ordered in different ways, those that show most first."""


@dataclass(frozen=True)
class Mutation:
    """What taking one action out has shown."""

    action: str
    caught_by: str
    """`race`, `numbers`, `error`, `crash`; empty for a survivor."""
    how: str
    """In words."""
    where: str
    """Scenario and schedule."""
    calls: int
    """How often it was asked for until then."""
    seconds: float


def actions() -> list[str]:
    """Every ordering action that there is, in the order in which they are written."""
    found = inspect.getmembers(order, inspect.isfunction)
    own = [(inspect.getsourcelines(each)[1], name) for name, each in found if each.__module__ == order.__name__]
    return [name for _, name in sorted(own)]


def mutate(action: str, seeds: Sequence[int]) -> Mutation:
    """Take one action out, under one schedule after the other, until that shows."""
    begin = time.perf_counter()
    seen, ended = in_a_process(seeds, without=action, names=SHOWING, timeout=300)
    calls = max((each.calls for each in seen), default=0)
    last = seen[-1] if seen else None
    caught_by, how = "", "no scenario asks for it" if not calls else "nothing shows that it is missing"
    if last is not None and last.races:
        caught_by, how = "race", last.races[0]
    elif last is not None and last.wrong:
        caught_by, how = "error" if last.wrong.startswith("raised") else "numbers", last.wrong
    elif ended:
        caught_by, how = "crash", ended
    where = f"{last.scenario}, seed {last.seed}" if last is not None and caught_by else ""
    print(f"{action}: {caught_by or 'SURVIVED'}: {how.splitlines()[0]} ({where})", file=sys.stderr, flush=True)
    return Mutation(action, caught_by, how, where, calls, round(time.perf_counter() - begin, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", nargs="*", metavar="ACTION", help=f"default: all of {', '.join(actions())}")
    parser.add_argument("--seeds", type=int, default=3, help="schedules for each before it counts as a survivor")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--json", type=Path, help="where the figures go")
    a = parser.parse_args()
    need_emulator()
    if unknown := set(a.actions) - set(actions()):
        sys.exit(f"unknown actions {sorted(unknown)}; there are {', '.join(actions())}")
    chosen = a.actions or actions()
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        results = list(pool.map(lambda action: mutate(action, range(1, a.seeds + 1)), chosen))
    table = Table(title="emulated: ordering actions, each taken out")
    for column in ("action", "caught by", "where", "how"):
        table.add_column(column, overflow="fold")
    for each in results:
        table.add_row(each.action, each.caught_by or "[bold red]SURVIVED", each.where, each.how.splitlines()[0][:150])
    caught = sum(bool(each.caught_by) for each in results)
    console = Console()
    console.print(table)
    console.print(f"score: {caught} of {len(results)} caught, {caught / len(results):.0%}")
    if a.json:
        figures = {"emulated": True, "mindspore": ms.__version__, "caught": caught, "of": len(results)}
        a.json.write_text(json.dumps({**figures, "actions": [asdict(each) for each in results]}, indent=1) + "\n")
    sys.exit(caught != len(results))


if __name__ == "__main__":
    main()
