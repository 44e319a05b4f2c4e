"""Layers of random nets that hold no others. Each takes a matrix of four by four and gives one, so that any fits any.

Matrices keep to two dimensions, because MindSpore's CPU matmul of more takes 15 ms, however small.
"""

import random
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import not_replayed, register_state_provider
from tests.helpers import seeded

SIZE = 4
IMAGE = (2, 2, 2, 2)
IDS = Tensor([2, 0, 3, 0], ms.int32)


class Function(nn.Cell):
    """A cell around a function of one matrix."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def construct(self, x: Tensor) -> Tensor:
        return self.function(x)


class Image(nn.Cell):
    """A layer of images."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(IMAGE)).reshape(SIZE, SIZE)


class Tokens(nn.Cell):
    """Integers in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, SIZE)

    def construct(self, ids: Tensor) -> Tensor:
        return ops.tanh(self.embedding(ids))


class Gathers(nn.Cell):
    """An embedding of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        return x * self.embedding(IDS)


class CustomGradient(nn.Cell):
    """A gradient that isn't the function's."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout * (1 - out * out) * 0.5 * x,)


class CountsInParameter(nn.Cell):
    """A counter and a running mean that training saves with the weights.

    What backward needs of them is a copy: MindSpore itself doesn't notice that a later call overwrites the original.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = Parameter(Tensor(0.0, ms.float32), name="count", requires_grad=False)
        self.mean = Parameter(Tensor(0.0, ms.float32), name="mean", requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        ops.assign_add(self.count, Tensor(1.0, ms.float32))
        ops.assign(self.mean, 0.9 * self.mean + 0.1 * x.mean())
        return x * (self.count * 0.5) - self.mean * 1.0


class CountsInPython(nn.Cell):
    """A plain number that steers what is computed, and is registered therefore; `provider.remove()` ends that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.provider = register_state_provider(f"calls of {id(self)}", lambda: self.calls, self.put)

    def put(self, calls: int) -> None:
        self.calls = calls

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (0.5 + 0.1 * self.calls)


class HiddenState(nn.Cell):
    """A tensor, a number beside it, and a list of tensors, that each call reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.state = 0, Tensor(np.ones((SIZE, SIZE), np.float32))
        self.seen = [self.state]

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = ops.tanh(x + self.state) * (0.5 + 0.1 * self.calls) * len(self.seen)
        self.state = ops.stop_gradient(y)
        self.seen.append(self.state)
        return y


class FillsCache(nn.Cell):
    """A table that the first call makes, and later ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def construct(self, x: Tensor) -> Tensor:
        if "table" not in self.cache:
            self.cache["table"] = ops.cos(ops.stop_gradient(x))
        return x * self.cache["table"]


def frozen() -> nn.Cell:
    layer = seeded(nn.Dense(SIZE, SIZE), seed=99)
    for weight in layer.trainable_params():
        weight.requires_grad = False
    return layer


def hooked() -> nn.Cell:
    layer = nn.Dense(SIZE, SIZE)
    layer.register_forward_pre_hook(lambda cell, inputs: (inputs[0] * 1.5,))
    layer.register_forward_hook(lambda cell, inputs, output: ops.tanh(output))
    return layer


def hook_once() -> nn.Cell:
    layer = nn.Dense(SIZE, SIZE)
    layer.register_forward_hook(not_replayed(lambda cell, inputs, output: ops.tanh(output) * output))
    return layer


def index_write(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = x[1]
    return y * x


def of_a_value(x: Tensor) -> Tensor:
    return ops.tanh(x) if x.sum() > 0 else x * x


def old_noise(x: Tensor) -> Tensor:
    drawn = np.random.uniform(0.5, 1.5, x.shape) * random.uniform(0.5, 1.5)
    return x * Tensor(drawn.astype(np.float32))


LEAVES: dict[str, Callable[[], nn.Cell]] = {
    "tanh": nn.Tanh,
    "dense": lambda: nn.Dense(SIZE, SIZE),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "softmax": nn.Softmax,
    "silu": nn.SiLU,
    "layer norm": lambda: nn.LayerNorm((SIZE,)),
    "batch norm": lambda: nn.BatchNorm1d(SIZE),
    "batch norm of images": lambda: Image(nn.BatchNorm2d(2)),
    "group norm": lambda: Image(nn.GroupNorm(2, 2)),
    "convolution": lambda: Image(nn.Conv2d(2, 2, 3, has_bias=True)),
    "max pool": lambda: Image(nn.MaxPool2d(2, 1, "same")),
    "average pool": lambda: Image(nn.AvgPool2d(2, 1, "same")),
    "dropout": lambda: nn.Dropout(p=0.3),
    "ops.dropout": lambda: Function(lambda x: ops.dropout(x, 0.3)),
    "noise": lambda: Function(lambda x: x * ops.randn(SIZE, SIZE)),
    "numpy's and Python's noise": lambda: Function(old_noise),
    "embedding": Gathers,
    "square": lambda: Function(lambda x: x * x),
    "centre": lambda: Function(lambda x: x - x.mean()),
    "slice": lambda: Function(lambda x: ops.concat((x[1:] * 2, x[:1]))),
    "split": lambda: Function(lambda x: ops.concat(ops.split(x, 2, 1)[::-1], 1)),
    "reshape": lambda: Function(lambda x: x.reshape(2, 8).reshape(SIZE, SIZE)),
    "transpose": lambda: Function(lambda x: x.T),
    "largest": lambda: Function(lambda x: ops.topk(x, SIZE)[0]),
    "choice": lambda: Function(lambda x: ops.where(x > 0, x, 0.1 * x)),
    "index write": lambda: Function(index_write),
    "branch on a value": lambda: Function(of_a_value),
    "cast": lambda: Function(lambda x: ops.tanh(x.astype(ms.float16)).astype(ms.float32)),
    "stop gradient": lambda: Function(lambda x: x * ops.stop_gradient(ops.tanh(x))),
    "custom gradient": CustomGradient,
    "frozen": frozen,
    "hooks": hooked,
    "hook that runs once": hook_once,
    "counter Parameter": CountsInParameter,
    "registered counter": CountsInPython,
    "hidden state": HiddenState,
    "cache": FillsCache,
}
"""Layers without layers inside."""

EVERY = tuple(LEAVES)
REPEATABLE = tuple(kind for kind in LEAVES if kind != "dropout")
"""One nn.Dropout that is called twice in a step draws other numbers in the next step, now and then, plain or not."""

TWICE_DIFFERENTIABLE = (
    *(
        "tanh",
        "dense",
        "relu",
        "sigmoid",
        "silu",
        "embedding",
        "square",
        "slice",
        "reshape",
        "transpose",
    ),
    *("embedding", "frozen", "hooks", "counter Parameter", "registered counter", "hidden state", "cache"),
)
"""What "gradient inside" takes. Not dropout: a replay can't take a gradient through it, and says so.

MindSpore fails to derive GELU, Softmax and LayerNorm twice on CPU, and derives BatchNorm anew at random."""
