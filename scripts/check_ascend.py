#!/usr/bin/env python3
"""Check this library on an Ascend device, and print one table to paste into a report.

    python scripts/check_ascend.py                  # on a machine with a device
    python scripts/check_ascend.py --json > check.json

It trains small nets and a stack of transformer blocks, plain and under each mode:

- exactness: losses, gradients and parameters after three optimizer steps are plain's, to the last bit. This needs
  deterministic operators, which are switched on (`set_deterministic`, HCCL_DETERMINISTIC).
- ordering: inputs are another constant in every round, so that whatever is read too early, or from memory that was used
  before, is a value of another round. The copies are larger than what is computed meanwhile.
- peak memory: MindSpore's own figures for a stack of blocks; what is saved, beside what the bytes on host promise.
- overlap: time of a step, and of the copies alone.

On the emulated device all figures of time say nothing about a real one; the table is labelled.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

os.environ.setdefault("HCCL_DETERMINISTIC", "true")  # before MindSpore is imported

import mindspore as ms
from ascend_training import MODES, NETS, SWAPPING, Size, least, measured, train
from mindspore import Tensor, mint, nn

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy
from ms_ops.dry_run import is_emulated

SIZES = {
    "small": Size(blocks=4, width=64, heads=4, batch=2, tokens=32),
    "medium": Size(blocks=8, width=1024, heads=8, batch=4, tokens=1024),
    "large": Size(blocks=8, width=4096, heads=32, batch=1, tokens=4096),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    what: str
    figure: str
    answer: str
    """`ok`, `FAILED`, or empty where there is only a figure."""


def row(check: str, what: str, figure: str, good: bool | None = None) -> Row:
    return Row(check, what, figure, "" if good is None else "ok" if good else "FAILED")


def choose_device() -> None:
    """Use the Ascend device, or end with what is missing."""
    if os.environ.get("MS_SIMULATION_LEVEL"):
        sys.exit("check_ascend.py: MS_SIMULATION_LEVEL is set, so that nothing would be computed; unset it")
    try:
        ms.set_device("Ascend")
        (mint.ones((2,)) + 1).asnumpy()
    except RuntimeError as error:
        sys.exit(
            "check_ascend.py: no Ascend device can be used here. It needs a device with its driver, CANN, and a "
            "MindSpore that was built for it. Without a device it runs on the emulated one:\n"
            "  bash scripts/ascend_emulator/run.sh python scripts/check_ascend.py --size small\n"
            f"MindSpore says: {str(error).strip().splitlines()[0]}"
        )
    ms.set_deterministic(True)


def about() -> dict[str, str]:
    """Versions, device and settings."""
    try:
        device = ms.hal.get_device_name(0, "Ascend")
    except (RuntimeError, ValueError):
        device = "unknown"
    found = {
        "device": f"{device} (EMULATED)" if is_emulated() else device,
        "CANN": _cann_version(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    for name in ("mindspore", "hyper-parallel", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["settings"] = "deterministic, HCCL_DETERMINISTIC=" + os.environ["HCCL_DETERMINISTIC"]
    return found


def _cann_version() -> str:
    home = os.environ.get("ASCEND_HOME_PATH", "")
    for name in ("version.cfg", "compiler/version.info", "runtime/version.info"):
        try:
            with open(os.path.join(home, name), encoding="utf-8") as file:
                return next((line.split("=", 1)[1].strip() for line in file if "=" in line), "unknown")
        except OSError:
            continue
    return "unknown"


def exactness() -> Iterator[Row]:
    size = Size()
    for net in NETS:
        SwapManager().configure(min_bytes=0, pending=1024, window=16384)
        plain = train(net, "plain", size)
        for mode in ("recompute", *SWAPPING):
            moved_before = SwapManager().stats().offloaded_bytes
            equal = train(net, mode, size) == plain
            moved = SwapManager().stats().offloaded_bytes - moved_before
            good = equal and (moved > 0) == (mode in SWAPPING)
            words = "equal to plain" if equal else "NOT equal to plain"
            yield row("exactness", f"{net}, {mode}", f"{words}, {moved} bytes moved", good)


class Squares(nn.Cell):
    """Saves its input; its gradient is a known multiple of it."""

    def construct(self, x: Tensor) -> Tensor:
        return x * x


def ordering(rounds: int, elements: int) -> Iterator[Row]:
    """Each region gets x + i, a constant c + i; the gradient of the sum of squares is the sum of 2 * (c + i)."""
    SwapManager().configure(min_bytes=0, pending=4 * elements, window=4 * elements)
    regions = [activation_policy(CheckpointPolicy.MUST_SWAP)(Squares()) for _ in range(6)]

    def forward(x: Tensor) -> Tensor:
        total = x * 0
        for index, region in enumerate(regions):
            total = total + region(x + index)
        return total.sum()

    gradient = ms.grad(forward)
    moved, found = SwapManager().stats().offloaded_bytes, []
    for number in range(rounds):
        found.append((number + 1, gradient(mint.full((elements,), float(number + 1)))))
    wrong = sum(
        bool((value.asnumpy() != sum(2 * (constant + index) for index in range(len(regions)))).any())
        for constant, value in found
    )
    moved = SwapManager().stats().offloaded_bytes - moved
    figure = f"{wrong} of {rounds} rounds wrong, {moved / 2**20:.1f} MB moved"
    yield row("ordering", f"{len(regions)} regions of {4 * elements / 2**20:g} MB", figure, not wrong and moved > 0)


def copy_gbps(nbytes: int, to_device: bool) -> float:
    """Of one large copy between pinned memory and the device."""
    host = mint.empty((nbytes // 4,), dtype=ms.float32, device="CPU", pin_memory=True)
    device = mint.zeros((nbytes // 4,))
    target, source = (device, host) if to_device else (host, device)
    target.copy_(source, non_blocking=True)
    ms.runtime.synchronize()
    begin, times = time.perf_counter(), 5
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    ms.runtime.synchronize()
    return times * nbytes / (time.perf_counter() - begin) / 1e9


def memory_and_overlap(size: Size, steps: int) -> Iterator[Row]:
    block_bytes = 4 * size.batch * size.tokens * size.width
    SwapManager().configure(min_bytes=block_bytes, fuse_below=0, pending=block_bytes, window=block_bytes)
    found = {mode: (least if mode == "swap" else measured)(mode, size, steps) for mode in MODES}
    plain, native = found["plain"], found["native_recompute"]
    for mode, each in found.items():
        drop = plain["peak"] - each["peak"]
        figure = f"{each['peak'] / 2**20:.1f} MB, reserved {each['reserved'] / 2**20:.1f}"
        figure += f", {each['peak'] / native['peak']:.3f} x native recompute"
        good = each["peak"] <= 1.05 * native["peak"] if mode == "swap" else None
        yield row("peak memory", mode, figure, good)
        if mode == "swap":
            promised = each["on_host"] - each["window"]
            yield row("peak memory", "drop / bytes on host less the window", f"{drop / promised:.3f}")
    nbytes = max(2**20, 16 * block_bytes)
    speeds = {to: copy_gbps(nbytes, to_device) for to, to_device in (("to host", False), ("to device", True))}
    for to, gbps in speeds.items():
        yield row("overlap", f"copies {to}, alone", f"{gbps:.1f} GB/s")
    for mode, each in found.items():
        copies = each["moved"] / 2 / 1e9 * sum(1 / gbps for gbps in speeds.values())
        figure = f"{each['seconds'] * 1e3:.1f} ms, {each['seconds'] / plain['seconds']:.2f} x plain"
        yield row("overlap", f"step, {mode}", figure + (f"; copies alone {copies * 1e3:.1f} ms" if copies else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="medium", help="of the measured transformer")
    parser.add_argument("--steps", type=int, default=5, help="that are measured, per mode")
    parser.add_argument("--rounds", type=int, default=20, help="of the ordering check")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    a = parser.parse_args()
    if a.steps < 1 or a.rounds < 1:
        sys.exit("check_ascend.py: --steps and --rounds must be at least 1")
    choose_device()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore leaves folders in the working directory
        elements = 2**12 if a.size == "small" else 2**24
        rows = [*exactness(), *ordering(a.rounds, elements), *memory_and_overlap(SIZES[a.size], a.steps)]
        os.chdir(before)
    if a.json:
        about_size = {"size": asdict(SIZES[a.size]), "emulated": is_emulated()}
        print(json.dumps({"about": about(), **about_size, "rows": [asdict(each) for each in rows]}, indent=1))
    else:
        print(as_markdown(rows, SIZES[a.size]))
    if any(each.answer == "FAILED" for each in rows):
        sys.exit(1)


def as_markdown(rows: list[Row], size: Size) -> str:
    """One table; the first rows say what was checked."""
    head = [row("about", name, value) for name, value in about().items()]
    head.append(row("about", "net", ", ".join(f"{name} {value}" for name, value in asdict(size).items())))
    cells = [("check", "what", "figure", "answer"), *((r.check, r.what, r.figure, r.answer) for r in [*head, *rows])]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
