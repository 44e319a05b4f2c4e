"""Automatic mixed precision that rewrites a net's source: policies go on afterwards. Other levels: see the table."""

from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn
from mindspore.train.amp import auto_mixed_precision

from tests.exactness.programs.entries import put_by
from tests.exactness.programs.program import Put, X
from tests.helpers import Layer, Stack, assert_same, gradients


def loss(y: Tensor) -> Tensor:
    return (y.astype(ms.float32) ** 2).mean()


def run(put: Put) -> Any:
    net = auto_mixed_precision(Stack([Layer(seed=1), Layer(seed=2)]), "O1")
    stack: nn.Cell = net if hasattr(net, "layers") else next(iter(net.cells()))
    stack.layers[0] = put(stack.layers[0])
    return gradients(net, X, loss=loss)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_level_o1(mode: str) -> None:
    assert_same(run(put_by("decorated instance", mode)), run(lambda cell: cell))
