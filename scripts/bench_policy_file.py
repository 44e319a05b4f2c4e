"""How long it takes to apply a policy file of 500 rules to a net of 2,000 cells, in seconds.

    python scripts/bench_policy_file.py             the first and the fastest of 5 applications of each file
    python scripts/bench_policy_file.py --json      the same as JSON

Each file is read from disk, validated, worked out for the net and attached to its cells; then it is removed. The files
differ in how their rules name cells: `mixed` takes every kind in turn, the others keep to one.
The first application compiles regular expressions and makes classes, the later ones find them. The time wanted is under
1 second for the first of `mixed`; the exit status is 1 if it isn't kept.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from mindspore import nn

from hyper_parallel import apply_policy

CELLS, RULES, WANTED = 2000, 500, 1.0
BLOCKS, PARTS = 100, 17  # a block, its parts, and a list with two experts: 20 cells

POLICIES = ("must_recompute", "must_swap", "must_save", "prefer_recompute")


class Part(nn.Cell):
    def construct(self, x):
        return x


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        for index in range(PARTS - 1):
            setattr(self, f"part{index}", Part())
        self.experts = nn.SequentialCell(Part(), Part())

    def construct(self, x):
        return self.experts(x)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Block() for _ in range(BLOCKS)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


KINDS: dict[str, Callable[[int], dict]] = {
    "paths": lambda n: {"cells": f"layers.{n % BLOCKS}.part{n % 16}"},
    "ranges": lambda n: {"cells": f"layers.[{n % 50}-{50 + n % 50}].{{part{n % 16},experts}}"},
    "any depth": lambda n: {"cells": f"**.part{n % 16}"},
    "layers": lambda n: {"layers": f"{n % BLOCKS}", "cells": f"part{n % 16}"},
    "classes": lambda n: {"class": "Part", "layers": f"{n % BLOCKS}"},
    "regular expressions": lambda n: {"cells": rf"re:layers\.{n % BLOCKS}\.(part{n % 16}|experts)"},
    "every cell": lambda n: {"cells": "**"},
}


def policy_of(kind: str) -> dict:
    kinds = [choose for name, choose in KINDS.items() if name != "every cell"] if kind == "mixed" else [KINDS[kind]]
    rules = [kinds[n % len(kinds)](n) | {"policy": POLICIES[n // 7 % len(POLICIES)]} for n in range(RULES)]
    return {"version": 1, "rules": rules}


def seconds(net: nn.Cell, path: Path) -> float:
    begin = time.perf_counter()
    plan = apply_policy(net, path)
    taken = time.perf_counter() - begin
    plan.remove()
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    net = Net()
    count = sum(1 for path, _ in net.cells_and_names() if path)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ["mixed", *KINDS]:
            path = Path(folder) / "policy.yaml"
            path.write_text(yaml.safe_dump(policy_of(kind)), encoding="utf-8")
            taken = [seconds(net, path) for _ in range(options.rounds)]
            found[kind] = {"first": taken[0], "fastest": min(taken)}
    if options.json:
        print(json.dumps({"cells": count, "rules": RULES, "seconds": found, "wanted": WANTED}, indent=2))
    else:
        print(f"{RULES} rules, {count} cells; first and fastest of {options.rounds}")
        for kind, each in found.items():
            print(f"{kind:>20}  {each['first']:.2f} s  {each['fastest']:.2f} s")
    return int(found["mixed"]["first"] >= WANTED)


if __name__ == "__main__":
    sys.exit(main())
