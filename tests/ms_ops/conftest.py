"""MindSpore's flags as every test must leave them, and an observer of writes."""

from collections.abc import Iterator

import pytest
from mindspore.graph.api import _pynative_executor

from ms_ops import writes
from tests.ms_ops.recorder import Recorder


@pytest.fixture(autouse=True)
def flags_stay() -> Iterator[None]:
    """The grad flag is off before and after."""
    _pynative_executor.set_grad_flag(False)
    yield
    assert not _pynative_executor.grad_flag()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The only one that hears of writes and host reads."""
    found = Recorder()
    monkeypatch.setattr(writes, "_observer", found)
    return found


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The same, but it doesn't want to hear."""
    found = Recorder(active=False)
    monkeypatch.setattr(writes, "_observer", found)
    return found
