"""Groups that the user moves: `set_current_group_name`, `launch_offload` and the others, in and out of turn."""

import threading
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import SwapManager, SwapStateError
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from tests.core.swap_fakes import SIZE, FakeTier, engine_with, group_of, on_host, tensor_of, value_of, wait_for
from tests.core.swap_nets import X, net
from tests.helpers import SWAP, assert_same, flat, gradients, mean_square

CALLS = ("launch_offload", "wait_offload", "launch_load", "wait_load")


def named(engine: SwapEngine, *tensors: Tensor, name: str = "a", path: str = "layers.2", held: Any = ()) -> list[Any]:
    """Close a group of this name; `held` are tensors that other code holds."""
    group = engine.open_group(path, name=name)
    group.passes(held)
    with group:
        handles = [group.add(tensor) for tensor in tensors]
    return handles


def moved(engine: SwapEngine, *calls: str, name: str = "a") -> None:
    for call in calls:
        engine.by_hand(name, call)


def test_a_group_goes_to_host_and_back_as_it_is_told() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = named(engine, tensor_of(1))
        seen = [handle.entry.state.value]
        for call in CALLS:
            moved(engine, call)
            seen.append(handle.entry.state.value)
        assert (seen[0], seen[2], seen[4]) == ("resident", "on host", "loaded")
        assert value_of(handle) == 1
        assert engine.ledger.counts["late_loads"] == 0


def test_a_group_stays_until_it_is_launched_however_many_regions_begin() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = named(engine, tensor_of(1))
        for _ in range(3):
            engine.region_begins()
        on_host(group_of(engine, tensor_of(2)))  # its grace is over, too
        assert handle.entry.state.value == "resident"


LEGAL_AFTER: dict[tuple[str, ...], set[str]] = {
    (): {"launch_offload"},
    ("launch_offload",): {"wait_offload"},
    ("launch_offload", "wait_offload"): {"wait_offload", "launch_load"},
    ("launch_offload", "wait_offload", "launch_load"): {"wait_load", "wait_offload"},
    ("launch_offload", "wait_offload", "launch_load", "wait_load"): {"wait_load", "wait_offload"},
}
ILLEGAL = [(done, call) for done, legal in LEGAL_AFTER.items() for call in CALLS if call not in legal]


@pytest.mark.parametrize(("done", "call"), ILLEGAL, ids=[f"{call} after {len(done)}" for done, call in ILLEGAL])
def test_every_call_out_of_turn_names_group_tensor_cell_and_state(done: tuple[str, ...], call: str) -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        (handle,) = named(engine, tensor_of(1), name="micro batch 0")
        moved(engine, *done[:-1], name="micro batch 0")
        if done[-1:] and done[-1].startswith("launch"):
            tier.gate.clear()  # it is still on its way
        moved(engine, *done[-1:], name="micro batch 0")
        state = handle.entry.state.value
        with pytest.raises(SwapStateError) as caught:
            engine.by_hand("micro batch 0", call)
        texts = (
            f"{call}('micro batch 0')",
            "a saved tensor of layers.2",
            "shape (1024,), dtype float32",
            f"is {state}",
        )
        assert all(text in str(caught.value) for text in texts)
        assert handle.entry.state.value == state
        tier.gate.set()
        assert value_of(handle) == 1


@pytest.mark.parametrize("call", [*CALLS, "is_last_group"])
def test_a_group_that_is_not_there_is_named_with_those_that_are(manager: SwapManager, call: str) -> None:
    with pytest.raises(SwapStateError, match="no group 'b' holds swapped tensors; there are none"):
        getattr(manager, call)("b")
    handles = named(manager.engine, tensor_of(1), name="a")
    with pytest.raises(SwapStateError, match="no group 'b' holds swapped tensors; there are 'a'"):
        getattr(manager, call)("b")
    del handles


@pytest.mark.parametrize("call", CALLS)
def test_a_group_that_backward_has_read_is_gone(call: str) -> None:
    with engine_with(FakeTier()) as engine:
        handles = named(engine, tensor_of(1))
        handles.clear()
        with pytest.raises(SwapStateError, match="until backward has read it"):
            engine.by_hand("a", call)


def test_a_missed_load_is_made_on_demand_and_counted() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = named(engine, tensor_of(1))
        moved(engine, "launch_offload", "wait_offload")
        assert value_of(handle) == 1
        assert engine.ledger.counts["late_loads"] == 1


def test_what_other_code_holds_at_the_launch_leaves_when_it_is_waited_for() -> None:
    with engine_with(FakeTier()) as engine:
        output = tensor_of(1)
        (handle,) = named(engine, output, held=output)
        moved(engine, "launch_offload")
        with pytest.raises(SwapStateError, match="is resident, and launched, so that its offload has been launched"):
            moved(engine, "launch_offload")
        del output
        moved(engine, "wait_offload")
        assert handle.entry.state.value == "on host"
        moved(engine, "launch_load", "wait_load")
        assert value_of(handle) == 1


