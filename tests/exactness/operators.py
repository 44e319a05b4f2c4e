"""A small region, and what tests of operator policies share."""

from mindspore import Tensor, nn, ops

from tests.helpers import (
    Record,
    numbers,
    seeded,
)


class Two(nn.Cell):
    """tanh, then a matrix product, then tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4, has_bias=False)
        seeded(self)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dense(ops.exp(x))) * 2


X = numbers(3, 4)


def numbers_of(record: Record) -> list[bytes]:
    """Without the names, in which a policy file's net has one more level."""
    return [value.tobytes() for value in record.values()]
