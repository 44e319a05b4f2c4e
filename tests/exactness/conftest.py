"""Swap that really moves small tensors, and the state that every test must leave."""

from collections.abc import Iterator

import pytest
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager
from tests.helpers import assert_nothing_live


@pytest.fixture(autouse=True)
def everything_is_swapped() -> Iterator[None]:
    """No minimum size; afterwards nothing is live and MindSpore's flag is off."""
    SwapManager().configure(min_bytes=0)
    SwapManager().reset()
    yield
    try:
        assert not _pynative_executor.grad_flag(), "the grad flag was left on"
        assert_nothing_live()
    finally:
        _pynative_executor.set_grad_flag(False)
        SwapManager().configure()
