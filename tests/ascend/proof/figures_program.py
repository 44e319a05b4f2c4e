"""Calls of a step, peaks, and trainings that lack memory; prints what was found.

With an argument, only what is out of device memory: MindSpore may crash afterwards.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import ascsim  # the emulator's own module
import mindspore as ms
from ascend_peaks import peaks
from ascend_training import Size, Trainer, batch, build
from bench_ascend import SIZES, hosts

from hyper_parallel import SwapManager

ms.set_device("Ascend")
LIMIT_MB = 80  # tests/ascend/proof/test_memory.py has it, too


def trained(mode: str, sequences: int = 4, **settings: Any) -> dict[str, Any]:
    """What two steps come to, or the error that ends them."""
    size = Size(blocks=8, width=64, heads=4, batch=sequences, tokens=64)
    unit = 4 * size.batch * size.tokens * size.width
    manager = SwapManager()
    manager.configure(min_bytes=4096, fuse_below=0, pending=unit, window=unit, **settings)
    manager.reset()
    trainer = Trainer(build("transformer", mode, size))
    try:
        losses = [float(trainer.step(batch(size, step))[0]) for step in range(2)]
    except Exception as error:
        manager.abort_step()
        return {"error": type(error).__name__, "says": str(error)[:2000]}
    stats = manager.stats()
    return {
        "losses": losses,
        "live": stats.live_bytes,
        "recomputed": stats.recomputed_regions,
        "host_peak": stats.host_peak_bytes,
    }


if sys.argv[1:]:
    print(json.dumps(trained("plain", 32)), flush=True)
    os._exit(0)

found: dict[str, Any] = {"host": hosts(SIZES["small"], 1), "peaks": peaks(("plain", "native_recompute", "swap"))}
found["plain"] = trained("plain")
found["ladder"] = trained("swap", host_budget="512KiB", when_exhausted=["recompute", "keep"])
found["no ladder"] = trained("swap", host_budget="512KiB")

ms.runtime.synchronize()
ms.runtime.empty_cache()
ascsim.set_knob("ASCSIM_HBM_MB", LIMIT_MB)
found["swap in little memory"] = trained("swap", 32)
print(json.dumps(found))
