"""The helper that every other test relies on sees what it must see."""

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.helpers import Layer, Record, Stack, assert_same, gradients, numbers, seeded, train


def batch_norm_net() -> nn.Cell:
    return seeded(Stack([nn.BatchNorm1d(4), Layer()])).set_train()


def wrong_unpack(net: nn.Cell) -> None:
    plain = net.construct

    def construct(x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: t.asnumpy().copy(), lambda a: Tensor((a * 1.0001).astype(a.dtype))):
            return plain(x)

    net.construct = construct


def dropped_gradient(net: nn.Cell) -> None:
    plain = net.construct
    net.construct = lambda x: plain(x) + 0.0 * ops.stop_gradient(plain(x))
    net.layers[1].dense.bias.requires_grad = False


def doubled_batch_norm(net: nn.Cell) -> None:
    plain = net.construct

    def construct(x: Tensor) -> Tensor:
        net.layers[0](x)
        return plain(x)

    net.construct = construct


@pytest.mark.parametrize("fault", [wrong_unpack, dropped_gradient, doubled_batch_norm])
def test_training_with_a_fault_is_not_the_same(fault: Callable[[nn.Cell], None]) -> None:
    plain = train(batch_norm_net(), numbers(3, 4), steps=2)
    net = batch_norm_net()
    fault(net)

    with pytest.raises(AssertionError, match=r"differs|missing"):
        assert_same(train(net, numbers(3, 4), steps=2), plain)


def test_two_plain_runs_are_the_same() -> None:
    assert_same(*(train(batch_norm_net(), numbers(3, 4), steps=2, position=0) for _ in range(2)))


ONE: Record = {"a": np.array([1.0, 0.0], np.float32)}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"b": ONE["a"]},
        {**ONE, "b": ONE["a"]},
        {"a": ONE["a"].astype(np.float64)},
        {"a": ONE["a"][None]},
        {"a": np.array([1.0, -0.0], np.float32)},
        {"a": np.nextafter(ONE["a"], 2)},
    ],
    ids=["nothing", "another name", "one more", "dtype", "shape", "sign of zero", "last bit"],
)
def test_records_that_differ_are_told_apart(other: Record) -> None:
    with pytest.raises(AssertionError):
        assert_same(ONE, other)


def test_the_same_record_is_the_same() -> None:
    assert_same(ONE, {"a": ONE["a"].copy()})


def test_gradients_include_every_bias_and_the_input() -> None:
    record = gradients(Layer(), numbers(3, 4))
    assert len(record) == 4 and all(value.any() for value in record.values())
