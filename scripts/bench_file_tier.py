#!/usr/bin/env python3
"""The file tier with and without direct I/O: the reason for the default of the setting `direct_io`.

What the copy thread does in a step, without a net: write some slots, read them back in reverse, in files that are
there already. The two ways take turns; per way, the medians over the rounds of

- bandwidth in each direction, by the clock,
- processor time per GB that is written and read, which training has to share on a CPU backend.

With memory to spare, as the page cache has it until other processes need it.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ms_ops.file_tier import FileTier

WAYS = {"through the page cache": False, "direct": True}


def one_round(tier: FileTier, arrays: list[np.ndarray]) -> dict[str, float]:
    """Write all and read them back; the slots are given back for the next round."""
    nbytes = sum(array.nbytes for array in arrays)
    slots = [tier.take(array.nbytes) for array in arrays]
    begin, processor = time.perf_counter(), time.process_time()
    for slot, array in zip(slots, arrays, strict=True):
        tier.write(slot, [array])
    written = time.perf_counter()
    for slot, array in zip(reversed(slots), reversed(arrays), strict=True):
        buffer = np.empty(array.nbytes, np.uint8)
        tier.read(slot, buffer)
        assert buffer[-1] == array[-1]
    end, processor = time.perf_counter(), time.process_time() - processor
    for slot in slots:
        tier.give_back(slot)
    return {
        "write_gb_per_s": nbytes / 1e9 / (written - begin),
        "read_gb_per_s": nbytes / 1e9 / (end - written),
        "processor_s_per_gb": processor / (2 * nbytes / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mb", type=float, default=4, help="of one tensor")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--folder", help="where the files are; a disk. Default: the system's temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    nbytes = int(args.mb * 1e6)
    arrays = [np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8) for seed in range(args.tensors)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tiers = {way: FileTier(Path(folder), 2 * args.tensors * nbytes, direct=direct) for way, direct in WAYS.items()}
        for _ in range(args.rounds + 1):
            for way, tier in tiers.items():
                found[way].append(one_round(tier, arrays))
        for tier in tiers.values():
            tier.close()
    figures = {
        way: {name: statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]}
        for way, rounds in found.items()  # the first round allocates
    }
    table = Table(title=f"{args.tensors} x {args.mb:g} MB, medians of {args.rounds} rounds")
    for heading in ("", "write GB/s", "read GB/s", "processor s/GB"):
        table.add_column(heading, justify="right" if heading else "left")
    for way, row in figures.items():
        table.add_row(way, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"rounds": args.rounds, "tensor_mb": args.mb, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
