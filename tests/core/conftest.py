"""The swap manager as it begins, and MindSpore as every test must leave it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager
from ms_ops.host import HostTier, Slot
from tests.core.swap_nets import Sent


@pytest.fixture(autouse=True)
def manager() -> Iterator[SwapManager]:
    """Default settings but for the minimum size; afterwards nothing is live and MindSpore's flag is off."""
    SwapManager().configure(min_bytes=0)
    SwapManager().reset()
    yield SwapManager()
    try:
        assert not _pynative_executor.grad_flag(), "the grad flag was left on"
        assert SwapManager().stats().live_bytes == 0
    finally:
        _pynative_executor.set_grad_flag(False)
        SwapManager().configure()


@pytest.fixture
def sent(manager: SwapManager, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What goes to host."""
    manager.configure(min_bytes=0, tier="host", fuse_below=0)
    found, write = Sent(), HostTier.write

    def spy(tier: HostTier, slot: Slot, buffers: Sequence[Any]) -> None:
        found.extend(bytes(buffer) for buffer in buffers)
        write(tier, slot, buffers)

    monkeypatch.setattr(HostTier, "write", spy)
    return found
