"""Computes the same networks on the device named by the first argument, and saves all numbers to the second."""

import sys

import numpy as np

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops

DEVICE, OUT = sys.argv[1:3]
ms.set_context(mode=ms.PYNATIVE_MODE, device_target=DEVICE)
random = np.random.RandomState(7)
results: dict[str, np.ndarray] = {}


def draw(*shape: int) -> Tensor:
    return Tensor(random.standard_normal(shape).astype(np.float32))


def whole(limit: int, *shape: int) -> Tensor:
    return Tensor(random.randint(0, limit, shape).astype(np.int32))


def keep(name: str, value: object) -> None:
    if isinstance(value, (tuple, list)):
        for i, one in enumerate(value):
            keep(f"{name}.{i}", one)
    else:
        assert isinstance(value, Tensor), f"{name}: {value}"
        results[name] = value.asnumpy() if value.dtype != ms.bfloat16 else value.astype(ms.float32).asnumpy()


class Loss(nn.Cell):
    def __init__(self, net: nn.Cell):
        super().__init__()
        self.net = net
        for parameter in self.trainable_params():
            parameter.set_data(Tensor((random.standard_normal(parameter.shape) * 0.3).astype(np.float32)))

    def construct(self, *inputs):
        out = self.net(*inputs)
        return (out * out).mean()


class Attention(nn.Cell):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Dense(width, 3 * width), nn.Dense(width, width), heads

    def construct(self, x):
        batch, length, width = x.shape
        q, k, v = ops.split(self.qkv(x), width, axis=-1)
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) / (width // self.heads) ** 0.5
        hidden = ops.triu(ops.ones((length, length), ms.float32), 1).astype(ms.bool_)
        weights = ops.softmax(ops.masked_fill(scores, hidden, Tensor(-1e9, ms.float32)), -1)
        return self.out(ops.matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, length, width))


class Block(nn.Cell):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.LayerNorm((width,))
        # MindSpore's CPU back end hasn't the newer of the two.
        self.second = mint.nn.LayerNorm(width) if DEVICE == "Ascend" else nn.LayerNorm((width,), epsilon=1e-5)
        self.attention = Attention(width, 2)
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)

    def construct(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(ops.gelu(self.up(self.second(x))))


class Language(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 8), Block(8), nn.Dense(8, 11)

    def construct(self, words, following):
        logits = self.head(self.block(self.embedding(words)))
        return ops.cross_entropy(logits.reshape(-1, 11), following.reshape(-1))


def mlp() -> nn.Cell:
    return nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 12, activation="tanh"), nn.Dense(12, 4))


def images() -> nn.Cell:
    return nn.SequentialCell(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(8, 8, 3, stride=2, pad_mode="pad", padding=1, group=2, has_bias=True),
        nn.AvgPool2d(2, 2),
    )


def gradients(name: str, net: nn.Cell, *inputs: Tensor) -> None:
    keep(name, ms.value_and_grad(net, None, net.trainable_params())(*inputs))


def networks() -> None:
    gradients("mlp", Loss(mlp()), draw(5, 8))
    gradients("block", Loss(Block(8)), draw(2, 5, 8))
    language = Language()
    Loss(language)
    gradients("language", language, whole(11, 2, 5), whole(11, 2, 5))
    for training in (True, False):
        net = Loss(images()).set_train(training)
        gradients(f"images.{training}", net, draw(2, 3, 12, 12))
        keep(f"images.{training}.statistics", [p for p in net.get_parameters() if "moving" in p.name])


def optimizers() -> None:
    makers = {
        "sgd": lambda p: nn.SGD(p, 0.1),
        "sgd_momentum": lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        "momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
        "adam": lambda p: nn.Adam(p, 0.01),
        "adam_weight_decay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1),
    }
    for name, make in makers.items():
        net = Loss(mlp())
        optimizer, step = make(net.trainable_params()), ms.value_and_grad(net, None, net.trainable_params())
        inputs = draw(5, 8)
        for _ in range(3):
            loss, grads = step(inputs)
            optimizer(grads)
        keep(f"{name}.loss", loss)
        keep(name, list(net.trainable_params()))


