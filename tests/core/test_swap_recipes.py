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

from hyper_parallel import HostMemoryError, SwapManager, apply_policy, checkpoint, swap
from ms_ops.autograd import wait_for_operators
from ms_ops.host import HostTier, Slot
from tests.core.swap_nets import KINDS, X, net
from tests.helpers import (
    PREFER_SAVE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    MlpLayer,
    Record,
    Stack,
    assert_same,
    flat,
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
    stats = manager.stats()
    assert 0 < stats.host_allocations < stats.offloaded_bytes // X.nbytes, "slots were used again"
    assert stats.loaded_bytes > 0


@pytest.mark.parametrize(("depth", "swapped"), [(32, 5), (5, 5), (1, 1), (3, 2)])
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


VIEWS: dict[str, Any] = {
    "a slice with an offset": lambda x: x[1:],
    "every second column": lambda x: x[:, ::2],
    "permuted": lambda x: x.permute(1, 0),
    "broadcast": lambda x: ops.broadcast_to(x[:1], (4, 8)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_steps_with_views_are_exact_and_views_come_back_as_they_were(name: str, manager: SwapManager) -> None:
    """A view is saved inside a swapped region, another one is the input of a replayed region, on host meanwhile."""
    seen: list[Any] = []

    class Saves(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            y = VIEWS[name](ops.tanh(x))
            return (ops.exp(y) * y).sum(-1, keepdims=True)

    class Reads(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            seen.append((x.shape, x.stride(), x.storage_offset()))
            return ops.tanh(x) * x

    def run(swaps: bool) -> Record:
        saves, reads = on(Saves(), SWAP if swaps else None), Reads()
        if swaps:
            on(reads, RECOMPUTE, swap_inputs=True)

        def forward(x: Tensor) -> Tensor:
            z = reads(VIEWS[name](ops.sin(x)))
            return settled(mean_square(saves(x * 2)) + mean_square(z))

        return flat(ms.value_and_grad(forward, 0)(X), "gradients")

    assert_same(run(swaps=True), run(swaps=False))
    assert seen[:-1] == seen[:1] * 2, "in the forward, in the replay"
    assert manager.stats().loaded_bytes > 0


class Takes(nn.Cell):
    """A weight times every tensor that it is called with; what else it is called with decides, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ms.Parameter(numbers(8, 8, seed=5), name="weight")

    def construct(self, *args: Any) -> Tensor:
        y = ops.tanh(self.weight) * self.weight
        for index, part in enumerate(args):
            factor = ops.tanh(part) if isinstance(part, Tensor) else 3 if part else 2
            y = y * factor + index
        return y


CALLED: dict[str, Any] = {
    "swap": lambda cell: lambda *args: swap(cell, *args),
    "checkpoint": lambda cell: lambda *args: checkpoint(cell, *args),
    "checkpoint, swapped inputs": lambda cell: lambda *args: checkpoint(cell, *args, swap_inputs=True),
    "a swapped cell": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
}


@pytest.mark.parametrize("first", [True, False, None, "a tensor"], ids=str)
@pytest.mark.parametrize("way", CALLED)
def test_positional_arguments_arrive_as_they_are(way: str, first: Any) -> None:
    """From none to four; the first is something that could be taken for a flag."""

    def run(call: Any, weight: ms.Parameter, count: int) -> Record:
        def forward(x: Tensor) -> Tensor:
            given = [ops.sin(x) if first == "a tensor" else first, ops.cos(x), None, ops.exp(x)][:count]
            return settled(mean_square(call(*given)))

        return flat(ms.value_and_grad(forward, 0, [weight])(X), f"{count} arguments")

    for count in range(5):
        cell, plain = Takes(), Takes()
        assert_same(run(CALLED[way](cell), cell.weight, count), run(plain, plain.weight, count))


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
    assert seen == [(True, False)] * 3, "in the forward, in the replay, and in plain"
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


@pytest.mark.parametrize("way", ["swap", "checkpoint", "checkpoint, swapped inputs"])
def test_a_region_whose_closure_holds_its_own_output_is_gone_without_the_collector(way: str) -> None:
    def step() -> weakref.ref:
        layer, stored = Layer(8), {}

        def region(x: Tensor) -> Tensor:
            return layer(x) if isinstance(stored, dict) else x

        def forward(x: Tensor) -> Tensor:
            stored["output"] = CALLED[way](region)(ops.sin(x))
            return settled(mean_square(stored["output"]))

        ms.grad(forward)(X)
        wait_for_operators()  # until then MindSpore itself holds the graph
        return weakref.ref(layer)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", [{"policy": SAVE}, {"policy": PREFER_SAVE}, {"policy": SWAP}], ids=str)
def test_a_policy_that_keeps_everything_holds_nothing_back(keeps: dict[str, Any], manager: SwapManager) -> None:
    manager.configure(min_bytes="1GiB")
    gradients(net(**keeps), X, wait=True)
    stats = manager.stats()
    assert (stats.offloaded_bytes, stats.resident_peak_bytes, stats.live_bytes, stats.allocated_bytes) == (0, 0, 0, 0)
    assert (stats.small_bytes > 0) is (keeps["policy"] is SWAP)


MIB = 2**20


class Wide(nn.Cell):
    """Saves one tensor of half a MiB."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


@pytest.mark.parametrize("ladder", [[], ["keep"], ["recompute", "keep"]], ids=str)
def test_a_host_limit_of_one_mebibyte_is_kept_and_named(ladder: list[str], manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget="1MiB", when_exhausted=ladder)
    x = numbers(256, 512)

    def make(policy: Any) -> nn.Cell:
        return Stack([on(Wide(), policy) for _ in range(5)])

    if not ladder:
        with pytest.raises(HostMemoryError) as caught:
            gradients(make(SWAP), x, wait=True)
        message = str(caught.value)
        assert all(part in message for part in ("no room on host", "host_budget is 1048576 bytes", "raise host_budget"))
        assert "device" not in message, "that isn't what has run out"
        del caught
    else:
        assert_same(gradients(make(SWAP), x, wait=True), gradients(make(None), x))
    stats = manager.stats()
    assert 0 < stats.host_peak_bytes <= stats.allocated_bytes <= MIB
    assert (stats.kept_bytes + stats.kept_regions > 0) is (ladder == ["keep"])
    assert (stats.recomputed_regions > 0) is ("recompute" in ladder)
