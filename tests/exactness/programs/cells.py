"""What a region may hold: kinds of cells and operators, writes into tensors, custom and compiled gradients."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function

from tests.exactness.programs.program import Program, Put, X, named, step
from tests.helpers import Layer, Stack, numbers, seeded


def stop_gradient_inside(put: Put) -> Any:
    class Straight(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y + ops.stop_gradient(ops.sign(y) - y) * y

    a = put(Straight())
    return step(lambda x, y: (a(x) * y).sum(), a)


def top_k_and_gather_inside(put: Put) -> Any:
    class Routed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            values, index = ops.topk(self.layer(x), 2)
            return values * ops.gather_elements(x, 1, index)

    a = put(Routed())
    return step(lambda x, y: (a(x) * y[:, :2]).sum(), a)


class Cubed(nn.Cell):
    """A square whose gradient is another one's."""

    def construct(self, x: Tensor) -> Tensor:
        return x * x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple:
        return (dout * x * out,)


def a_bprop_of_its_own_inside(put: Put) -> Any:
    a, b = put(Stack([Layer(), Cubed()])), put(Layer(seed=2))
    return step(lambda x, y: (b(a(x)) * y).sum(), a, b)


def a_bprop_of_the_regions_own(put: Put) -> Any:
    a, b = put(Cubed()), Layer()
    return step(lambda x, y: (b(a(x * y)) * y).sum(), a, b)


class Exponential(_Function):
    """Saves its output after it has computed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        result = ops.exp(x) * scale
        ctx.save_for_backward(x, result)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, result = ctx.saved_tensors
        return gradient * result + x * ctx.scale, None


def a_custom_function_inside(put: Put) -> Any:
    class Uses(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            return Exponential.apply(self.layer(x), 0.5) * x

    a = put(Uses())
    return step(lambda x, y: (a(x) * y).sum(), a)


@ms.jit
def squared(x: Tensor) -> Tensor:
    return x * x


def a_jit_function_inside(put: Put) -> Any:
    class Mixed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            return squared(self.layer(x)) * x

    a = put(Mixed())
    return step(lambda x, y: (a(x) * y).sum(), a)


class Compiled(nn.Cell):
    """A cell whose own construct is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ms.Parameter(numbers(4, seed=3), name="weight")

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x * self.weight) * x


def a_jit_cell_inside(put: Put) -> Any:
    a = put(Stack([Layer(), Compiled()]))
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_write_into_a_temporary(put: Put) -> Any:
    class Writes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            h = ops.exp(x)
            h[0] = 2.0
            return h * h

    a = put(Writes())
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_write_into_the_input_inside(put: Put) -> Any:
    class Writes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(x)
            x[0] = 2.0
            return x * y * x

    a = put(Writes())
    return step(lambda x, y: (a(x * 1) * y).sum(), a)


def a_copy_into_a_temporary(put: Put) -> Any:
    class Copies(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            h = ops.zeros((3, 4), ms.float32)
            h.copy_(x)
            return ops.tanh(h) * x

    a = put(Copies())
    return step(lambda x, y: (a(x * y) * y).sum(), a)


def a_written_view_as_output(put: Put) -> Any:
    class Writes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.exp(x).view(4, 3)
            y[...] = ops.relu(y - 1.0)
            return y

    a = put(Writes())
    return step(lambda x, y: (a(x).T * y.view(3, 4)).sum(), a)


def a_view_as_output(put: Put) -> Any:
    class View(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            return self.layer(x).T[1:]

    a = put(View())
    return step(lambda x, y: (a(x) ** 2 * y.T[1:]).sum(), a)


def a_view_of_the_input_as_output(put: Put) -> Any:
    class View(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x.T[1:]

    a = put(View())
    return step(lambda x, y: (ops.exp(a(x)) * a(x * y)).sum(), a)


def _ending_in(last: Callable[[], nn.Cell], images: bool = False) -> Program:
    """What MindSpore's recompute raises on: the last operator saves several tensors, or a state."""

    def program(put: Put) -> Any:
        first = nn.Conv2d(2, 2, 3, has_bias=True) if images else Layer()
        a = put(seeded(Stack([first, last()]))).set_train()
        inputs = (numbers(1, 2, 4, 4, seed=1),) if images else (X,)
        return step(lambda x: (a(x) ** 2).sum(), a, inputs=inputs)

    return program


PROGRAMS: dict[str, Program] = {
    **named(globals()),
    "a_region_that_ends_in_a_convolution": _ending_in(lambda: nn.Conv2d(2, 2, 3), images=True),
    "a_region_that_ends_in_a_pool": _ending_in(lambda: nn.MaxPool2d(3, 1, "same"), images=True),
    "a_region_that_ends_in_layer_norm": _ending_in(lambda: nn.LayerNorm((4,))),
    "a_region_that_ends_in_batch_norm": _ending_in(lambda: nn.BatchNorm1d(4)),
}
