"""Training steps of a small net under policies that swap, beside the plain net; prints what was found."""

import contextlib
import ctypes
import json
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.graph.api import _pynative_executor

from hyper_parallel import (
    CheckpointPolicy,
    SwapManager,
    activation_policy,
)
from ms_ops.ascend import events as swap_events
from tests.ascend.backend.weights import ROWS, WIDE, Weights

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
SWAP, RECOMPUTE = CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE
LAYERS = 5
SMALL = {"pending": "64KiB", "window": "48KiB", "min_bytes": 0, "fuse_below": 0}
POLICIES: dict[str, dict[str, Any]] = {
    "swap": {"policy": SWAP},
    "recompute": {"policy": RECOMPUTE},
    "recompute, swapped inputs": {"policy": RECOMPUTE, "swap_inputs": True},
    "recompute, swapped operators": {
        "policy": RECOMPUTE,
        "ops": {"MatMul": SWAP, "*": CheckpointPolicy.PREFER_RECOMPUTE},
    },
}
manager = SwapManager()
found: dict[str, Any] = {}
mark = ctypes.CDLL(os.environ["ASCSIM_LIBRARY"]).ascsim_mark


class Block(Weights):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.breaks = False

    def construct(self, x: Tensor) -> Tensor:
        hidden = mint.nn.functional.gelu(ops.matmul(x, self.up))
        if self.breaks:
            raise KeyError("broken")
        return x + ops.matmul(hidden.T.T, self.down)


class Smooth(Block):
    def construct(self, x: Tensor) -> Tensor:
        return x + ops.matmul(mint.tanh(ops.matmul(x, self.up)), self.down)


