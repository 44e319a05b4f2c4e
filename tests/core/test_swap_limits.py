"""`SwapEngine` on a tier that can be stopped: its limits, failures, and the end of every tensor."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_tensor import SwapState
from hyper_parallel.core.errors import HostMemoryError
from tests.core.swap_fakes import (
    SIZE,
    FakeTier,
    engine_with,
    group_of,
    on_host,
    tensor_of,
    three_layers,
    value_of,
    wait_for,
)

# ---- limits


def test_forward_waits_while_more_than_the_pending_limit_is_on_its_way() -> None:
    tier = FakeTier()
    with engine_with(tier, pending=SIZE) as engine:
        tier.gate.clear()
        kept: list[SwapHandle] = []
        began = threading.Event()

        def run() -> None:
            kept.extend(group_of(engine, tensor_of(1), tensor_of(2), tensor_of(3)))
            engine.region_begins()
            began.set()

        forward = threading.Thread(target=run)
        forward.start()
        assert not began.wait(0.1), "forward went on with three times the limit in flight"
        tier.gate.set()
        assert began.wait(10)
        forward.join()
        assert engine.ledger.counts["wait_seconds"] > 0.05
        on_host(kept)


def test_forward_does_not_wait_below_the_pending_limit() -> None:
    tier = FakeTier()
    with engine_with(tier, pending=3 * SIZE) as engine:
        tier.gate.clear()
        kept = group_of(engine, tensor_of(1), tensor_of(2), tensor_of(3))
        engine.region_begins()
        assert engine.ledger.counts["wait_seconds"] == 0
        tier.gate.set()
        on_host(kept)


def test_a_full_tier_names_region_tensor_limit_and_remedy_and_keeps_nothing() -> None:
    tier = FakeTier(limit=SIZE)
    with engine_with(tier) as engine:
        with pytest.raises(HostMemoryError) as caught:
            group_of(engine, tensor_of(1), tensor_of(2), path="layers.7")
        message = str(caught.value)
        texts = ("layers.7", "(1024,)", "float32", f"host_budget is {SIZE} bytes", f"{SIZE} of them are allocated")
        assert all(text in message for text in (*texts, "raise host_budget", "when_exhausted=['recompute', 'keep']"))
        del caught
        gc.collect()
        assert (engine.live_bytes(), tier.used) == (0, 0)


def test_with_keep_a_full_tier_keeps_the_rest_on_the_device() -> None:
    with engine_with(FakeTier(limit=SIZE), when_exhausted=("keep",)) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        assert [value_of(handle) for handle in handles] == [1, 2]
        assert engine.ledger.counts["kept_bytes"] == SIZE


def test_has_room_asks_for_what_the_region_sent_last_time() -> None:
    tier = FakeTier(limit=3 * SIZE)
    with engine_with(tier) as engine:
        assert engine.has_room("large")
        handles = group_of(engine, tensor_of(1), tensor_of(2), path="large")
        small = group_of(engine, tensor_of(3), path="small")
        assert not engine.has_room("small")
        del small
        assert engine.has_room("small")
        assert not engine.has_room("large")
        assert not engine.has_room("new"), "a new region may be as large as the largest"
        del handles
        assert engine.has_room("large")


# ---- failures


def test_a_failed_write_raises_at_the_next_region_and_loses_no_value() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.failure = OSError(5, "disk on fire")
        handles = group_of(engine, tensor_of(1))
        engine.region_begins()
        wait_for(lambda: engine._offloads.failure is not None)
        with pytest.raises(HostMemoryError, match=r"a copy to the fake tier failed: .*disk on fire") as caught:
            engine.region_begins()
        assert caught.value.__cause__ is tier.failure
        tier.failure = None
        assert value_of(handles[0]) == 1
        engine.region_begins()


def test_a_failed_write_raises_when_the_next_group_closes() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.failure = OSError(5, "disk on fire")
        kept = group_of(engine, tensor_of(1))
        engine.region_begins()
        wait_for(lambda: engine._offloads.failure is not None)
        with pytest.raises(HostMemoryError, match="disk on fire"):
            group_of(engine, tensor_of(2))
        assert value_of(kept[0]) == 1


def test_a_failed_read_names_the_tensor_and_can_be_tried_again() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), path="layers.2")
        on_host(handles)
        tier.failure = OSError(5, "disk on fire")
        with pytest.raises(HostMemoryError, match=r"a saved tensor of layers\.2.*fake tier: .*disk on fire"):
            handles[0].get()
        tier.failure = None
        assert value_of(handles[0]) == 1
    assert tier.broken_rules == []


# ---- the end


@pytest.mark.parametrize("state", ["resident", "queued", "being written", "on host", "loaded"])
def test_a_handle_that_dies_frees_its_slot_whatever_state_it_is_in(state: str) -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        first, second = group_of(engine, tensor_of(1), tensor_of(2))
        if state in ("queued", "being written"):
            tier.gate.clear()
            engine.region_begins()
            wait_for(lambda: first.entry.busy)
        elif state != "resident":
            on_host([first, second])
        if state == "loaded":
            first.get()
            wait_for(lambda: second.entry.state is SwapState.LOADED)
        if state == "being written":
            del first
        else:
            del second
        assert engine.live_bytes() in (SIZE, 2 * SIZE)  # twice: on host and loaded
        assert tier.used == (2 * SIZE if state == "being written" else SIZE)
        tier.gate.set()
        first = second = None
        wait_for(lambda: engine.live_bytes() == 0 and tier.used == 0)
    assert tier.broken_rules == []
    assert set(engine.ledger.now.values()) == {0}
    assert engine._offloads.backlog == 0


def test_a_handle_that_dies_while_it_is_loaded_frees_its_slot_when_the_copy_ends() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        on_host(handles)
        tier.gate.clear()
        reader = threading.Thread(target=handles[1].get)
        reader.start()
        wait_for(lambda: handles[1].entry.busy and handles[0].entry.state is SwapState.LOADING)
        del handles[0]
        assert engine.live_bytes() == 2 * SIZE, "device and host bytes of the tensor that is loaded"
        tier.gate.set()
        reader.join(10)
        handles.clear()
        wait_for(lambda: engine.live_bytes() == 0 and tier.used == 0)
    assert tier.broken_rules == []


def test_a_handle_that_dies_while_its_bytes_are_read_frees_its_slot_when_the_copy_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        on_host(handles)
        slot, read, reading, go_on = handles[0].entry.slot, tier.read, threading.Event(), threading.Event()

        def slow_read(from_slot: Any, array: np.ndarray) -> None:
            if from_slot is slot:
                reading.set()
                assert go_on.wait(10)
            read(from_slot, array)

        monkeypatch.setattr(tier, "read", slow_read)
        assert value_of(handles[1]) == 2
        assert reading.wait(10)
        handles.clear()
        assert (engine.live_bytes(), tier.used) == (0, SIZE)
        go_on.set()
        wait_for(lambda: tier.used == 0)
        assert engine.live_bytes() == engine.ledger.now["window"] == 0


def test_slots_are_reused_step_after_step() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        allocated = []
        for _ in range(5):
            handles = three_layers(engine)
            for handle in reversed(handles):
                handle.get()
            del handles, handle
            assert engine.live_bytes() == 0
            allocated.append(tier.allocated)
        assert allocated == [6 * SIZE] * 5


def test_reset_begins_to_count_anew_and_keeps_what_is_live() -> None:
    with engine_with(FakeTier()) as engine:
        handles = group_of(engine, tensor_of(1))
        on_host(handles)
        engine.reset()
        assert engine.ledger.counts["offloaded_bytes"] == 0
        assert engine.ledger.peaks["host"] == SIZE
        assert value_of(handles[0]) == 1
        assert engine.ledger.counts["loaded_bytes"] == SIZE
