"""Small swapped nets, plain's numbers, and what must be left after a step, for the tests of faults and lifetimes."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from hyper_parallel import SwapManager
from tests.core.swap_fakes import wait_for
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

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


class Sent(list):
    """The bytes of every storage that went to host."""

    def has(self, tensor: Tensor | Any) -> bool:
        return np.ascontiguousarray(tensor.asnumpy()).tobytes() in self


def assert_exact_and_swapped(make: Callable[[Callable[[nn.Cell], nn.Cell]], nn.Cell], *inputs: Any) -> None:
    """The net that `make(put)` gives has plain's gradients when cells that are `put` are swapped, and something is."""
    SwapManager().reset()
    got = gradients(make(lambda cell: on(cell, SWAP)), *inputs, wait=True)
    assert_same(got, gradients(make(lambda cell: cell), *inputs))
    assert SwapManager().stats().offloaded_bytes > 0
