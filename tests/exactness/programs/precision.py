"""Half precision, set on cells, on nets, and by hooks: a replay computes in the precision of its forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.train.amp import auto_mixed_precision

from tests.exactness.programs.program import Program, Put, named, step
from tests.helpers import SAVE, Layer, Stack, numbers, on


def half() -> nn.Cell:
    return Stack([Layer(seed=1), Layer(seed=2)]).to_float(ms.float16)


def a_half_precision_cell(put: Put) -> Any:
    a = put(half())
    return step(lambda x, y: (a(x).astype(ms.float32) * y).sum(), a)


def a_cell_inside_a_half_precision_cell(put: Put) -> Any:
    net = half()
    net.layers[1] = put(net.layers[1])
    return step(lambda x, y: (net(x).astype(ms.float32) * y).sum(), net)


def a_half_precision_cell_inside(put: Put) -> Any:
    a = put(Stack([half(), nn.Identity()]))
    return step(lambda x, y: (a(x).astype(ms.float32) * y).sum(), a)


def a_float32_result_of_a_kept_cell_inside_a_half_precision_cell(put: Put) -> Any:
    class Widens(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(x).astype(ms.float32)

    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = Layer(), on(Widens(), SAVE)

        def construct(self, x: Tensor) -> Tensor:
            y = self.kept(self.layer(x))
            return ops.tanh(y) * y.astype(ms.float32) * x

    a = put(Outer().to_float(ms.float16))
    return step(lambda x, y: (a(x).astype(ms.float32) * y).sum(), a)


def float32_operators_after_a_half_precision_cell(put: Put) -> Any:
    a, w = put(half()), numbers(4, 4, seed=8)
    results = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        z = a(x).astype(ms.float32)
        results.append(str(ops.matmul(z, w).dtype))
        return (ops.matmul(z, w) * y).sum()

    taken = step(function, a)
    after = ops.matmul(numbers(3, 4), w)
    return taken, results, after, str(after.dtype)


def a_bfloat16_cell(put: Put) -> Any:
    class Scales(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x * x * x

    a = put(Scales().to_float(ms.bfloat16))
    return step(lambda x, y: (a(x).astype(ms.float32) * y).sum(), a)


def a_hook_of_the_regions_own_that_casts(put: Put) -> Any:
    layer = nn.Identity()
    inner = Stack([layer])
    inner.register_forward_pre_hook(lambda cell, args: (args[0].astype(ms.float16),))
    a = put(inner)
    return step(lambda x, y: (ops.exp(a(x)).astype(ms.float32) * y).sum(), a)


def a_hook_inside_that_casts(put: Put) -> Any:
    class Multiplies(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x) * x

    inner = Multiplies()
    inner.register_forward_pre_hook(lambda cell, args: (args[0].astype(ms.float16),))
    a = put(Stack([inner]))
    return step(lambda x, y: (a(x).astype(ms.float32) * y).sum(), a)


def _policy_first(put: Put, level: str) -> Any:
    net = auto_mixed_precision(Stack([put(Layer(seed=1)), Layer(seed=2)]), level)
    return step(lambda x, y: (net(x).astype(ms.float32) * y).sum(), net)


def _precision_first(put: Put, level: str) -> Any:
    net = auto_mixed_precision(Stack([Layer(seed=1), Layer(seed=2)]), level)
    stack = net if hasattr(net, "layers") else next(iter(net.cells()))
    stack.layers[0] = put(stack.layers[0])
    return step(lambda x, y: (net(x).astype(ms.float32) * y).sum(), net)


ORDERS: dict[str, Callable[..., Any]] = {"policy first": _policy_first, "precision first": _precision_first}

PROGRAMS: dict[str, Program] = {
    **named(globals()),
    **{f"{level}, {order}": partial(ORDERS[order], level=level) for level in ("O2", "O3", "auto") for order in ORDERS},
}