def test_what_other_code_holds_for_good_stays_and_is_counted() -> None:
    with engine_with(FakeTier()) as engine:
        held = tensor_of(1)
        handles = named(engine, held, tensor_of(2), held=held)
        moved(engine, "launch_offload", "wait_offload")
        del held
        engine.region_begins()  # too late: the user's calls go by what was there when the offload was waited for
        assert [handle.entry.state.value for handle in handles] == ["resident", "on host"]
        moved(engine, "launch_load", "wait_load")
        assert [value_of(handle) for handle in handles] == [1, 2]
        assert engine.ledger.counts["held_bytes"] == SIZE


def test_a_load_that_was_asked_for_is_not_given_up_for_another() -> None:
    tier = FakeTier()
    with engine_with(tier, window=SIZE) as engine:
        other = group_of(engine, tensor_of(5))
        on_host(other)
        handles = named(engine, tensor_of(1), tensor_of(2))
        moved(engine, "launch_offload", "wait_offload", "launch_load", "wait_load")
        assert value_of(other[0]) == 5
        moved(engine, "wait_load")
        assert [handle.entry.state.value for handle in handles] == ["loaded", "loaded"]
        assert engine.ledger.counts["evicted_bytes"] == 0
        assert [value_of(handle) for handle in handles] == [1, 2]
        assert tier.first_values("read").count(1) == 1


def test_a_failed_offload_raises_where_it_is_waited_for_and_may_be_launched_again() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        (handle,) = named(engine, tensor_of(1))
        tier.failure = OSError(5, "disk on fire")
        moved(engine, "launch_offload")
        with pytest.raises(Exception, match="disk on fire"):
            moved(engine, "wait_offload")
        tier.failure = None
        moved(engine, *CALLS)
        assert value_of(handle) == 1


def test_is_last_is_the_group_that_backward_reads_first() -> None:
    with engine_with(FakeTier()) as engine:
        first, second = named(engine, tensor_of(1), name="a"), named(engine, tensor_of(2), name="b")
        assert (engine.is_last("a"), engine.is_last("b")) == (False, True)
        second.clear()
        assert engine.is_last("a")
        first.clear()


def test_a_name_is_the_thread_s_own() -> None:
    with engine_with(FakeTier()) as engine:
        (mine,) = named(engine, tensor_of(1))
        theirs: list[SwapHandle] = []
        errors: list[Any] = []

        def other() -> None:
            try:
                moved(engine, "launch_offload")
            except SwapStateError as error:
                errors.append(error)
            theirs.extend(named(engine, tensor_of(2)))
            assert engine.is_last("a")

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert "no group 'a'" in str(errors[0])
        assert engine.is_last("a"), "the other thread's is newer, but no part of this thread's backward"
        moved(engine, "launch_offload", "wait_offload")
        assert (mine.entry.state.value, theirs[0].entry.state.value) == ("on host", "resident")


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), ("", ValueError), (b"a", TypeError)])
def test_bad_names_are_refused(manager: SwapManager, name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the name of a group must"):
        manager.set_current_group_name(name)
    assert manager.get_current_group_name() is None


def test_a_step_that_is_moved_by_hand_gives_plains_numbers(manager: SwapManager) -> None:
    """Every layer a group: its offload is waited for a layer later, its load is launched a layer earlier."""
    swapping = net(policy=SWAP)
    layers = list(swapping.layers)
    order: list[str] = []

    def forward(x: Tensor) -> Tensor:
        for index, layer in enumerate(layers):
            manager.set_current_group_name(f"layer {index}")
            x = layer(x)
            if index < len(layers) - 1:
                manager.launch_offload(f"layer {index}")
            if index:
                manager.wait_offload(f"layer {index - 1}")
                order.append(f"out {index - 1}")
        manager.set_current_group_name(None)
        for index in range(len(layers) - 1):
            manager.launch_load(f"layer {index}")
        for index in range(len(layers) - 1):
            manager.wait_load(f"layer {index}")
        assert manager.is_last_group(f"layer {len(layers) - 1}")
        return mean_square(x)

    got = flat(ms.value_and_grad(forward, 0, swapping.trainable_params())(X), "value and gradients")
    assert_same(got, gradients(net(), X))
    assert order == ["out 0", "out 1", "out 2"]
    stats = manager.stats()
    assert stats.offloaded_bytes == stats.loaded_bytes > 0
    assert (stats.late_loads, stats.live_bytes) == (0, 0)
    assert all(name == "Layer" for name in stats.cells), "a group is no cell"


def test_a_group_can_be_moved_by_the_path_of_its_region(manager: SwapManager) -> None:
    swapping = net(policy=SWAP)

    def forward(x: Tensor) -> Tensor:
        manager.set_current_group_name("all")
        value = mean_square(swapping(x))
        manager.set_current_group_name(None)
        manager.launch_offload("Layer")
        manager.wait_offload("all")
        return value

    got = ms.grad(forward)(X).asnumpy()
    assert np.array_equal(got, gradients(net(), X)["value and gradients[1][0]"])
    assert manager.stats().late_loads > 0
    wait_for(lambda: manager.engine.live_bytes() == 0)
