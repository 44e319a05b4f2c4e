"""The ways to take a gradient: of what, how often, in which order, inside one another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from tests.exactness.programs.program import Program, Put, X, Y, named, step
from tests.helpers import Layer, Stack, numbers, settled

SENS = numbers(3, 4, seed=3)


def total(net: nn.Cell, x: Tensor) -> Tensor:
    return settled((net(x) ** 2).sum())


def by_value_and_grad_of_the_cell(net: nn.Cell) -> Any:
    return ms.value_and_grad(net, 0, net.trainable_params())(X)


def by_value_and_grad_with_aux(net: nn.Cell) -> Any:
    return ms.value_and_grad(lambda x: (total(net, x), x * 2), 0, net.trainable_params(), has_aux=True)(X)


def by_grad(net: nn.Cell) -> Any:
    return ms.grad(lambda x: total(net, x))(X)


def by_grad_of_some_weights(net: nn.Cell) -> Any:
    return ms.grad(lambda x: total(net, x), None, [net.trainable_params()[2]])(X)


def by_grad_of_the_second_input(net: nn.Cell) -> Any:
    return ms.grad(lambda x, y: total(net, x * y), 1)(X, Y)


def by_grad_operation(net: nn.Cell) -> Any:
    return ops.GradOperation()(net)(X)


def by_grad_operation_get_all(net: nn.Cell) -> Any:
    return ops.GradOperation(get_all=True)(net)(X)


def by_grad_operation_by_list(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ops.GradOperation(get_all=True, get_by_list=True)(net, weights)(X)


def by_grad_operation_with_sens(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ops.GradOperation(get_by_list=True, sens_param=True)(net, weights)(X, SENS)


def by_vjp(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X)
    return output, pull(SENS)


def by_vjp_with_weights(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X, weights=ms.ParameterTuple(net.trainable_params()))
    return output, pull(SENS)


def by_vjp_pulled_twice(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X)
    return output, pull(SENS), pull(Y)


def by_set_grad(net: nn.Cell) -> Any:
    net.set_grad()
    output = net(X)
    return output, ops.GradOperation(get_all=True, sens_param=True)(net)(X, SENS)


def by_the_second_derivative(net: nn.Cell) -> Any:
    return ms.grad(lambda x: (ms.grad(lambda z: (net(z) ** 2).sum())(x) ** 2).sum())(X)


def by_mixed_second_derivatives(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ms.grad(lambda x: (ms.grad(lambda z: (net(z) ** 2).sum())(x) * Y).sum(), 0, weights)(X)


def by_the_third_derivative(net: nn.Cell) -> Any:
    first = ms.grad(lambda x: (net(x) ** 2).sum())
    second = ms.grad(lambda x: (first(x) ** 2).sum())
    return ms.grad(lambda x: (second(x) * Y).sum())(X)


def _session(net: nn.Cell, order: tuple[int, ...]) -> Any:
    """A pipeline's micro-batches: forwards first, then backward in any order."""
    inputs = [numbers(3, 4, seed=40 + index) for index in range(len(order))]
    net.set_grad()
    weights = ms.ParameterTuple(net.trainable_params())
    pull = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net, weights)
    outputs = [net(x) for x in inputs]
    return outputs, {index: pull(inputs[index], SENS) for index in order}


def two_gradients_of_a_session_and_the_next_step(net: nn.Cell) -> Any:
    net.set_grad()
    pull = ops.GradOperation(get_all=True, sens_param=True)(net)
    outputs = net(X), net(Y)
    gradients = pull(Y, SENS), pull(X, SENS)
    net(X)
    return outputs, gradients, pull(X, Y)


def _through_three_layers(put: Put, way: Callable[[nn.Cell], Any]) -> Any:
    """The first layer's input takes a gradient, too."""
    return way(Stack([put(Layer(seed=seed)) for seed in (10, 20, 30)]))


class Inside(nn.Cell):
    """Takes a gradient in its forward."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Tensor) -> Tensor:
        return x * ms.grad(lambda z: (self.layer(z) ** 2).sum())(x) + self.layer(x)


def a_gradient_inside_a_region(put: Put) -> Any:
    a = put(Inside(Layer(seed=7)))
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_gradient_inside_a_region_through_regions(put: Put) -> Any:
    a = put(Inside(put(Layer(seed=7))))
    return step(lambda x, y: (a(x) * y).sum(), a)


WAYS: dict[str, Callable[[nn.Cell], Any]] = {
    **{name: value for name, value in globals().items() if name.startswith("by_")},
    "two_gradients_of_a_session_and_the_next_step": two_gradients_of_a_session_and_the_next_step,
    "a session, last in first out": partial(_session, order=(1, 0)),
    "a session, first in first out": partial(_session, order=(0, 1)),
    "a session, any order": partial(_session, order=(0, 2, 1)),
}

PROGRAMS: dict[str, Program] = {
    **named(globals()),
    **{name: partial(_through_three_layers, way=way) for name, way in WAYS.items()},
}
