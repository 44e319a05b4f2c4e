"""A transformer that no ordinary machine can hold: 32 blocks of width 4096, 4096 tokens, in float32.

bash scripts/ascend_emulator/run.sh hyper-parallel dryrun --model large_transformer:build \
    --policy ../policies/recompute_all_blocks.yaml
"""

import numpy as np
from mindspore import Tensor, nn, ops


class Block(nn.Cell):
    """Pre-LayerNorm attention and feed-forward, each with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.act, self.down = nn.Dense(width, 4 * width), nn.GELU(), nn.Dense(4 * width, width)
        self.softmax = nn.Softmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        head = width // self.heads
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, head).transpose(2, 0, 3, 1, 4)
        query, key, value = (part.squeeze(0) for part in qkv.split(1, 0))
        weights = self.softmax(ops.matmul(query, key.swapaxes(-1, -2)) / head**0.5)
        x = x + self.out(ops.matmul(weights, value).transpose(0, 2, 1, 3).reshape(batch, tokens, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Cell):
    """A stack of blocks; the output is a mean square, so that there is something to minimise."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(width, heads) for _ in range(depth)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def build(depth: int = 32, width: int = 4096, tokens: int = 4096) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """Make the model and its inputs: one sequence."""
    return Transformer(depth, width, heads=width // 128), (Tensor(np.zeros((1, tokens, width), np.float32)),)


def long() -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """Two narrow blocks over 32768 tokens: small weights, but attention scores of 34 GB in each block."""
    return build(depth=2, width=1024, tokens=32768)


def small() -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """The same with 4 blocks of width 256 and 256 tokens, for a first look."""
    return build(4, 256, 256)
