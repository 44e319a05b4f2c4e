"""GRAPH_MODE for one test, and none left behind."""

from collections.abc import Iterator

import mindspore as ms
import pytest


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(params=["GRAPH_MODE", "jit"])
def either_mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both executors: cells in GRAPH_MODE, and functions under ms.jit."""
    if request.param == "GRAPH_MODE":
        ms.set_context(mode=ms.GRAPH_MODE)
    yield request.param
    ms.set_context(mode=ms.PYNATIVE_MODE)