def operators() -> None:
    x, y, positive = draw(4, 6), draw(4, 6), draw(4, 6).abs() + 0.1
    square = draw(6, 6)
    cases = {
        "add": lambda: x + y, "add_number": lambda: x + 2, "sub": lambda: 3 - x, "mul": lambda: x * y, "div": lambda: x / positive,
        "floor_div": lambda: x // 2, "pow": lambda: positive**y, "neg": lambda: -x, "abs": lambda: x.abs(),
        "exp": lambda: x.exp(), "log": lambda: positive.log(), "sqrt": lambda: positive.sqrt(), "rsqrt": lambda: positive.rsqrt(),
        "sin": lambda: x.sin(), "cos": lambda: x.cos(), "tanh": lambda: x.tanh(), "erf": lambda: ops.erf(x),
        "sigmoid": lambda: ops.sigmoid(x), "silu": lambda: ops.silu(x), "gelu": lambda: ops.gelu(x, "none"),
        "gelu_tanh": lambda: ops.gelu(x, "tanh"), "relu": lambda: ops.relu(x), "square": lambda: ops.square(x),
        "maximum": lambda: ops.maximum(x, y), "clamp": lambda: ops.clamp(x, -0.5, 0.5), "where": lambda: ops.where(x > 0, x, y),
        "greater": lambda: x > y, "equal": lambda: x == x, "not": lambda: ops.logical_not(x > 0), "cast": lambda: x.astype(ms.float16),
        "half_bits": lambda: (x.astype(ms.float16) + y.astype(ms.float16)).astype(ms.float32),
        "sum": lambda: x.sum(), "sum_axis": lambda: x.sum(0), "mean": lambda: x.mean(1), "max": lambda: x.max(), "var": lambda: x.var(),
        "argmax": lambda: x.argmax(1), "norm": lambda: ops.norm(x),
        "softmax": lambda: ops.softmax(x, 0), "log_softmax": lambda: ops.log_softmax(x), "all": lambda: ops.isfinite(x).all(),
        "matmul": lambda: ops.matmul(x, square), "batched": lambda: ops.bmm(draw(3, 4, 5), draw(3, 5, 2)),
        "broadcast": lambda: ops.matmul(draw(2, 1, 4, 5), draw(3, 5, 2)), "transposed": lambda: ops.matmul(x.T, y),
        "vector": lambda: ops.matmul(x, square[0]), "big": lambda: ops.matmul(draw(70, 150), draw(150, 90)),
        "concat": lambda: ops.concat([x, y], 1), "stack": lambda: ops.stack([x, y], 1), "slice": lambda: x[1:3, ::2],
        "split": lambda: ops.split(x, 3, axis=1), "transpose": lambda: x.T.contiguous(), "tile": lambda: ops.tile(x, (2, 3)),
        "tril": lambda: ops.tril(square), "triu": lambda: ops.triu(square, 1), "arange": lambda: ops.arange(2, 9, 2),
        "gather": lambda: ops.gather(x, Tensor([0, 2, 2]), 1), "gather_elements": lambda: ops.gather_elements(x, 1, whole(6, 4, 3)),
        "one_hot": lambda: ops.one_hot(Tensor([1, 3]), 4, Tensor(1.0), Tensor(0.0)), "broadcast_to": lambda: ops.broadcast_to(x, (3, 4, 6)),
        "ones": lambda: ops.ones_like(x), "full": lambda: ops.full((2, 3), 2.5),
        "clip_norm": lambda: ops.clip_by_global_norm((x, square), 1.0),
    }  # fmt: skip
    for name, case in cases.items():
        keep(f"op.{name}", case())
    variable = Parameter(x.copy())
    ops.assign(variable, y)
    keep("op.assign", variable)
    keep("op.in_place", x.copy().add_(y).mul_(2))


for part in (networks, optimizers, operators):
    part()
np.savez(OUT, **results)