class Net(nn.Cell):
    def __init__(self, policy: dict[str, Any] | None, layers: int = LAYERS, block: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.CellList([block(seed) for seed in range(layers)])
        if policy is not None:
            for layer in self.layers:
                activation_policy(**policy)(layer)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean()


def batch(seed: int = 1) -> Tensor:
    return Tensor(np.random.RandomState(seed).randn(ROWS, WIDE).astype(np.float32))


def train(net: Net, steps: int = 3, lock: Any = None) -> list[Any]:
    """Losses, gradients and weights of some steps, each taken under a lock if there is one."""
    lock = lock or contextlib.nullcontext()
    weights = net.trainable_params()
    step, x, record = ms.value_and_grad(net, None, weights), batch(), []
    for _ in range(steps):
        with lock:
            loss, gradients = step(x)
            ms.runtime.current_stream().synchronize()  # `asnumpy` waits for the default stream
        record.append([loss.asnumpy().copy()] + [each.asnumpy().copy() for each in gradients])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.set_data(weight - 0.05 * gradient)
        del loss, gradients
    record.append([weight.asnumpy().copy() for weight in weights])
    return record


def is_same(got: list[Any], plain: list[Any]) -> bool:
    return all(
        np.array_equal(a, b) for one, other in zip(got, plain, strict=True) for a, b in zip(one, other, strict=True)
    )


def of(name: str, **values: Any) -> None:
    found.setdefault(name, {}).update(values)


def begin(**settings: Any) -> None:
    manager.configure(**{**SMALL, **settings})
    manager.reset()


plain = train(Net(None))
for name, policy in POLICIES.items():
    begin()
    got = train(Net(policy))
    stats = manager.stats()
    of(
        name,
        same=is_same(got, plain),
        offloaded=stats.offloaded_bytes,
        loaded=stats.loaded_bytes,
        live=stats.live_bytes,
    )

for name, settings in {
    "fused": {"fuse_below": "1MiB", "window": "1MiB", "pending": "1MiB"},
    "default limits": {"pending": None, "window": None},
    "verified": {"verify": True},
    "file": {"tier": "file", "folder": tempfile.mkdtemp()},
    "file, verified": {"tier": "file", "verify": True},
}.items():
    begin(**settings)
    got = train(Net(POLICIES["swap"]))
    of(name, same=is_same(got, plain), live=manager.stats().live_bytes, tier=type(manager.engine.back_end).__name__)

# ---- the steady state: nothing waits on the host, nothing is pinned or made any more
begin()
net, levels = Net(POLICIES["swap"]), []
weights = net.trainable_params()
step, x = ms.value_and_grad(net, None, weights), batch()
for index in range(5):
    ms.runtime.synchronize()
    levels.append((manager.engine.tier.allocations, swap_events.made(), ms.runtime.memory_allocated()))
    mark(f"step {index}".encode())
    result = step(x)
    mark(b"")
    del result
of("steady", levels=levels)
stats = manager.stats()
of(
    "limits",
    pending=stats.pending_peak_bytes,
    window=stats.window_peak_bytes,
    late=stats.late_loads,
    waits=stats.wait_seconds,
    cancelled=stats.cancelled_bytes,
)


# ---- the ladder, bad input
def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


begin(host_budget=4096)
of("budget below one tensor", error=error_of(lambda: train(Net(POLICIES["swap"]), 1)))
for ladder in (["keep"], ["recompute", "keep"]):
    begin(host_budget="160KiB", when_exhausted=ladder)
    got = train(Net(POLICIES["swap"]))
    stats = manager.stats()
    of(
        f"ladder {ladder[0]}",
        same=is_same(got, plain),
        counted=stats.kept_bytes + stats.kept_regions + stats.recomputed_regions,
        peak=stats.host_peak_bytes,
    )
begin()
manager.configure(**SMALL, host_budget=2**50)
of("more than the machine has", error=error_of(lambda: manager.engine))
manager.configure()

# ---- groups by hand
begin(pending="1MiB", window="1MiB")
net = Net(POLICIES["swap"], 2)


def by_hand(x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        manager.set_current_group_name(f"group {index}")
        x = layer(x)
        manager.set_current_group_name(None)
    manager.launch_offload("group 0")
    x = x * 1
    manager.wait_offload("group 0")
    manager.launch_load("group 0")
    manager.wait_load("group 0")
    of("by hand", twice=error_of(lambda: manager.launch_load("group 0")))
    return (x * x).mean()


two = net.trainable_params()
value, gradients = ms.value_and_grad(by_hand, None, two)(batch())
value2, plain2 = ms.value_and_grad(Net(None, 2), None, Net(None, 2).trainable_params())(batch())
other = Net(None, 2)
value2, plain2 = ms.value_and_grad(other, None, other.trainable_params())(batch())
of(
    "by hand",
    same=all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(gradients, plain2, strict=True)),
    offloaded=manager.stats().offloaded_bytes,
    loaded=manager.stats().loaded_bytes,
)
del gradients, plain2, value, value2
of("by hand", live=manager.stats().live_bytes)

# ---- read twice, kept alive, given up
begin()
net = Net(POLICIES["swap"], 3, Smooth)
twice = ms.grad(lambda x: ms.grad(net)(x).sum())(batch())
reference = Net(None, 3, Smooth)
expected = ms.grad(lambda x: ms.grad(reference)(x).sum())(batch())
of("second order", same=bool(np.array_equal(twice.asnumpy(), expected.asnumpy())))
del twice, expected
of("second order", live=manager.stats().live_bytes)

net = Net(POLICIES["swap"])
net.layers[3].breaks = True
of("broken forward", error=error_of(lambda: ms.grad(net)(batch())), live=manager.stats().live_bytes)
net.layers[3].breaks = False
manager.abort_step()
of("broken forward", same=is_same(train(net), plain), live_after=manager.stats().live_bytes)


class Breaks(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return x * 1

    def bprop(self, x: Tensor, out: Tensor, gradient: Tensor) -> Any:
        raise KeyError("broken")


net = Net(POLICIES["swap"])
breaks = Breaks()


def broken_backward(x: Tensor) -> Tensor:
    for index, layer in enumerate(net.layers):
        x = layer(x)
        if index == 1:
            x = breaks(x)
    return (x * x).mean()


of("broken backward", error=error_of(lambda: ms.grad(broken_backward, None, net.trainable_params())(batch()))[:8])
manager.abort_step()
of("broken backward", live=manager.stats().live_bytes, same=is_same(train(net), plain))

held = []
net = Net(POLICIES["swap"])
_pynative_executor.set_grad_flag(True)
held.append(net(batch()))  # a forward whose backward never comes
of("no backward", before=manager.stats().live_bytes)
held.clear()
_pynative_executor.set_grad_flag(False)
with ThreadPoolExecutor(1) as watcher:
    of("no backward", watched=watcher.submit(lambda: manager.stats().live_bytes).result())
of("no backward", live=manager.stats().live_bytes)

# ---- two threads, each with a net, one of them on a stream of its own
begin()
results: dict[str, Any] = {}
turn = threading.Lock()  # MindSpore 2.10 takes one gradient at a time


def on_thread(name: str, own_stream: bool) -> None:
    def work() -> None:
        results[name] = train(Net(POLICIES["swap"]), lock=turn)

    if own_stream:
        stream = ms.runtime.Stream()
        with ms.runtime.StreamCtx(stream):
            work()
            ms.runtime.current_stream().synchronize()
    else:
        work()


threads = [threading.Thread(target=on_thread, args=(f"thread {index}", bool(index))) for index in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
of("two threads", same=[name in results and is_same(results[name], plain) for name in ("thread 0", "thread 1")])
of("two threads", live=manager.stats().live_bytes)

# ---- the trace
begin()
file = Path(tempfile.mkdtemp()) / "run.json"
with manager.trace(file):
    train(Net(POLICIES["swap"]), 1)
events = json.loads(file.read_text())["traceEvents"]
spans: dict[str, list[tuple[float, float]]] = {}
for event in events:
    if event["ph"] == "X":
        spans.setdefault(event["cat"], []).append((event["ts"], event["ts"] + event["dur"]))
overlaps = sum(
    second[0] < first[1] - 0.01
    for track in ("offload", "load")
    for first, second in zip(sorted(spans[track]), sorted(spans[track])[1:], strict=False)
)
of("trace", tracks=sorted(spans), overlaps=overlaps)

manager.configure()
print(json.dumps(found))
