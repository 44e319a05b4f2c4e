"""Copies that run as late as they may, in any order: what depends on one has waited for it."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import SwapManager
from hyper_parallel.core.activation_memory import swap_manager
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_tensor import SwapTensor
from tests.core.swap_fakes import SIZE, FakeTier, group_of, tensor_of, value_of
from tests.core.swap_nets import KINDS, X, net
from tests.core.swap_streams import LateStreams
from tests.helpers import assert_same, train

PAGE = 4096


def engine_of(streams: LateStreams, **settings: Any) -> SwapEngine:
    return SwapEngine(SwapSettings(**{"min_bytes": 0, "fuse_below": 0, "tier": "host", **settings}), streams)


def test_memory_is_held_until_its_late_copy_has_run() -> None:
    streams = LateStreams()
    engine = engine_of(streams)
    array = np.full(1024, 7, np.float32)
    gone = weakref.ref(array)
    (handle,) = group_of(engine, Tensor.from_numpy(array))
    del array
    engine.region_begins()
    gc.collect()
    assert (gone() is not None, streams.copies["out"]) == (True, 0)
    streams.some_run()
    gc.collect()
    assert gone() is None
    for _ in range(4):  # which may get the memory
        tensor_of(1)
    assert value_of(handle) == 7
    assert streams.rules == []


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, manager: SwapManager) -> Iterator[LateStreams]:
    """What the manager moves with: copies run when they are waited for; what was let go of is overwritten."""
    made = LateStreams(poison=True)
    monkeypatch.setattr(swap_manager, "back_end_of", lambda settings: made)
    # one tensor on its way, one loaded ahead: nearly every copy is waited for
    manager.configure(min_bytes=0, fuse_below=0, tier="host", pending=1, window=1)
    yield made
    manager.configure()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_exact_though_copies_run_late_and_what_was_copied_is_overwritten(
    kind: str, streams: LateStreams, manager: SwapManager
) -> None:
    assert_same(train(net(**KINDS[kind]), X, steps=3), train(net(), X, steps=3))
    assert min(streams.copies["out"], streams.copies["in"]) >= 3
    assert streams.rules == []


# ---- budgets


def on_device_at_the_end_of_forward(sizes: list[list[int]], budget: int, window: int) -> tuple[int, int, int]:
    """Bytes on the device, their peak until all was read, and the peak on host, of groups of these sizes in pages."""
    streams = LateStreams(tier=FakeTier(budget * PAGE))
    engine = engine_of(streams, when_exhausted=("keep",), window=window * PAGE)
    groups = []
    for pages in sizes:
        engine.region_begins()
        streams.some_run()
        groups.append(group_of(engine, *(tensor_of(1, each * PAGE // 4) for each in pages)))
    engine.region_begins()
    streams.some_run()
    level = engine.ledger.now["resident"]
    while groups:
        handles = groups.pop()
        while handles:
            handles.pop().get()
            streams.some_run(0.5)
    assert engine.live_bytes() == 0
    assert engine.tier.used == 0
    assert not streams.rules
    return level, engine.ledger.peaks["resident"], engine.ledger.peaks["host"]


def test_no_budget_is_exceeded_and_a_larger_one_never_leaves_more_on_the_device() -> None:
    draw = random.Random(1)
    for _ in range(500):
        sizes = [[draw.randint(1, 4) for _ in range(draw.randint(1, 2))] for _ in range(draw.randint(1, 4))]
        budgets = sorted(draw.sample(range(1, 16), 2))
        window = draw.randint(1, 6)
        found = [on_device_at_the_end_of_forward(sizes, budget, window) for budget in budgets]
        most = max(window + max(map(max, sizes)), *map(sum, sizes), 0)
        for budget, (level, peak, host) in zip(budgets, found, strict=True):
            case = f"{sizes}, budget {budget}, window {window}"
            assert host <= budget * PAGE, case
            assert peak <= level + most * PAGE, case
        assert found[0][0] >= found[1][0], f"{sizes}, budgets {budgets}"


# ---- random schedules


def train_at_random(engine: SwapEngine, seed: int) -> None:
    """Forwards, backwards in any order, evaluations that are dropped; every value that is read is the right one."""
    draw = random.Random(seed)
    groups: list[tuple[list[Any], int]] = []
    for value in range(1, 25):
        engine.back_end.some_run(0.6)
        action = draw.choice(["forward", "forward", "forward", "backward", "backward", "drop"])
        if action == "forward" or not groups:
            engine.region_begins()
            groups.append((group_of(engine, *(tensor_of(value) for _ in range(3))), value))
            continue
        handles, right = groups.pop(draw.randrange(len(groups)) if draw.random() < 0.3 else -1)
        while action == "backward" and handles:
            assert value_of(handles.pop()) == right
        handles.clear()
    for handles, _ in groups:
        handles.clear()
    engine.back_end.some_run()
    assert engine.live_bytes() == 0


def broken_rules(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        streams = LateStreams(seed)
        try:
            train_at_random(engine_of(streams, pending=3 * SIZE, window=4 * SIZE), seed)
        except Exception as error:
            found.append(repr(error))
        found += streams.rules
    return found


def test_reads_follow_what_they_read_and_reuse_follows_the_last_read_on_every_schedule() -> None:
    assert broken_rules(range(60)) == []


def gives_slots_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    release = SwapEngine._release

    def mutant(engine: SwapEngine, entry: SwapTensor) -> None:
        release(engine, entry)
        engine._offloads.free_slot(entry)

    monkeypatch.setattr(SwapEngine, "_release", mutant)


def loads_what_is_still_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = LateStreams._write

    def mutant(streams: LateStreams, transfer: Any) -> None:
        clock = dict(streams._clocks["host"])
        sent(streams, transfer)
        streams._clocks["host"].clear()
        streams._clocks["host"].update(clock)  # the engine was told, but nobody has waited for the copy

    monkeypatch.setattr(LateStreams, "_write", mutant)


@pytest.mark.parametrize(
    "mistake",
    [
        gives_slots_back_too_early,
        loads_what_is_still_on_its_way,
    ],
)
def test_a_mistake_in_the_order_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert broken_rules(range(10))
