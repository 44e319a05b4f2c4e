"""Device memory by policy: what a forward holds, the peak of a step, where saved tensors lie; prints what was found."""

import json
from typing import Any, ClassVar

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy, presets
from ms_ops.autograd import wait_for_operators
from tests.ascend.backend.weights import ROWS, WIDE, Weights

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
ms.runtime.launch_blocking()  # else MindSpore's launch thread holds tensors for longer on a busy machine
manager = SwapManager()
found: dict[str, Any] = {}
SWAP: dict[str, Any] = {"policy": CheckpointPolicy.MUST_SWAP}
SAVE, PREFER_SAVE = {"policy": CheckpointPolicy.MUST_SAVE}, {"policy": CheckpointPolicy.PREFER_SAVE}


class Block(Weights):
    """Backward needs its input, the first product (four times as wide) and the activation's result."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.matmul(mint.nn.functional.gelu(ops.matmul(x, self.up)), self.down) + 1


class Net(nn.Cell):
    def __init__(self, policy: dict[str, Any] | None, layers: int) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(seed) for seed in range(layers)])
        for layer in self.layers if policy is not None else ():
            activation_policy(**policy)(layer)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean()


def batch() -> Tensor:
    return Tensor(np.random.RandomState(1).randn(ROWS, WIDE).astype(np.float32))


def levels_of(policy: dict[str, Any] | None, layers: int = 5, steps: int = 4, **settings: Any) -> dict[str, int]:
    """Bytes beyond those between steps: at the end of the forward, at the peak, and after it; and what is on host."""
    manager.configure(**{"min_bytes": 0, "fuse_below": 0, "pending": 1, "window": 1, **settings})
    manager.reset()
    net, levels, x = Net(policy, layers), {"peak": 2**60}, batch()

    def forward(x: Tensor) -> Tensor:
        loss = net(x)
        back_end = manager.engine.back_end
        with back_end.lock:
            back_end.advance(lambda: not manager.engine._offloads.backlog)
        ms.runtime.synchronize()
        levels["held"] = ms.runtime.memory_allocated() - standing
        levels["on host"] = manager.stats().host_live_bytes
        return loss

    step = ms.value_and_grad(forward, None, net.trainable_params())
    for index in range(steps):  # MindSpore launches late, once in a while: the least peak is that of the policy
        wait_for_operators()
        ms.runtime.synchronize()
        ms.runtime.reset_peak_memory_stats()
        standing = ms.runtime.memory_allocated()
        result = step(x)
        ms.runtime.synchronize()
        if index:  # what the first step makes for good doesn't count
            levels["peak"] = min(levels["peak"], ms.runtime.max_memory_allocated() - standing)
        del result
        wait_for_operators()
        levels["left"] = ms.runtime.memory_allocated() - standing
    return levels


found["plain"] = levels_of(None)
found["must_save"] = levels_of(SAVE)
found["prefer_save"] = levels_of(PREFER_SAVE)
found["nothing large enough"] = levels_of(SWAP, min_bytes="1GiB")
found["must_swap"] = levels_of(SWAP)
found["peaks by budget"] = [
    levels_of(SWAP, host_budget=budget, when_exhausted=["keep"])["peak"] for budget in ("40KiB", "160KiB", "1MiB")
]


def held_by_a_block(options: dict[str, Any] | None) -> int:
    """Bytes that each further block holds at the end of the forward."""
    four, two = (levels_of(options, layers, steps=2)["held"] for layers in (4, 2))
    return (four - two) // 2


found["held"] = {
    "plain": held_by_a_block(None),
    **{policy.name.lower(): held_by_a_block({"policy": policy}) for policy in CheckpointPolicy},
    "full": held_by_a_block(presets.full()),
    "selective": held_by_a_block(presets.selective()),
    "every_other_matmul": held_by_a_block(presets.every_other_matmul()),
    "attention_only": held_by_a_block(presets.attention_only()),
    "inputs_on_host": held_by_a_block(presets.inputs_on_host()),
}


class Saves(_Function):
    """Notes where the tensors lie that it has saved, what they are, and the sum of their values."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x * 1, *others)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = ctx.saved_tensors
        Saves.seen.append([[each.device, str(each.dtype), list(each.shape), each.has_init] for each in saved])
        for each, about in zip(saved, Saves.seen[-1], strict=True):
            about.append(float(each.asnumpy().astype(np.float32).sum()))
        return (gradient * saved[0], *[None] * (len(saved) - 1))


class UsesSaves(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        on_host = mint.empty((ROWS, WIDE), dtype=ms.float32, device="CPU", pin_memory=True)
        on_host.asnumpy()[:] = 3.0
        never_used = Tensor(np.ones((ROWS, 8), np.float16))
        return Saves.apply(x, mint.arange(ROWS), on_host, never_used)


def places(policy: dict[str, Any] | None) -> Any:
    cell = UsesSaves() if policy is None else activation_policy(**policy)(UsesSaves())
    first, last = Block(1), Block(2)
    manager.configure(min_bytes=0, fuse_below=0, pending=1, window=1)
    manager.reset()
    Saves.seen.clear()
    after = SWAP if policy is not None else None
    last = last if after is None else activation_policy(**after)(last)
    gradient = ms.grad(lambda x: (last(cell(first(x))) ** 2).mean())(batch())
    return [Saves.seen[-1], float(gradient.asnumpy().sum())]


found["places"] = {"plain": places(None), "swap": places(SWAP), "offloaded": manager.stats().offloaded_bytes}
manager.configure()
print(json.dumps(found))
