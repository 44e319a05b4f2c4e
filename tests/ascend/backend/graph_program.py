"""Policies in GRAPH_MODE on the emulated device, by MindSpore's own back end; prints what was found."""

import json
from collections.abc import Callable
from typing import Any

import ascsim
import mindspore as ms
import numpy as np
from mindspore import Tensor, lazy_inline, mint, nn
from mindspore.ops import operations
from mindspore.ops.auto_generate import gen_ops_prim

from hyper_parallel import PolicyError, apply_policy, verify_policy

ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
ms.set_context(jit_config={"jit_level": "O0"})
WIDTH, ROWS, DEPTH = 16, 512, 4
found: dict[str, dict[str, Any]] = {}


class Block(nn.Cell):
    """Two products around two activations, by Primitives that the emulated device has."""

    @lazy_inline
    def __init__(self) -> None:
        super().__init__()
        self.up = ms.Parameter(Tensor(np.zeros((WIDTH, WIDTH), np.float32)), name="up")
        self.down = ms.Parameter(Tensor(np.zeros((WIDTH, WIDTH), np.float32)), name="down")
        self.first, self.second = gen_ops_prim.MatMulExt(), gen_ops_prim.MatMulExt()
        self.tanh, self.sigmoid = operations.Tanh(), operations.Sigmoid()

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.sigmoid(self.tanh(self.first(x, self.up))), self.down)


class Plain(Block):
    """The same, inlined early."""

    def __init__(self) -> None:
        Block.__init__.__wrapped__(self)


class Net(nn.Cell):
    """Blocks and a sum."""

    def __init__(self, kind: type[nn.Cell] = Block) -> None:
        super().__init__()
        self.blocks = nn.CellList([kind() for _ in range(DEPTH)])
        for index, parameter in enumerate(self.get_parameters()):
            values = np.random.RandomState(index).randn(WIDTH, WIDTH) * 0.5
            parameter.set_data(Tensor(values.astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mint.sum(x)


class Step(nn.Cell):
    """A net and its gradient."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.net, self.gradient = net, ms.value_and_grad(net, None, net.trainable_params())

    def construct(self, x: Tensor) -> Any:
        return self.gradient(x)


X = Tensor(np.random.RandomState(9).randn(ROWS, WIDTH).astype(np.float32))


def run(name: str, net: nn.Cell, reference: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """Take two steps, and write down what happened in both, and the peak of the second."""
    step = Step(net)
    record, same = [], True
    before = ascsim.counters()
    for _ in range(2):
        ms.runtime.synchronize()
        ms.runtime.reset_max_memory_allocated()
        level = ms.runtime.memory_allocated()
        value, gradients = step(X)
        ms.runtime.synchronize()
        record = [each.asnumpy() for each in (value, *gradients)]
        same = same and reference is not None and all(map(np.array_equal, record, reference))
    after = ascsim.counters()
    counted = ("d2h_async", "h2d_async", "d2h_async_bytes", "h2d_async_bytes", "races")
    found[name] = {each: after[each] - before[each] for each in counted}
    found[name] |= {"peak": ms.runtime.max_memory_allocated() - level, "same": same}
    return record


def error_of(call: Callable[[], Any], kind: type[Exception] = PolicyError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


RULES: dict[str, dict[str, Any]] = {
    "recompute": {"cells": "blocks.*", "policy": "must_recompute"},
    "swap": {"cells": "blocks.*", "policy": "must_swap", "graph": {"backward_prefetch": 1}},
}


def policy(name: str) -> dict[str, Any]:
    return {"version": 1, "rules": [RULES[name]]}


# ---- launches aren't waited for
plain = run("plain", Net())
net = Net()
apply_policy(net, policy("recompute"))
report = verify_policy(net, X)
run("recompute", net, plain)
found["recompute"]["honoured"] = report.honoured
found["recompute"]["recomputed"] = report.recomputed
found["refused"] = {"no blocking": error_of(lambda: apply_policy(Net(), policy("swap")))}
net = Net()
for block in net.blocks:
    for primitive in (block.first, block.second, block.tanh, block.sigmoid):
        primitive.add_prim_attr("offload", True)
        primitive.add_prim_attr("backward_prefetch", 1)
run("by hand", net, plain)

# ---- they are
ms.runtime.launch_blocking()
run("plain, blocking", Net(), plain)
net = Net()
plan = apply_policy(net, policy("swap"))
report = verify_policy(net, X)
run("swap", net, plain)
found["swap"]["honoured"] = report.honoured
found["swap"]["moves"] = report.moves
found["refused"]["inlined early"] = error_of(lambda: apply_policy(Net(Plain), policy("swap")))
found["swap"]["notes"] = [note for note in plan.notes if "gives no memory back" in note]
instead = {**policy("swap"), "swap": {"when_exhausted": ["recompute"]}}
net = Net(Plain)
found["instead"] = {"notes": list(apply_policy(net, instead).notes), "scope": net.blocks[0].get_scope()}
ms.set_context(mode=ms.PYNATIVE_MODE)
found["refused"]["under jit"] = error_of(lambda: apply_policy(Net(), policy("swap"), mode="graph"))
ms.set_context(mode=ms.GRAPH_MODE)
ms.runtime.set_memory(optimize_level="O1")
found["refused"]["planned memory"] = error_of(lambda: apply_policy(Net(), policy("swap")))

# ---- what the emulator doesn't have; last, since the runtime has failed then
step = Step(Net(Plain))
step.set_jit_config(ms.JitConfig(jit_level="O1"))
found["missing"] = {"O1": error_of(lambda: step(X)[0].asnumpy(), RuntimeError)}
print(json.dumps(found))
