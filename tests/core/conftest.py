"""The swap manager as it begins, and MindSpore as every test must leave it."""

from collections.abc import Iterator

import pytest
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager


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
