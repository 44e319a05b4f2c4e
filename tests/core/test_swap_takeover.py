"""What a region saved is only noted when it ends; whoever has time makes transfers of it, and reading is quick."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, ops

from hyper_parallel import HostMemoryError, ReplayMismatchError, SwapManager, SwapStateError
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_tensor import SwapState
from ms_ops.autograd import requires_grad
from ms_ops.host import TierFull
from tests.core.swap_fakes import SIZE, FakeTier, engine_with, group_of, on_host, tensor_of, value_of, wait_for
from tests.core.swap_nets import X, assert_clean, net
from tests.helpers import SWAP, assert_same, gradients


@contextmanager
def busy(**settings: Any) -> Iterator[tuple[SwapEngine, FakeTier]]:
    """An engine whose copy thread is writing, so that it has no time, and whose tier has room for more."""
    tier = FakeTier()
    with engine_with(tier, **settings) as engine:
        on_host(group_of(engine, *map(tensor_of, range(8))))  # they die: their slots are free from now on
        engine.stats()
        tier.gate.clear()
        writing = group_of(engine, tensor_of(100))
        engine.region_begins()
        wait_for(lambda: writing[0].entry.busy)
        yield engine, tier


def noted(engine: SwapEngine, *values: int, name: str = "") -> list[SwapHandle]:
    """Close a group, and leave the rest to whoever has time."""
    with engine.open_group("layer", name=name) as group:
        return [group.add(tensor_of(value)) for value in values]


def test_a_region_that_ends_is_only_noted_while_the_copy_thread_is_busy() -> None:
    with busy() as (engine, tier):
        (handle,) = noted(engine, 1)
        assert engine._takeovers.is_pending and handle.tensor is not None
        tier.gate.set()
        wait_for(lambda: handle.tensor is None)  # the copy thread took it over
        assert not engine._takeovers.is_pending


def test_copies_leave_in_the_order_of_regions_however_late_they_were_taken_over() -> None:
    with busy() as (engine, tier):
        handles = []
        for value in (1, 2, 3):
            handles += noted(engine, value)
            engine.region_begins()
        assert engine._takeovers.is_pending
        tier.gate.set()
        wait_for(lambda: not engine._takeovers.is_pending)
        on_host(handles)
        assert tier.first_values("write")[-3:] == [1, 2, 3]


def test_a_region_that_begins_does_not_wait_below_the_limit_and_takes_over_above() -> None:
    with busy(pending=4 * SIZE) as (engine, tier):
        (first,) = noted(engine, 1)
        engine.region_begins()
        assert first.tensor is not None, "below the limit nothing is done by the thread that trains"
        handles = noted(engine, 2, 3, 4)
        threading.Timer(0.2, tier.gate.set).start()
        engine.region_begins()
        assert engine._offloads.backlog <= 4 * SIZE
        assert all(handle.tensor is None for handle in (first, *handles))


def test_what_is_read_before_it_was_taken_over_stays() -> None:
    with busy() as (engine, tier):
        handles = noted(engine, 1, 2)
        assert [value_of(handle) for handle in handles] == [1, 2]
        assert engine._takeovers.is_pending, "who reads it need not wait"
        tier.gate.set()
        wait_for(lambda: not engine._takeovers.is_pending)
        engine.region_begins()
        assert [handle.entry.state for handle in handles] == [SwapState.RESIDENT] * 2
        assert engine.stats().cancelled_bytes == 2 * SIZE


def test_what_is_noted_is_counted_whenever_somebody_asks() -> None:
    with busy() as (engine, _):
        handles = noted(engine, 1, 2)
        assert engine.live_bytes() == 3 * SIZE
        del handles
        assert engine.live_bytes() == SIZE


def test_a_write_before_it_was_taken_over_is_seen() -> None:
    with busy() as (engine, _):
        tensor = tensor_of(1)
        with engine.open_group("layer") as group:
            handle = group.add(tensor)
        assert engine._takeovers.is_pending
        tensor.copy_(tensor_of(2))
        with pytest.raises(ReplayMismatchError, match=r"was written by Tensor\.copy_"):
            handle.get()


def test_a_group_that_the_user_moves_is_taken_over_at_once() -> None:
    with busy() as (engine, _):
        (handle,) = noted(engine, 1, name="by hand")
        assert handle.tensor is None


def test_a_region_for_which_the_host_must_be_asked_fails_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(tier: FakeTier, size: int) -> Any:
        raise TierFull("the disk is full")

    with busy() as (engine, _):
        monkeypatch.setattr(FakeTier, "_grow", refuses)
        with pytest.raises(HostMemoryError, match=r"no room on host for .*the disk is full"):
            noted(engine, *range(20))


def test_a_take_over_that_fails_later_is_told_to_the_thread_that_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(tier: FakeTier, nbytes: int) -> Any:
        raise TierFull("gone meanwhile")

    with busy() as (engine, tier):
        (handle,) = noted(engine, 1)
        monkeypatch.setattr(FakeTier, "take", refuses)
        tier.gate.set()
        wait_for(lambda: engine._offloads._failures)
        with pytest.raises(HostMemoryError, match="gone meanwhile"):
            engine.region_begins()
        assert value_of(handle) == 1


def test_what_was_noted_by_an_engine_that_breaks_is_given_up_and_holds_no_history() -> None:
    with busy() as (engine, tier):
        x = tensor_of(1)
        kept: list[SwapHandle] = []

        def forward(x: Tensor) -> Tensor:
            y = ops.tanh(x)
            with engine.open_group("layer") as group:
                kept.append(group.add(y))
            assert requires_grad(kept[0].tensor)
            return y

        ms.grad(forward)(x)
        engine.breaks(KeyboardInterrupt())
        with pytest.raises(SwapStateError, match="was given up"):
            kept[0].get()
        assert not requires_grad(kept[0].tensor)
        tier.gate.set()


def test_what_is_there_is_read_without_asking_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SwapHandle] = []
    fetch = SwapEngine.fetch
    with engine_with(FakeTier()) as engine:
        handles = group_of(engine, *map(tensor_of, range(6)))
        engine.region_begins()
        on_host(handles)
        assert value_of(handles[5]) == 5
        wait_for(lambda: all(handle.entry.state is SwapState.LOADED for handle in handles))
        monkeypatch.setattr(SwapEngine, "fetch", lambda engine, handle: asked.append(handle) or fetch(engine, handle))
        assert [value_of(handle) for handle in handles[:5]] == list(range(5))
        assert asked == []


def test_that_backward_comes_to_a_group_is_noted_and_what_it_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy() as (engine, tier):
        handles = noted(engine, 1, 2)
        engine.settle()
        monkeypatch.setattr(SwapEngine, "fetch", lambda engine, handle: pytest.fail("the engine was asked"))
        assert [value_of(handle) for handle in handles] == [1, 2]
        assert engine._takeovers.is_pending
        tier.gate.set()
        wait_for(lambda: not engine._takeovers.is_pending)
        assert all(handle.entry.stays for handle in handles)


@pytest.mark.parametrize(("is_held", "counted"), [(False, "cancelled_bytes"), (True, "held_bytes")])
def test_what_was_read_and_has_died_before_the_engine_knew_is_counted_once(is_held: bool, counted: str) -> None:
    with busy() as (engine, tier):
        tensor = tensor_of(1)
        with engine.open_group("layer") as group:
            handle = group.add(tensor)
            group.passes(tensor)
        if not is_held:
            del tensor
        engine.settle()
        assert value_of(handle) == 1
        del handle
        tier.gate.set()
        stats = engine.stats()
        assert {name: getattr(stats, name) for name in ("cancelled_bytes", "held_bytes")} == {
            "cancelled_bytes": 0,
            "held_bytes": 0,
            counted: SIZE,
        }


@pytest.mark.parametrize("has_time", [True, False])
def test_a_trace_tells_which_thread_goes_backward_and_where(
    has_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    swapping = net(policy=SWAP)
    gradients(swapping, X, wait=True)
    if not has_time:
        monkeypatch.setattr(type(manager.engine.back_end), "soon", lambda back_end, function: None)
    with manager.trace(tmp_path / "run.json"):
        gradients(swapping, X)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    computed = [event for event in events if event.get("cat") == "compute"]
    assert len({event["tid"] for event in computed}) == 1
    forward, backward = ([e["name"].split()[1] for e in computed if e["name"].startswith(way)] for way in ("fo", "ba"))
    assert backward == forward[::-1]


def test_the_engine_is_asked_while_the_window_is_full() -> None:
    with engine_with(FakeTier(), window=2 * SIZE) as engine:
        handles = group_of(engine, *map(tensor_of, range(4)))
        engine.region_begins()
        on_host(handles)
        read = [handles[3].get(), handles[2].get()]
        wait_for(lambda: not handles[0].group.is_served)
        assert [value_of(handle) for handle in handles[:2]] == [0, 1]
        assert engine.ledger.peaks["window"] <= 3 * SIZE
        del read


def test_steps_of_which_the_copy_thread_has_time_for_nothing_have_plains_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    plain, swapping = gradients(net(), X), net(policy=SWAP)
    gradients(swapping, X, wait=True)
    monkeypatch.setattr(type(manager.engine.back_end), "soon", lambda back_end, function: None)
    for wait in (True, False):
        assert_same(gradients(swapping, X, wait=wait), plain)
    assert_clean(manager)
