#!/usr/bin/env python3
"""What one training step asks of the device, stream by stream, in the order in which each stream runs it.

    bash scripts/ascend_emulator/run.sh python scripts/ascend_calls.py > tests/ascend/proof/golden_step.txt

The net is an MLP of three blocks under swap, with room for one tensor on its way to host. Steps before the printed one
have pinned all memory and made all events. A record has the name of its stream and a number; records that no other
stream waits for (MindSpore makes some by itself, at no fixed place) are left out. Operators between two lines are one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ascend_process import environment, need_emulator

NAMES = ("to host", "to device")
RECORD, WAIT = "aclrtRecordEvent", "aclrtStreamWaitEvent"


def step() -> None:
    """The program whose calls are looked at; its last step is marked."""
    import ascsim
    import mindspore as ms
    from ascend_training import Size, Trainer, batch, build

    from hyper_parallel import SwapManager

    ms.set_device("Ascend")
    size = Size(blocks=3, width=16, batch=2, tokens=8)
    SwapManager().configure(min_bytes=2048, pending=1024, window=8192)
    trainer, x = Trainer(build("mlp", "swap", size)), batch(size, 0)
    for _ in range(3):
        trainer.step(x)
        ms.runtime.synchronize()
    ascsim.mark("step")
    trainer.step(x)
    ms.runtime.synchronize()
    ascsim.mark("")


def calls_of_a_step() -> list[dict[str, Any]]:
    """Run the program, and give its calls on streams."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        command = [sys.executable, os.path.abspath(__file__), "--program"]
        variables = environment(ASCSIM_TRACE_FILE=str(trace))
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the program failed:\n{done.stderr[-3000:]}")
        calls = [json.loads(line) for line in trace.read_text().splitlines()]
    return [call for call in sorted(calls, key=lambda call: call["index"]) if call["mark"] == "step"]


def as_text(calls: list[dict[str, Any]]) -> str:
    """Stream by stream."""
    on_streams = [call for call in calls if call["stream"] >= 0]
    roles: dict[int, str] = {}
    for kind, name in zip(("D2H", "H2D"), NAMES, strict=True):
        for call in on_streams:
            if call["kind"] == kind and call["bytes"] >= 1024:
                roles.setdefault(call["stream"], name)
    waited_for = _waits(on_streams)
    numbers: dict[str, int] = {}
    names: dict[int, str] = {}
    for call in on_streams:
        if call["index"] in waited_for.values():
            role = roles.get(call["stream"], "owner")
            numbers[role] = numbers.get(role, 0) + 1
            names[call["index"]] = f"{role} {numbers[role]}"
    lines: dict[str, list[str]] = {"owner": [], **{name: [] for name in NAMES}}
    for call in on_streams:
        own = lines[roles.get(call["stream"], "owner")]
        if call["kind"] in ("D2H", "H2D"):
            own.append(f"copy {call['kind']} {call['bytes']} bytes")
        elif call["index"] in names:
            own.append(f"record {names[call['index']]}")
        elif call["index"] in waited_for:
            own.append(f"wait for {names[waited_for[call['index']]]}")
        elif call["reads"] or call["writes"]:
            if own and own[-1].endswith("operators"):
                own[-1] = f"{int(own[-1].split()[0]) + 1} operators"
            else:
                own.append("1 operators")
    parts = [f"{stream}:\n" + "".join(f"  {line}\n" for line in found) for stream, found in lines.items()]
    return "\n".join(parts)


def _waits(calls: list[dict[str, Any]]) -> dict[int, int]:
    """By a wait of one stream for another: the record that it waits for, the last one before it."""
    last: dict[int, dict[str, Any]] = {}
    found = {}
    for call in calls:
        if call["name"].startswith(RECORD):
            last[call["event"]] = call
        elif call["name"].startswith(WAIT) and last.get(call["event"], call)["stream"] != call["stream"]:
            found[call["index"]] = last[call["event"]]["index"]
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--program"]:
        step()
    else:
        need_emulator()
        print(as_text(calls_of_a_step()), end="")
