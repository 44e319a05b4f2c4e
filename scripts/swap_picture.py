#!/usr/bin/env python3
"""The picture of docs/swap.md: a traced training step of the net of `bench_activation.py`, all blocks swapped.

Steps before it warm up; of the traced ones the shortest is drawn, since other load on the machine shows.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from bench_activation import batch, build, step

from hyper_parallel import SwapManager
from hyper_parallel.report.run import Run, read_run
from hyper_parallel.report.run_plot import draw_run

WARM_UP, TRACED = 3, 5
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "swap.png"


def traced_steps(depth: int, file: Path) -> list[tuple[float, float]]:
    """Trace steps into a file; gives the begin and the end of each, in seconds of the trace."""
    net, x = build(depth, "swap"), batch()
    for _ in range(WARM_UP):
        step(net, x)
    SwapManager().reset()
    ends = [0.0]
    begin = time.perf_counter()
    with SwapManager().trace(file):
        for _ in range(TRACED):
            step(net, x)
            ends.append(time.perf_counter() - begin)
    return list(itertools.pairwise(ends))


def shortest(run: Run, steps: list[tuple[float, float]]) -> Run:
    """The part of the run that is its shortest step."""
    return run.between(*min(steps, key=lambda step: step[1] - step[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=8, help="blocks in the net (default: 8)")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the PNG file (default: the picture of the docs)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        steps = traced_steps(options.depth, file)
        picture = draw_run(shortest(read_run(file), steps))
    picture.savefig(options.out, dpi=110, facecolor="white")
    print(options.out)


if __name__ == "__main__":
    main()
