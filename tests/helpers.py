"""Small seeded nets, training that writes everything down, and equality to the last bit.

A mode is compared with plain in the same process: MindSpore's CPU kernels give the same bits there, but not across
thread settings, so that nothing here is compared with stored numbers.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy

Record = dict[str, np.ndarray]
"""What a run gave, by name: every loss, gradient, final parameter and buffer."""

SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
RECOMPUTE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
SWAP = CheckpointPolicy.MUST_SWAP


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal float32 numbers."""
    return Tensor((np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32))


def seeded(cell: nn.Cell, seed: int = 0) -> nn.Cell:
    """The cell with every trainable parameter drawn anew, biases too (nn.Dense draws those at random)."""
    for index, parameter in enumerate(cell.trainable_params()):
        around = 1.0 if parameter.name.endswith("gamma") else 0.0
        values = around + np.random.RandomState(seed + index).randn(*parameter.shape) * 0.3
        parameter.set_data(Tensor(values.astype(parameter.asnumpy().dtype)))
    return cell


def on(cell: nn.Cell, policy: CheckpointPolicy | None, **options: Any) -> nn.Cell:
    """The cell under a policy; None leaves it plain."""
    return cell if policy is None else activation_policy(policy, **options)(cell)


class Layer(nn.Cell):
    """tanh(x W + b) * x: saves several tensors, and its input."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.dense = nn.Dense(width, width)
        self.calls = 0
        seeded(self, seed)

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return ops.tanh(self.dense(x)) * x


class Stack(nn.Cell):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[nn.Cell]) -> None:
        super().__init__()
        self.layers = nn.CellList(list(layers))

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MlpLayer(nn.Cell):
    """Two Dense cells around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Dense(width, 2 * width), nn.GELU(), nn.Dense(2 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class ConvLayer(nn.Cell):
    """Convolution, BatchNorm, ReLU and a pool that keeps the size."""

    def __init__(self, channels: int, pool: nn.Cell) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, has_bias=True)
        self.act, self.second, self.pool = nn.ReLU(), nn.BatchNorm2d(channels), pool

    def construct(self, x: Tensor) -> Tensor:
        return self.pool(self.act(self.second(self.first(x))))


class Block(nn.Cell):
    """Pre-LayerNorm transformer block with a causal mask, for one sequence.

    Matrices have two dimensions, or go through `ops.bmm`: MindSpore's CPU matmul of more takes 15 ms, however small.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.first, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.second, self.softmax = MlpLayer(width), nn.Softmax(-1)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        s, d = x.shape
        qkv = self.first(self.norm1(x)).reshape(s, 3, self.heads, d // self.heads).transpose(1, 2, 0, 3)
        q, k, v = (part.squeeze(0) for part in qkv.split(1, 0))
        scores = ops.bmm(q, k.swapaxes(-1, -2)) / (d // self.heads) ** 0.5
        a = self.softmax(ops.masked_fill(scores, mask, -1e9))
        x = x + self.out(ops.bmm(a, v).transpose(1, 0, 2).reshape(s, d))
        return x + self.second(self.norm2(x))


class Transformer(nn.Cell):
    """Token and position embedding, blocks, and a head that shares the token embedding's weights."""

    def __init__(self, width: int = 8, heads: int = 2, depth: int = 2, words: int = 11, length: int = 6) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.CellList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm((width,))
        self.mask = Tensor(np.triu(np.ones((length, length), bool), 1))
        self.places = Tensor(np.arange(length, dtype=np.int32))

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(self.places)
        for layer in self.layers:
            x = layer(x, self.mask)
        return ops.matmul(self.norm(x), self.embedding.embedding_table.T)


def mean_square(output: Tensor) -> Tensor:
    """A loss whose gradient depends on the output."""
    return (output**2).mean()


