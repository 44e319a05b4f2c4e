"""Small swapped nets, plain's numbers, and what must be left after a step, for the tests of faults and lifetimes."""

import os
import threading
from pathlib import Path
from typing import Any

from mindspore import nn

from hyper_parallel import SwapManager
from tests.core.swap_fakes import wait_for
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, numbers, on

X = numbers(8, 8)
BYTES = 8 * 8 * 4
DEPTH = 4

KINDS: dict[str, dict[str, Any]] = {
    "swap": {"policy": SWAP},
    "swapped inputs": {"policy": RECOMPUTE, "swap_inputs": True},
}


def net(**policy: Any) -> nn.Cell:
    return Stack([on(Layer(8, seed=seed), **{"policy": None, **policy}) for seed in range(DEPTH)])


def assert_clean(manager: SwapManager) -> None:
    """Nothing live, nothing booked, one copy thread at most."""
    assert manager.stats().live_bytes == 0
    engine = manager.engine
    wait_for(lambda: engine.live_bytes() == 0 and engine.tier.used == 0)
    assert set(engine.ledger.now.values()) == {0}
    assert len([thread for thread in threading.enumerate() if thread.name == "hyper_parallel-copy"]) <= 1


def files_in(folder: Path) -> int:
    """Names in the folder, and open files of this process that have none."""
    found = len(list(folder.iterdir())) if folder.is_dir() else 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith(f"{folder}/")
        except OSError:  # the descriptor that lists the folder
            continue
    return found
