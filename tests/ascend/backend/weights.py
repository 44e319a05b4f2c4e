"""The weights of a block of two matrix products, for programs that run on the emulated device."""

import numpy as np
from mindspore import Parameter, Tensor, nn

WIDE, ROWS = 32, 64


class Weights(nn.Cell):
    """A product four times as wide, and one back, of seeded weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = np.random.RandomState(seed)
        self.up = Parameter(Tensor(draw.randn(WIDE, 4 * WIDE).astype(np.float32) * 0.1))
        self.down = Parameter(Tensor(draw.randn(4 * WIDE, WIDE).astype(np.float32) * 0.1))