def settled(result: Any) -> Any:
    """`result`, once everything that was swapped so far is on host.

    Backward cancels copies that have not begun; small nets are so quick that it would cancel most of them.
    """
    engine = SwapManager().engine
    engine.settle()
    engine.region_begins()  # instead of waiting until the last group's grace is over
    deadline = time.monotonic() + 10
    while engine._offloads._held or engine._offloads.backlog:
        with engine.back_end.lock:
            engine.back_end.advance(lambda: not engine._offloads.backlog)
        if time.monotonic() > deadline:
            raise AssertionError("what was swapped is not on host after 10 seconds")
        time.sleep(0.001)
    return result


def assert_nothing_live() -> None:
    """No byte is swapped or in flight; MindSpore's threads may need a moment to let go of a graph that is given up."""
    deadline = time.monotonic() + 5
    while live := SwapManager().stats().live_bytes:
        if time.monotonic() > deadline:
            raise AssertionError(f"{live} bytes are still live")
        time.sleep(0.001)


def flat(tree: Any, name: str) -> Record:
    """Copies of the tensors in nested tuples and lists, by name."""
    if isinstance(tree, (tuple, list)):
        found: Record = {}
        for index, item in enumerate(tree):
            found.update(flat(item, f"{name}[{index}]"))
        return found
    return {} if tree is None else {name: tree.asnumpy().copy()}


def state_of(net: nn.Cell) -> Record:
    """Copies of every parameter and buffer."""
    return {name: parameter.asnumpy().copy() for name, parameter in net.parameters_and_names()}


def train(
    net: nn.Cell,
    *inputs: Any,
    steps: int = 5,
    loss: Callable[[Any], Tensor] = mean_square,
    wait: bool = False,
    position: int | tuple[int, ...] | None = None,
) -> Record:
    """Train with Adam and write everything down.

    Args:
        net: The net; its parameters change.
        *inputs: What it is called with.
        steps: Optimizer steps.
        loss: From the net's output to a number.
        wait: Let what is swapped reach the host before backward begins.
        position: Inputs to take the gradient of, beside the parameters.
    """
    weights = ms.ParameterTuple(net.trainable_params())
    optimizer = nn.Adam(weights, learning_rate=0.01)

    def forward(*args: Any) -> Tensor:
        value = loss(net(*args))
        return settled(value) if wait else value

    step = ms.value_and_grad(forward, position, weights)
    record: Record = {}
    for index in range(steps):
        value, gradients = step(*inputs)
        record.update(flat(value, f"step {index}, loss"))
        of_weights = gradients if position is None else gradients[1]
        for weight, gradient in zip(weights, of_weights, strict=True):
            record[f"step {index}, gradient of {weight.name}"] = gradient.asnumpy().copy()
        if position is not None:
            record.update(flat(gradients[0], f"step {index}, gradient of the inputs"))
        optimizer(of_weights)
        del value, gradients, of_weights
        assert_nothing_live()
    record.update({f"final {name}": value for name, value in state_of(net).items()})
    return record


def gradients(net: nn.Cell, *inputs: Any, wait: bool = False, loss: Callable[[Any], Tensor] = mean_square) -> Record:
    """Loss and gradients of all parameters and of the first input, for one step that changes nothing."""
    weights = net.trainable_params()

    def forward(*args: Any) -> Tensor:
        value = loss(net(*args))
        return settled(value) if wait else value

    result = ms.value_and_grad(forward, 0, weights or None)(*inputs)
    record = flat(result, "value and gradients")
    del result
    assert_nothing_live()
    return record


def assert_same(got: Record, plain: Record) -> None:
    """The same names, dtypes, shapes and bits; an empty record is no evidence."""
    if not plain:
        raise AssertionError("there is nothing to compare")
    if got.keys() != plain.keys():
        raise AssertionError(f"missing: {plain.keys() - got.keys()}; unexpected: {got.keys() - plain.keys()}")
    for name, want in plain.items():
        have = got[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            raise AssertionError(f"{name}: {have.dtype} {have.shape}, but plain gave {want.dtype} {want.shape}")
        if have.tobytes() != want.tobytes():
            far = np.abs(have.astype(np.float64) - want.astype(np.float64)).max()
            raise AssertionError(f"{name} differs from plain by up to {far}")
