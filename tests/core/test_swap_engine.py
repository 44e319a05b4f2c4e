"""`SwapEngine` on a tier that can be stopped: what is moved, when, and in which order."""

import threading
import time
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_tensor import SwapState
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


def test_what_was_sent_comes_back() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        on_host(handles)
        assert [value_of(handle) for handle in reversed(handles)] == [2, 1]


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float64, ms.int32, ms.int64, ms.bool_, ms.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 4)])
def test_every_shape_and_dtype_comes_back_as_it_was(dtype: Any, shape: tuple) -> None:
    tensor = Tensor(np.asarray(np.random.RandomState(0).rand(*shape) * 9)).astype(dtype)
    with engine_with(FakeTier()) as engine:
        handles = group_of(engine, tensor)
        on_host(handles)
        back = handles[0].get()
        assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
        assert np.array_equal(back.asnumpy(), tensor.asnumpy())


def test_a_group_is_launched_when_the_next_region_begins() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1))
        assert handles[0].entry.state is SwapState.RESIDENT
        engine.region_begins()
        assert handles[0].entry.state is not SwapState.RESIDENT
        on_host(handles)
        assert engine.ledger.counts["offloaded_bytes"] == SIZE


def test_a_group_after_which_nothing_begins_leaves_after_a_grace() -> None:
    with engine_with(FakeTier()) as engine:
        on_host(group_of(engine, tensor_of(1)))


def test_backward_that_arrives_first_cancels_what_was_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyper_parallel.core.activation_memory.swap_out.GRACE_SECONDS", 60)
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        assert [value_of(handle) for handle in handles] == [1, 2]
        engine.region_begins()
        stats = engine.stats()
        assert (stats.offloaded_bytes, stats.cancelled_bytes) == (0, 2 * SIZE)
        assert tier.used == 0
    assert tier.log == []


def test_backward_cancels_copies_that_have_not_begun() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.gate.clear()
        handles = group_of(engine, tensor_of(1), tensor_of(2), tensor_of(3))
        engine.region_begins()
        wait_for(lambda: handles[0].entry.busy)
        assert [value_of(handle) for handle in reversed(handles)] == [3, 2, 1]
        assert engine.ledger.counts["cancelled_bytes"] == 2 * SIZE
        tier.gate.set()
        on_host(handles[:1])
        assert tier.log == [("write", 1)]


def test_the_same_storage_is_sent_once_and_read_by_both() -> None:
    tensor = tensor_of(5)
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor, tensor)
        assert handles[0].entry is handles[1].entry
        on_host(handles)
        assert [value_of(handle) for handle in handles] == [5, 5]
        assert (engine.ledger.counts["offloaded_bytes"], engine.ledger.counts["duplicate_bytes"]) == (SIZE, SIZE)


def test_the_same_storage_in_a_later_group_is_sent_once() -> None:
    tensor = tensor_of(5)
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.gate.clear()
        first, second = group_of(engine, tensor), group_of(engine, tensor)
        assert first[0].entry is second[0].entry
        tier.gate.set()
        on_host(first)
        first.clear()
        assert value_of(second[0]) == 5
    assert tier.first_values("write") == [5]


def test_equal_values_in_another_storage_are_no_duplicates() -> None:
    with engine_with(FakeTier()) as engine:
        kept = tensor_of(5), tensor_of(5)
        handles = group_of(engine, *kept)
        assert handles[0].entry is not handles[1].entry


def test_another_shape_of_the_same_storage_is_no_duplicate() -> None:
    array = np.full((4, 4), 3, np.float32)
    square, flat = Tensor.from_numpy(array), Tensor.from_numpy(array.reshape(-1))
    with engine_with(FakeTier()) as engine:
        handles = group_of(engine, square, flat)
        on_host(handles)
        assert [handle.get().shape for handle in handles] == [(4, 4), (16,)]


def test_a_parameter_is_never_moved() -> None:
    parameter = Parameter(tensor_of(1), name="w")
    with engine_with(FakeTier()) as engine:
        (kept,) = group_of(engine, parameter)
        assert not isinstance(kept, SwapHandle)
        assert value_of(kept) == 1
        assert (engine.ledger.counts["parameter_bytes"], engine.tier.used) == (SIZE, 0)


def test_a_tensor_below_the_minimum_size_stays_and_one_of_that_size_goes() -> None:
    with engine_with(FakeTier()) as engine:
        engine.settings = engine.settings.model_copy(update={"min_bytes": SIZE})
        small, exact = group_of(engine, tensor_of(1, 1023), tensor_of(2, 1024))
        assert not isinstance(small, SwapHandle)
        assert isinstance(exact, SwapHandle)
        assert engine.ledger.counts["small_bytes"] == SIZE - 4


