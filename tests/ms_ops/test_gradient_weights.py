"""Which parameters the backward that runs now takes the gradient of."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_ops.autograd import alias, gradient_weights, saved_tensors_hooks
from tests.helpers import numbers


class Net(nn.Cell):
    """Two weights, and a look at what backward takes the gradient of, while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Parameter(numbers(4), name="first"), Parameter(numbers(4, seed=1), name="second")
        self.seen: list[tuple] = []

    def construct(self, x: Tensor) -> Tensor:
        def unpack(tensor: Tensor) -> Tensor:
            self.seen.append(tuple(weight.name for weight in gradient_weights()))
            return tensor

        x = x * self.first + self.second
        with saved_tensors_hooks(lambda tensor: alias(tensor, tracked=False), unpack):
            return ops.tanh(x)


WAYS: dict[str, tuple[Callable[[Net], Any], tuple]] = {
    "grad of inputs": (lambda net: ms.grad(net)(numbers(4)), ()),
    "grad of a list": (lambda net: ms.grad(net, None, net.trainable_params())(numbers(4)), ("first", "second")),
    "grad of a tuple": (lambda net: ms.grad(net, 0, (net.second,))(numbers(4)), ("second",)),
    "grad of a ParameterTuple": (
        lambda net: ms.grad(net, None, ParameterTuple(net.trainable_params()))(numbers(4)),
        ("first", "second"),
    ),
    "grad of one parameter": (lambda net: ms.grad(net, None, net.first)(numbers(4)), ("first",)),
    "value_and_grad": (
        lambda net: ms.value_and_grad(net, None, net.trainable_params())(numbers(4)),
        ("first", "second"),
    ),
    "GradOperation": (
        lambda net: ops.GradOperation(get_by_list=True)(net, ParameterTuple([net.second]))(numbers(4)),
        ("second",),
    ),
    "vjp": (lambda net: ms.vjp(net, numbers(4))[1](numbers(4)), ()),
    "vjp with weights": (
        lambda net: ms.vjp(net, numbers(4), weights=ParameterTuple([net.first]))[1](numbers(4)),
        ("first",),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_knows_whose_gradient_it_takes(way: str) -> None:
    take, names = WAYS[way]
    net = Net()
    take(net)
    assert net.seen == [names]


def test_there_are_none_outside_of_a_backward() -> None:
    assert gradient_weights() == ()
    WAYS["grad of a list"][0](Net())
    assert gradient_weights() == ()


def test_there_are_none_after_a_backward_that_fails() -> None:
    net = Net()
    net.seen = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        WAYS["grad of a list"][0](net)
    assert gradient_weights() == ()


def test_a_backward_inside_the_forward_of_another_has_its_own() -> None:
    net, around = Net(), []

    def forward(x: Tensor) -> Tensor:
        y = x * net.second
        WAYS["grad of a tuple"][0](net)
        around.append(gradient_weights())
        return y

    ms.grad(forward, None, net.trainable_params())(numbers(4))
    assert net.seen == [("second",)]
    assert around == [()]
