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
from tests.core.swap_fakes import SIZE, group_of, tensor_of, value_of
from tests.core.swap_nets import KINDS, X, net
from tests.core.swap_streams import LateStreams
from tests.helpers import assert_same, train


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
    """What the manager moves with: copies run when they are waited for, and memory that was let go of is overwritten."""
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
