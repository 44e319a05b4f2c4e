"""However a step ends, or doesn't: what was swapped goes with its graph, and nothing grows."""

import gc
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager, SwapStateError
from ms_ops.host import HostTier, Slot
from tests.core.swap_fakes import FakeTier, engine_with, group_of, on_host, tensor_of, value_of, wait_for
from tests.core.swap_nets import DEPTH, KINDS, X, assert_clean, net
from tests.helpers import SWAP, Layer, Record, Stack, assert_same, gradients, mean_square, numbers, on, settled


@pytest.fixture(params=KINDS)
def swapping(request: pytest.FixtureRequest) -> nn.Cell:
    return net(**KINDS[request.param])


@pytest.fixture
def plain() -> Record:
    return gradients(net(), X)


@pytest.fixture
def recording() -> Iterator[None]:
    """As MindFormers has it: the grad flag is on for good."""
    _pynative_executor.set_grad_flag(True)
    yield
    _pynative_executor.set_grad_flag(False)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live() -> int:
    """Without `stats()`, which runs the garbage collector."""
    _pynative_executor.sync()
    return SwapManager().engine.live_bytes()


def test_forwards_without_a_backward_stay_flat(recording: None, without_collector: None, swapping: nn.Cell) -> None:
    tracked(swapping)
    for _ in range(10):
        result = settled(swapping(X))
        assert live() > 0
        del result
        assert live() == 0


def test_an_evaluation_between_forward_and_backward_changes_nothing(
    plain: Record, recording: None, without_collector: None, swapping: nn.Cell
) -> None:
    weights = tracked(swapping)
    for _ in range(3):
        loss = settled(mean_square(swapping(X)))
        with ms._no_grad():
            swapping(X * 2)
        settled(swapping(X * 3))  # recorded, and given up
        got = backward(loss, weights)
        assert [one.tobytes() for one in got] == [plain[f"value and gradients[1][1][{k}]"].tobytes() for k in range(8)]
        del loss
        assert live() == 0


def tracked(cell: nn.Cell) -> tuple:
    """The cell's weights, as `run_backward` wants them before the forward."""
    for weight in cell.trainable_params():
        weight.requires_grad_()
    return tuple(cell.trainable_params())


def backward(loss: Tensor, weights: tuple) -> list[np.ndarray]:
    result = run_backward((loss,), (ops.ones_like(loss),), False, False, weights, False, accumulate_grad=False)
    return [one.asnumpy().copy() for one in result]


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 1, 2)])
def test_micro_batches_whose_backwards_come_in_any_order(
    recording: None, without_collector: None, swapping: nn.Cell, order: tuple[int, ...]
) -> None:
    inputs = [numbers(8, 8, seed=seed) for seed in range(3)]
    want = [gradients(net(), x) for x in inputs]
    weights = tracked(swapping)
    _pynative_executor.set_grad_flag(True)
    losses: list[Any] = [settled(mean_square(swapping(x))) for x in inputs]
    for index in order:
        got = backward(losses[index], weights)
        expected = [want[index][f"value and gradients[1][1][{k}]"] for k in range(8)]
        assert [one.tobytes() for one in got] == [one.tobytes() for one in expected]
        losses[index] = None
    assert live() == 0


