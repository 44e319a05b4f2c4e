"""Swap that really moves small tensors, and the state that every test must leave."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager
from hyper_parallel.core.activation_memory.operator_log import LogReader
from hyper_parallel.core.activation_memory.replay_scopes import Replaying
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


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Dispatch names of what replays run again, and of what they read from the record ("Exp read")."""
    counts = Counter[str]()
    ran, recorded = LogReader.ran, Replaying._recorded

    def count_ran(reader: Any, name: str, *rest: Any) -> None:
        counts[name] += 1
        ran(reader, name, *rest)

    def count_read(scope: Any, name: str, args: tuple) -> Any:
        counts[f"{name} read"] += 1
        return recorded(scope, name, args)

    monkeypatch.setattr(LogReader, "ran", count_ran)
    monkeypatch.setattr(Replaying, "_recorded", count_read)
    return counts
