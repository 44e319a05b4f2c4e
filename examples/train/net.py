"""A small net and numbers to train it with, for the examples beside this file."""

import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops

WIDTH, DEPTH = 16, 4


class Block(nn.Cell):
    """x + down(tanh(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm((WIDTH,)), nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        """Compute the block."""
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class Net(nn.Cell):
    """Blocks, and a product that gives one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.CellList([Block() for _ in range(DEPTH)]), nn.Dense(WIDTH, 1)

    def construct(self, x: Tensor) -> Tensor:
        """Compute the net."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def numbers(batches: int = 4, batch: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what the net shall give for them: their mean."""
    x = np.random.RandomState(0).randn(batches * batch, WIDTH).astype(np.float32)
    return x, x.mean(axis=1, keepdims=True)


def dataset(batch: int = 8) -> ds.Dataset:
    """The same as a dataset, in its order."""
    return ds.NumpySlicesDataset(numbers(batch=batch), ["x", "y"], shuffle=False).batch(batch)
