"""A net shaped like the demo's GPT, and a way to write policy files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mindspore import Tensor, nn

from hyper_parallel import SwapManager


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((4,)), nn.LayerNorm((4,))
        self.attention = nn.Dense(4, 4)
        self.mlp = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Cell):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Dense(4, 4)
        self.layers = nn.CellList([Block() for _ in range(depth)])
        self.head = nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.fixture
def gpt() -> Gpt:
    """A net with `embedding`, `layers.0` to `layers.3` (norm1, norm2, attention, mlp.0, mlp.1) and `head`."""
    return Gpt()


@pytest.fixture
def new_gpt() -> type[Gpt]:
    """The class of `gpt`, for tests that need several nets."""
    return Gpt


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a policy file, and give its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "policy.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def swap_manager() -> Iterator[SwapManager]:
    """The process's swap manager, for tests that configure it; afterwards it has its defaults again."""
    yield SwapManager()
    SwapManager().configure()
