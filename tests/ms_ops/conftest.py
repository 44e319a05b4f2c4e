"""MindSpore's flags as every test must leave them."""

from collections.abc import Iterator

import pytest
from mindspore.graph.api import _pynative_executor


@pytest.fixture(autouse=True)
def flags_stay() -> Iterator[None]:
    """The grad flag is off before and after."""
    _pynative_executor.set_grad_flag(False)
    yield
    assert not _pynative_executor.grad_flag()