def test_the_schedule_of_a_step_is_the_same_after_evaluations(
    manager: SwapManager, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.configure(min_bytes=0, tier="host")
    copies: list[tuple[str, int]] = []
    for what in ("write", "read"):
        copy = getattr(HostTier, what)

        def noted(tier: HostTier, slot: Slot, data: Any, what: str = what, copy: Any = copy) -> None:
            copy(tier, slot, data)
            copies.append((what, zlib.crc32(data if isinstance(data, np.ndarray) else b"".join(data))))

        monkeypatch.setattr(HostTier, what, noted)
    seen = []
    for evaluations in (2, 1, 0, 1):
        for _ in range(evaluations):
            swapping(X)
        assert copies == []
        manager.reset()
        gradients(swapping, X, wait=True)
        cells = {path: replace(cell, wait_seconds=0.0, late_loads=0) for path, cell in manager.stats().cells.items()}
        seen.append((sorted(copies), [copy for copy in copies if copy[0] == "write"], cells))
        copies.clear()
    assert seen[0][1]
    assert seen == seen[:1] * 4


class WithHeads(nn.Cell):
    """A net with a head of which nothing flows back, and one whose branch is taken now and then."""

    def __init__(self, put: Any) -> None:
        super().__init__()
        self.body, self.unused, self.sometimes = put(Layer(8, seed=1)), put(Layer(8, seed=2)), put(Layer(8, seed=3))
        self.taken = True

    def construct(self, x: Tensor) -> Tensor:
        y = self.body(x)
        settled(self.unused(y))
        return self.sometimes(y) if self.taken else y


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_not_used_leave_nothing(kind: str, without_collector: None) -> None:
    nets = [WithHeads(lambda cell: on(cell, **KINDS[kind])), WithHeads(lambda cell: cell)]
    for taken in (True, False, True):
        for one in nets:
            one.taken = taken
        got, want = (gradients(one, X) for one in nets)
        assert_same(got, want)
        assert live() == 0


def test_a_gradient_that_is_taken_after_the_context_is_left(swapping: nn.Cell, plain: Record) -> None:
    def forward() -> Any:
        return ms.vjp(lambda x: settled(mean_square(swapping(x))), X)[1]

    pull = forward()
    swapping(X * 2)
    gc.collect()
    got = pull(Tensor(np.float32(1)))
    assert got[0].asnumpy().tobytes() == plain["value and gradients[1][0]"].tobytes()
    del pull, got
    _pynative_executor.clear_res()
    assert live() == 0


def test_with_the_collector_off_an_exception_in_every_other_step_leaves_nothing(
    swapping: nn.Cell, plain: Record, without_collector: None
) -> None:
    def fails(x: Tensor) -> Tensor:
        settled(swapping(x))
        raise LookupError

    for _ in range(5):
        with pytest.raises(LookupError):
            ms.grad(fails)(X)
        assert live() == 0
        assert_same(gradients(swapping, X), plain)
        assert live() == 0


# ---- abort_step()


def test_abort_step_drops_what_a_step_holds_and_the_retry_is_right(
    manager: SwapManager, swapping: nn.Cell, plain: Record
) -> None:
    pull = ms.vjp(lambda x: settled(mean_square(swapping(x))), X)[1]
    assert live() > 0
    manager.abort_step()
    assert live() == 0
    with pytest.raises(
        SwapStateError, match=r"a saved tensor of Layer, .*shape \(8, 8\).*after its release: abort_step"
    ):
        pull(Tensor(np.float32(1)))
    del pull
    assert_same(gradients(swapping, X), plain)
    assert_clean(manager)


@pytest.mark.parametrize("state", ["resident", "offloading", "on host", "loaded"])
def test_a_tensor_that_is_read_after_abort_names_itself_its_cell_and_state(state: str) -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        (handle,) = group_of(engine, tensor_of(1), path="layers.3")
        if state == "offloading":
            tier.gate.clear()
            engine.region_begins()
            wait_for(lambda: handle.entry.busy)
        elif state != "resident":
            on_host([handle])
        if state == "loaded":
            assert value_of(handle) == 1
        assert handle.entry.state.value == state
        engine.abort()
        tier.gate.set()
        with pytest.raises(SwapStateError) as caught:
            handle.get()
        texts = ("layers.3", "shape (1024,), dtype float32", "4096 bytes", "after its release", "abort_step()")
        assert all(text in str(caught.value) for text in texts)
        wait_for(lambda: tier.used == 0 and engine.live_bytes() == 0)
    assert tier.broken_rules == []


def test_abort_step_inside_of_a_gradient_call_is_refused(manager: SwapManager) -> None:
    swapping = net(policy=SWAP)

    def forward(x: Tensor) -> Tensor:
        value = mean_square(swapping(x))
        manager.abort_step()
        return value

    with pytest.raises(SwapStateError, match="abort_step\\(\\) is called inside of a gradient call"):
        ms.grad(forward)(X)


def test_abort_step_forgets_a_failure_that_was_not_told() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.failure = OSError(5, "disk on fire")
        (handle,) = group_of(engine, tensor_of(1))
        engine.region_begins()
        wait_for(lambda: engine._offloads.failure is not None)
        engine.abort()
        tier.failure = None
        engine.region_begins()
        assert handle.entry.state.value == "released"


# ---- threads


def in_a_thread(work: Any) -> Any:
    """What `work()` gives on a thread of its own that has ended."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(30)
    return found[0]


def test_abort_keeps_what_another_thread_trains_with() -> None:
    with engine_with(FakeTier()) as engine:
        mine = group_of(engine, tensor_of(1))
        theirs: list[Any] = []
        go_on, ready = threading.Event(), threading.Event()

        def other() -> None:
            theirs.extend(group_of(engine, tensor_of(2)))
            ready.set()
            assert go_on.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        assert ready.wait(10)
        engine.abort()
        assert value_of(theirs[0]) == 2
        with pytest.raises(SwapStateError):
            mine[0].get()
        go_on.set()
        thread.join(10)


def test_abort_drops_what_a_thread_left_that_has_ended() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = in_a_thread(lambda: group_of(engine, tensor_of(2)))
        engine.abort()
        assert engine.live_bytes() == 0
        with pytest.raises(SwapStateError):
            handle.get()


def test_abort_by_another_thread_ends_the_wait_of_the_one_that_reads() -> None:
    """A forward on one thread, whose backward runs on another."""
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2))
        on_host(handles)
        tier.gate.clear()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                handles[1].get()
            except SwapStateError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: handles[1].entry.busy)
        engine.abort()
        tier.gate.set()
        reader.join(10)
        assert not reader.is_alive()
        assert "abort_step() gave up the step" in str(errors[0])
        wait_for(lambda: tier.used == 0)


def test_two_threads_with_the_same_paths_do_not_meet(manager: SwapManager) -> None:
    """Each on its own net, evaluating and training in turns: a step of one ends while the other's is in flight."""
    turns = [threading.Event() for _ in range(2)]
    turns[0].set()
    wrong: list[str] = []

    def train(index: int) -> None:
        try:
            swapping = Stack([on(Layer(8, seed=seed + index), SWAP) for seed in range(DEPTH)])
            want = ms.grad(Stack([Layer(8, seed=seed + index) for seed in range(DEPTH)]))
            for step in range(4):
                assert turns[index].wait(30)
                x = numbers(8, 8, seed=step + 10 * index)
                if ms.grad(swapping)(x).asnumpy().tobytes() != want(x).asnumpy().tobytes():
                    wrong.append(f"net {index}, step {step}")
                turns[index].clear()
                turns[1 - index].set()
        except Exception as error:
            wrong.append(f"net {index}: {error!r}")

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