def test_an_empty_tensor_stays() -> None:
    with engine_with(FakeTier()) as engine:
        (kept,) = group_of(engine, Tensor(np.zeros((0, 3), np.float32)))
        assert not isinstance(kept, SwapHandle)
        assert kept.get().shape == (0, 3)


def test_a_handle_of_an_open_group_gives_the_tensor_itself() -> None:
    with engine_with(FakeTier()) as engine:
        group = engine.open_group("layer")
        with group:
            handle = group.add(tensor_of(4))
            assert value_of(handle) == 4


def test_a_region_that_raises_sends_nothing() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        group = engine.open_group("layer")
        handles: list[SwapHandle] = []

        def region() -> None:
            with group:
                handles.append(group.add(tensor_of(4)))
                raise LookupError

        with pytest.raises(LookupError):
            region()
        assert value_of(handles[0]) == 4
        assert (tier.used, engine.live_bytes()) == (0, 0)


def test_a_handle_that_dies_before_its_group_ends_is_not_sent() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        group = engine.open_group("layer")
        with group:
            handle = group.add(tensor_of(1))
            del handle
        assert tier.used == 0


# ---- the order of loads


def test_loads_run_ahead_backwards_through_the_group_and_those_before_it() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = three_layers(engine)
        assert value_of(handles[-1]) == 31
        wait_for(lambda: len(tier.first_values("read")) == 6)
        assert tier.first_values("read") == [31, 30, 21, 20, 11, 10]
        assert engine.ledger.counts["late_loads"] == 1


def test_loads_run_ahead_only_as_far_as_the_window() -> None:
    tier = FakeTier()
    with engine_with(tier, window=3 * SIZE) as engine:
        handles = three_layers(engine)
        engine.reset()
        assert value_of(handles[-1]) == 31
        wait_for(lambda: len(tier.first_values("read")) == 3)
        time.sleep(0.02)
        assert tier.first_values("read") == [31, 30, 21]
        assert engine.ledger.peaks["resident"] == 3 * SIZE


def test_a_read_tensor_that_dies_makes_room_in_the_window() -> None:
    tier = FakeTier()
    with engine_with(tier, window=2 * SIZE) as engine:
        handles = three_layers(engine)
        while handles:
            tier_order = value_of(handles.pop())
            assert tier_order in tier.first_values("read")
        wait_for(lambda: engine.live_bytes() == 0)
        assert tier.first_values("read") == [31, 30, 21, 20, 11, 10]


def test_a_graph_that_is_kept_and_read_twice_keeps_to_the_window() -> None:
    with engine_with(FakeTier(), window=2 * SIZE) as engine:
        handles = three_layers(engine)
        for _ in range(2):
            assert [value_of(handle) for handle in reversed(handles)] == [31, 30, 21, 20, 11, 10]
        assert engine.ledger.peaks["window"] <= 3 * SIZE
        assert engine.live_bytes() <= 6 * SIZE + 3 * SIZE  # on host, and what of it is loaded


def test_eight_transfers_of_small_tensors_fit_the_window_and_one_what_may_be_on_its_way() -> None:
    small = [tensor_of(value) for value in range(1, 7)]
    for limits in ({"window": 16 * SIZE}, {"pending": 2 * SIZE}):
        with engine_with(FakeTier(), fuse_below=2**20, **limits) as engine:
            handles = group_of(engine, *small)
            assert [len(entry.pieces) for entry in dict.fromkeys(handle.entry for handle in handles)] == [2, 2, 2]


def test_a_tensor_larger_than_the_window_is_loaded_all_the_same() -> None:
    tier = FakeTier()
    with engine_with(tier, window=SIZE // 2) as engine:
        handles = three_layers(engine)
        assert [value_of(handle) for handle in reversed(handles)] == [31, 30, 21, 20, 11, 10]


def test_a_load_that_backward_waits_for_overtakes_those_ahead() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = three_layers(engine)
        tier.gate.clear()
        got: list[int] = []
        reader = threading.Thread(target=lambda: got.extend([value_of(handles[-1]), value_of(handles[0])]))
        reader.start()
        wait_for(lambda: handles[0].entry.state is SwapState.LOADING)
        tier.gate.set()
        reader.join(10)
        assert got == [31, 10]
        assert engine.ledger.counts["wait_seconds"] > 0


def test_out_of_order_reads_give_the_right_tensors() -> None:
    tier = FakeTier()
    with engine_with(tier, window=2 * SIZE) as engine:
        handles = three_layers(engine)
        order = [2, 5, 0, 3, 1, 4]
        assert [value_of(handles[index]) for index in order] == [20, 31, 10, 21, 11, 30]
