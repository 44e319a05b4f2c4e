"""Faults that users of offloading have reported elsewhere, as claims about whole steps."""

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager, apply_policy, swap
from ms_ops.host import HostTier, Slot
from tests.core.swap_nets import KINDS, X, net
from tests.helpers import (
    RECOMPUTE,
    SWAP,
    Layer,
    MlpLayer,
    Stack,
    assert_same,
    gradients,
    mean_square,
    numbers,
    on,
    seeded,
    settled,
    train,
)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_slow_copies_and_reused_slots_are_exact_each(
    kind: str, manager: SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = HostTier.read, HostTier.write

    def slow_read(tier: HostTier, slot: Slot, array: np.ndarray) -> None:
        time.sleep(0.003)
        read(tier, slot, array)

    def slow_write(tier: HostTier, slot: Slot, buffers: Sequence[Any]) -> None:
        time.sleep(0.003)
        write(tier, slot, buffers)

    manager.configure(min_bytes=0, tier="host", window=600, pending=600)
    monkeypatch.setattr(HostTier, "read", slow_read)
    monkeypatch.setattr(HostTier, "write", slow_write)
    assert_same(train(net(**KINDS[kind]), X, steps=3), train(net(), X, steps=3))


@pytest.mark.parametrize(("depth", "swapped"), [(8, 5), (5, 5), (1, 1), (3, 2)])
def test_exactly_the_layers_that_the_policy_names_are_swapped(depth: int, swapped: int, manager: SwapManager) -> None:
    """Layers of unequal sizes, and something after the last."""

    def make() -> nn.Cell:
        layers = [seeded(MlpLayer(8), seed=k) if k % 2 else Layer(8, seed=k) for k in range(depth)]
        return Stack([*layers, Layer(8, seed=depth)])

    one = make()
    apply_policy(one, {"version": 1, "rules": [{"cells": f"layers.[0-{swapped - 1}]", "policy": "must_swap"}]})
    manager.configure(min_bytes=0)
    assert_same(gradients(one, X, wait=True), gradients(make(), X))
    moved = {path for path, cell in manager.stats().cells.items() if cell.offloaded_bytes}
    assert moved == {f"layers.{index}" for index in range(swapped)}


class Subclassed(Layer):
    """A layer whose construct is another's."""

    def construct(self, x: Tensor) -> Tensor:
        return super().construct(x) + x


class Looped(nn.Cell):
    """One layer, called in a loop."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


@pytest.mark.parametrize("kind", ["subclassed", "in a loop", "shared"])
def test_layers_that_are_built_in_other_ways_are_swapped_too(kind: str, manager: SwapManager) -> None:
    def make(policy: Any) -> nn.Cell:
        if kind == "subclassed":
            return Stack([on(Subclassed(8), policy), Layer(8, seed=1)])
        layer = on(Layer(8), policy)
        return Stack([Looped(layer), Layer(8, seed=1)]) if kind == "in a loop" else Stack([layer, Layer(8), layer])

    assert_same(gradients(make(SWAP), X, wait=True), gradients(make(None), X))
    assert manager.stats().offloaded_bytes > 0


class Tanh(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


def test_at_the_end_of_forward_the_device_holds_exactly_what_was_predicted(manager: SwapManager) -> None:
    """Every layer saves its output; when all is on host, nothing swapped is on the device."""
    swapping = Stack([on(Tanh(), SWAP) for _ in range(6)])
    resident, originals = [], []

    def forward(x: Tensor) -> Tensor:
        hook = swapping.layers[2].register_forward_hook(lambda cell, i, output: originals.append(weakref.ref(output)))
        value = settled(mean_square(swapping(x)))
        hook.remove()
        resident.append(manager.engine.ledger.now["resident"])
        assert originals[0]() is None, "something else holds the tensor"
        return value

    ms.grad(forward)(X)
    assert resident == [0]
    assert manager.stats().host_peak_bytes == 6 * X.nbytes


def function(flag: Any, x: Tensor, *rest: Any) -> Tensor:
    y = ops.tanh(x) * x
    return y if flag is None or flag is False else y * 2 + sum(part for part in rest if isinstance(part, Tensor))


@pytest.mark.parametrize("flag", [True, False, None, "a string", 3], ids=str)
@pytest.mark.parametrize("count", range(3))
def test_positional_arguments_arrive_as_they_are(flag: Any, count: int) -> None:
    rest = [numbers(8, 8, seed=1), 5][:count]

    def run(call: Any) -> bytes:
        return ms.grad(lambda x: settled(call(flag, ops.sin(x), *rest).sum()))(X).asnumpy().tobytes()

    assert run(lambda *args: swap(function, *args)) == run(function)


def test_what_needs_no_gradient_needs_none_after_it_came_back(manager: SwapManager) -> None:
    seen: list[tuple[bool, bool]] = []

    class Notes(nn.Cell):
        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append((x._requires_grad, y._requires_grad))
            return ops.tanh(x * y) * y

    def make(policy: Any) -> Any:
        cell, after = on(Notes(), policy, **({"swap_inputs": True} if policy else {})), Layer(8)
        return lambda x: settled(mean_square(after(cell(ops.sin(x), ops.stop_gradient(ops.cos(x))))))

    got, want = (ms.grad(make(policy))(X).asnumpy() for policy in (RECOMPUTE, None))
    assert got.tobytes() == want.tobytes()
    assert seen[0] == seen[1], "in the forward and in the replay"
    assert manager.stats().loaded_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_that_is_dropped_is_gone_without_the_collector(kind: str) -> None:
    swapping = net(**KINDS[kind])
    gradients(swapping, X, wait=True)
    gone = [weakref.ref(cell) for cell in swapping.layers]
    gc.collect()
    plain = net()
    gradients(plain, X)
    theirs = [weakref.ref(cell) for cell in plain.layers]
    gc.collect()
    gc.disable()
    try:
        del swapping, plain
        assert [ref() is None for ref in gone] == [ref() is None for ref in theirs]
    finally:
        gc.enable()


def test_a_policy_that_keeps_everything_holds_nothing_back(manager: SwapManager) -> None:
    manager.configure(min_bytes="1GiB")
    gradients(net(**KINDS["swap"]), X, wait=True)
    stats = manager.stats()
    assert (stats.offloaded_bytes, stats.resident_peak_bytes, stats.live_bytes, stats.allocated_bytes) == (0, 0, 0, 0)
    assert stats.small_bytes > 0
