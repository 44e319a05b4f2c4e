"""Two small nets, the modes in which they are trained on an Ascend device, and what tells two trainings apart.

Used by `check_ascend.py`, `bench_ascend.py`, `mutate_ascend.py` and the tests of the emulated device.
"""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy

gc.freeze()  # MindSpore is 200,000 objects that stay: collections look at what comes after


@dataclass(frozen=True)
class Size:
    """How large a net and its input are."""

    blocks: int = 3
    width: int = 32
    heads: int = 4
    batch: int = 2
    tokens: int = 8


class TransformerBlock(nn.Cell):
    """Pre-LayerNorm attention and feed-forward, each with a skip connection.

    Of layers of `mint`: the backward of `nn.Dense` and `nn.LayerNorm` runs on the default stream whatever the current
    one is, and nothing orders it after the rest (MindSpore 2.10.0; the race checker sees it without this library, too).
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = mint.nn.LayerNorm(width), mint.nn.LayerNorm(width)
        self.qkv, self.out = mint.nn.Linear(width, 3 * width), mint.nn.Linear(width, width)
        self.up, self.act, self.down = (
            mint.nn.Linear(width, 4 * width),
            mint.nn.GELU(),
            mint.nn.Linear(4 * width, width),
        )
        self.softmax = mint.nn.Softmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        head = d // self.heads
        qkv = self.qkv(self.norm1(x)).reshape(b, s, 3, self.heads, head).transpose(2, 0, 3, 1, 4)
        q, k, v = (part.squeeze(0) for part in qkv.split(1, 0))
        a = self.softmax(mint.matmul(q, k.swapaxes(-1, -2)) / head**0.5)
        x = x + self.out(mint.matmul(a, v).transpose(0, 2, 1, 3).reshape(b, s, d))
        return x + self.down(self.act(self.up(self.norm2(x))))


class MlpBlock(nn.Cell):
    """Two linear layers around an activation, and a skip connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            mint.nn.Linear(size.width, 4 * size.width),
            mint.nn.GELU(),
            mint.nn.Linear(4 * size.width, size.width),
        )

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Cell):
    """A stack of blocks; its output is a mean square."""

    def __init__(self, block: type[nn.Cell], size: Size) -> None:
        super().__init__()
        self.layers = nn.CellList([block(size) for _ in range(size.blocks)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean()


NETS: dict[str, type[nn.Cell]] = {"transformer": TransformerBlock, "mlp": MlpBlock}


def on_every_layer(policy: CheckpointPolicy | None = None, **options: Any) -> Callable[[Net], None]:
    """A mode: one policy on every block."""

    def apply(net: Net) -> None:
        for layer in net.layers:
            activation_policy(policy, **options)(layer)

    return apply


SWAPPED_OPERATORS = {"MatMul": CheckpointPolicy.MUST_SWAP, "*": CheckpointPolicy.PREFER_RECOMPUTE}

MODES: dict[str, Callable[[Net], Any]] = {
    "plain": lambda net: None,
    "native_recompute": lambda net: [layer.recompute() for layer in net.layers],
    "recompute": on_every_layer(CheckpointPolicy.MUST_RECOMPUTE),
    "swap": on_every_layer(CheckpointPolicy.MUST_SWAP),
    "recompute_swap_inputs": on_every_layer(CheckpointPolicy.MUST_RECOMPUTE, swap_inputs=True),
    "selective_swap": on_every_layer(ops=SWAPPED_OPERATORS),
}
SWAPPING = ("swap", "recompute_swap_inputs", "selective_swap")


def build(net: str, mode: str, size: Size, seed: int = 0) -> Net:
    """A net with seeded weights under a mode."""
    made = Net(NETS[net], size)
    rng = np.random.RandomState(seed)
    for parameter in made.get_parameters():
        parameter.set_data(Tensor((rng.randn(*parameter.shape) * 0.1).astype(np.float32)))
    MODES[mode](made)
    return made


def batch(size: Size, step: int) -> Tensor:
    """The input of a step."""
    return Tensor(np.random.RandomState(1000 + step).randn(size.batch, size.tokens, size.width).astype(np.float32))


class Trainer:
    """Trains a net with AdamW."""

    def __init__(self, net: Net) -> None:
        self.net = net
        weights = tuple(net.trainable_params())
        self.gradient = ms.value_and_grad(net, None, weights)
        self._optimizer = mint.optim.AdamW(weights, lr=1e-2)

    def step(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step; returns its loss and gradients without waiting for them."""
        loss, gradients = self.gradient(x)
        self._optimizer(gradients)
        return loss, gradients


@dataclass(frozen=True)
class Outcome:
    """What a training came to, to the last bit."""

    losses: tuple[str, ...]
    gradients: tuple[str, ...]
    """A digest per step."""
    parameters: str
    """A digest of the parameters after the last step."""


def train(net: str, mode: str, size: Size, steps: int = 3) -> Outcome:
    """Train a fresh net, and read values only when all steps have been queued: reading would wait for the device."""
    trainer = Trainer(build(net, mode, size))
    return outcome(trainer, [trainer.step(batch(size, step)) for step in range(steps)])


def outcome(trainer: Trainer, done: Sequence[tuple[Tensor, tuple[Tensor, ...]]]) -> Outcome:
    """What a trainer's steps came to.

    Raises:
        RuntimeError: Bytes are left behind.
    """
    if live := SwapManager().stats().live_bytes:
        raise RuntimeError(f"{live} bytes are still swapped after the last step")
    return Outcome(
        tuple(float(loss.asnumpy()).hex() for loss, _ in done),
        tuple(digest(gradients) for _, gradients in done),
        digest(trainer.net.get_parameters()),
    )


def measured(mode: str, size: Size, steps: int) -> dict[str, float]:
    """Peak of the pool and seconds of a step of the transformer, after one step that doesn't count."""
    gc.collect()  # the nets before this one
    trainer = Trainer(build("transformer", mode, size))
    x = batch(size, 0)
    trainer.step(x)
    ms.runtime.synchronize()
    ms.runtime.empty_cache()
    ms.runtime.reset_peak_memory_stats()
    SwapManager().reset()
    standing = ms.runtime.memory_allocated()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        trainer.step(x)
        ms.runtime.synchronize()
        seconds.append(time.perf_counter() - begin)
    stats = SwapManager().stats()
    return {
        "peak": ms.runtime.max_memory_allocated() - standing,  # MindSpore may still hold the net before
        "reserved": ms.runtime.max_memory_reserved(),
        "standing": standing,
        "seconds": statistics.median(seconds),
        "moved": (stats.offloaded_bytes + stats.loaded_bytes) / steps,
        "on_host": stats.host_peak_bytes,
        "window": stats.window_peak_bytes,
    }


def least(mode: str, size: Size, steps: int) -> dict[str, Any]:
    """Of four measurements that with the lowest peak, and the peaks of all.

    MindSpore hands out memory on one thread and launches on another, and a copy between device and host holds its
    tensors until it is launched (2.10.0). On a busy machine the second thread is late, and the peak higher by some
    tensors, once in a while.
    """
    found = [measured(mode, size, steps) for _ in range(4)]
    return {**min(found, key=lambda each: each["peak"]), "peaks": [each["peak"] for each in found]}


def digest(tensors: Any) -> str:
    """SHA-256 of the values."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.asnumpy().tobytes())
    return total.hexdigest()
