"""Whole steps under MUST_SWAP: what is counted, what a budget and a failing disk do, and that nothing is left."""

import gc
import os
import stat
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor

from hyper_parallel import CheckpointPolicy, HostMemoryError, SwapManager, activation_policy, apply_policy, swap
from hyper_parallel.core.activation_memory.swap_manager import _close_at_exit
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from tests.helpers import Layer, Stack, assert_same, gradients, numbers, seeded, settled

P = CheckpointPolicy
BYTES = 8 * 8 * 4
"""Of one saved tensor of these tests."""


class Tanh(nn.Cell):
    """Saves its output, and nothing else."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


def swapped(depth: int = 4, cell: type[nn.Cell] = Tanh) -> nn.Cell:
    return Stack([activation_policy(P.MUST_SWAP)(cell()) for _ in range(depth)])


def plain(depth: int = 4) -> nn.Cell:
    return Stack([Tanh() for _ in range(depth)])


X = numbers(8, 8)


@pytest.fixture(params=["file", "host"])
def tier(request: pytest.FixtureRequest, manager: SwapManager) -> str:
    manager.configure(min_bytes=0, tier=request.param)
    return request.param


def test_what_is_saved_is_offloaded_loaded_and_gone(manager: SwapManager, tier: str) -> None:
    assert_same(gradients(swapped(), X, wait=True), gradients(plain(), X))
    stats = manager.stats()
    assert stats.offloaded_bytes == 4 * BYTES
    assert stats.loaded_bytes == 4 * BYTES
    assert stats.host_peak_bytes == 4 * BYTES
    assert BYTES <= stats.resident_peak_bytes <= 4 * BYTES
    assert (stats.live_bytes, stats.host_live_bytes) == (0, 0)
    assert stats.allocated_bytes >= 4 * BYTES


def test_x_times_x_is_one_tensor_on_host_and_one_duplicate(manager: SwapManager) -> None:
    def forward(x: Tensor) -> Tensor:
        return settled(swap(lambda y: y * y, ops.sin(x)).sum())

    assert np.array_equal(
        ms.grad(forward)(X).asnumpy(), ms.grad(lambda x: (ops.sin(x) * ops.sin(x)).sum())(X).asnumpy()
    )
    stats = manager.stats()
    assert (stats.offloaded_bytes, stats.duplicate_bytes) == (BYTES, BYTES)


def test_a_single_swapped_cell_with_nothing_after_it_never_leaves(manager: SwapManager) -> None:
    cell = activation_policy(P.MUST_SWAP)(Tanh())
    grad = ms.grad(cell)
    for _ in range(3):
        grad(X)
    stats = manager.stats()
    assert stats.offloaded_bytes == 0
    assert stats.cancelled_bytes + stats.held_bytes == 3 * BYTES, "the output is held by who asked for the gradient"


def test_parameters_stay_and_are_counted(manager: SwapManager) -> None:
    cell = activation_policy(P.MUST_SWAP)(seeded(nn.Dense(8, 8)))
    addresses = {name: parameter.data_ptr() for name, parameter in cell.parameters_and_names()}
    gradients(Stack([Tanh(), cell]), X, wait=True)
    assert {name: parameter.data_ptr() for name, parameter in cell.parameters_and_names()} == addresses
    stats = manager.stats()
    assert stats.parameter_bytes >= cell.weight.nbytes
    assert stats.offloaded_bytes == BYTES


def test_tensors_below_min_bytes_stay_and_are_counted(manager: SwapManager) -> None:
    manager.configure(min_bytes=BYTES + 1)
    gradients(swapped(), X, wait=True)
    stats = manager.stats()
    assert (stats.offloaded_bytes, stats.small_bytes) == (0, 4 * BYTES)


def test_nothing_is_swapped_when_no_gradient_is_recorded(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host")
    swapped()(X)
    assert manager._engine is None


def test_slots_are_reused_from_the_second_step_on(manager: SwapManager, tier: str) -> None:
    net, allocated = swapped(), []
    for _ in range(5):
        gradients(net, X, wait=True)
        allocated.append(manager.stats().allocated_bytes)
    assert len(set(allocated)) == 1


def test_a_forward_without_a_backward_leaves_nothing(manager: SwapManager, tier: str) -> None:
    net = swapped()
    gradients(net, X)  # MindSpore calls no hooks by the flag alone, before a first gradient call
    _pynative_executor.set_grad_flag(True)
    y = net(X)
    assert manager.stats().live_bytes == 4 * BYTES
    del y
    _pynative_executor.set_grad_flag(False)
    assert manager.stats().live_bytes == 0


def test_a_kept_cell_inside_a_swapped_one_stays_on_the_device(manager: SwapManager) -> None:
    inner = Stack([Tanh(), activation_policy(P.MUST_SAVE)(Tanh()), Tanh()])
    assert_same(gradients(activation_policy(P.MUST_SWAP)(inner), X, wait=True), gradients(plain(3), X))
    assert manager.stats().offloaded_bytes == 2 * BYTES


def test_a_swapped_cell_inside_a_swapped_one_travels_with_it(manager: SwapManager) -> None:
    outer = activation_policy(P.MUST_SWAP)(Stack([Tanh(), activation_policy(P.MUST_SWAP)(Tanh())]))
    assert_same(gradients(outer, X, wait=True), gradients(plain(2), X))
    assert manager.stats().offloaded_bytes == 2 * BYTES


def test_a_recomputed_cell_inside_a_swapped_one_swaps_what_it_replays_from(manager: SwapManager) -> None:
    outer = activation_policy(P.MUST_SWAP)(Stack([Tanh(), activation_policy(P.MUST_RECOMPUTE)(Two())]))
    expected = gradients(Stack([Tanh(), Two()]), X)
    assert_same(gradients(outer, X, wait=True), expected)
    assert manager.stats().offloaded_bytes == BYTES


# ---- a budget


def test_an_exhausted_budget_names_region_limit_and_remedy(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=2 * 4096)
    with pytest.raises(HostMemoryError) as caught:
        gradients(swapped(), X, wait=True)
    texts = ("Tanh: no room on host", "host_budget is 8192 bytes, 8192 of them are allocated", "raise host_budget")
    assert all(text in str(caught.value) for text in texts)


def test_tensors_of_a_step_that_ran_out_of_budget_are_dropped(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=4096)
    held: list[weakref.ref] = []

    class Watched(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(x)
            held.append(weakref.ref(y))
            return ops.exp(y)

    with pytest.raises(HostMemoryError):
        gradients(Stack([activation_policy(P.MUST_SWAP)(Watched()) for _ in range(2)]), X)
    gradients(plain(), X)
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_the_step_after_an_exhausted_budget_is_right(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=2 * 4096)
    with pytest.raises(HostMemoryError):
        gradients(swapped(), X, wait=True)
    assert_same(gradients(swapped(2), X, wait=True), gradients(plain(2), X))


def test_with_keep_what_does_not_fit_stays_on_the_device(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=2 * 4096, when_exhausted=["keep"])
    assert_same(gradients(swapped(), X, wait=True), gradients(plain(), X))
    stats = manager.stats()
    assert stats.offloaded_bytes == 2 * BYTES
    assert stats.recomputed_regions == 0


class Two(nn.Cell):
    """Saves two tensors, so that a region can run out of budget in its middle."""

    calls = 0

    def construct(self, x: Tensor) -> Tensor:
        Two.calls += 1
        return ops.exp(ops.tanh(x))


def test_a_region_that_runs_out_of_budget_in_its_middle_keeps_the_rest(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, fuse_below=0, tier="host", host_budget=4096, when_exhausted=["keep"])

    class Inside(Two):
        def construct(self, x: Tensor) -> Tensor:
            return ops.sin(super().construct(x))

    expected = gradients(Stack([Inside()]), X)
    assert_same(gradients(swapped(1, Inside), X, wait=True), expected)
    assert (manager.stats().kept_bytes, manager.stats().offloaded_bytes) == (BYTES, BYTES)


def test_with_recompute_a_region_that_does_not_fit_runs_again(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=2 * 4096, when_exhausted=["recompute", "keep"])
    assert_same(gradients(swapped(), X, wait=True), gradients(plain(), X))
    stats = manager.stats()
    # what the second region gives is held by the third, which is recomputed, so that there is room for the fourth
    assert (stats.recomputed_regions, stats.offloaded_bytes, stats.held_bytes) == (1, 2 * BYTES, BYTES)


def test_the_ladder_is_taken_inside_a_replayed_region_too(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=4096, when_exhausted=["recompute", "keep"])
    net = activation_policy(P.MUST_RECOMPUTE)(swapped())
    assert_same(gradients(net, X, wait=True), gradients(plain(), X))
    assert manager.stats().recomputed_regions > 0


def test_swapped_inputs_that_do_not_fit_stay_and_the_region_is_still_replayed(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=4096, when_exhausted=["recompute", "keep"])
    expected = gradients(Stack([Two() for _ in range(3)]), X)
    net = Stack([activation_policy(P.MUST_RECOMPUTE, swap_inputs=True)(Two()) for _ in range(3)])
    Two.calls = 0
    assert_same(gradients(net, X, wait=True), expected)
    assert Two.calls == 6
    assert manager.stats().offloaded_bytes == BYTES


@pytest.mark.parametrize(
    ("ladder", "regions", "told"),
    [(["recompute", "keep"], [2], "1 call recomputed"), (["keep"], [2, 3], "1 call kept on the device")],
)
def test_the_plan_tells_which_regions_took_the_ladder(
    manager: SwapManager, ladder: list[str], regions: list[int], told: str
) -> None:
    manager.configure()
    room = {"tier": "host", "host_budget": 2 * 4096, "min_bytes": 0, "when_exhausted": ladder}
    net = plain()
    plan = apply_policy(net, {"version": 1, "rules": [{"cells": "layers.*", "policy": "must_swap"}], "swap": room})
    before = plan.notes
    gradients(net, X, wait=True)
    notes, lines = plan.notes, plan.describe().splitlines()
    plan.remove()
    assert notes[: len(before)] == before
    expected = [f"layers.{region}: {told} instead of swapped, since the host was exhausted" for region in regions]
    assert notes[len(before) :] == expected
    assert lines[-len(regions) :] == [f"note: {note}" for note in expected]


def test_a_ladder_without_keep_swaps_inputs_or_raises(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, tier="host", host_budget=4096, when_exhausted=["recompute"])
    net = Stack([activation_policy(P.MUST_RECOMPUTE, swap_inputs=True)(Two()) for _ in range(3)])
    with pytest.raises(HostMemoryError, match="no room on host"):
        gradients(net, X, wait=True)


# ---- a failing disk


def test_a_failed_write_raises_at_the_next_region_and_the_next_step_is_right(
    manager: SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(plain(), X)
    net = swapped()

    def refuse(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        engine = manager.engine

        def wait_for_the_failure(cell: nn.Cell, inputs: Any) -> None:
            deadline = time.monotonic() + 10
            while engine._offloads.failure is None:  # what MindSpore's queue still holds is launched a little later
                assert time.monotonic() < deadline
                with engine._lock:
                    engine._takeovers.settle()
                    engine._offloads.begin_region(threading.get_ident())
                time.sleep(0.001)

        handle = net.layers[3].register_forward_pre_hook(wait_for_the_failure)  # reached if it didn't raise earlier
        with pytest.raises(HostMemoryError, match=r"a copy to the file tier failed: .*No space left on device"):
            gradients(net, X)
        handle.remove()
    assert_same(gradients(net, X, wait=True), expected)


def test_a_failed_write_in_the_last_region_loses_no_number(
    manager: SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(plain(1), X)
    net, engine = swapped(1), manager.engine

    def refuse(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    def forward(x: Tensor) -> Tensor:
        value = (net(x) ** 2).mean()
        with engine._lock:
            assert engine.back_end._changed.wait_for(lambda: engine._offloads.failure is not None, 10)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        got = ms.value_and_grad(forward, 0)(X)
    assert np.array_equal(got[1].asnumpy(), expected["value and gradients[1]"])
    with pytest.raises(HostMemoryError, match="No space left"):
        gradients(net, X)


def test_a_failed_read_names_the_tensor_and_the_next_step_is_right(
    manager: SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(plain(), X)
    net = swapped()

    def refuse(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        with pytest.raises(HostMemoryError, match=r"a saved tensor of Tanh, shape \(8, 8\).*Input/output error"):
            gradients(net, X, wait=True)
    assert_same(gradients(net, X, wait=True), expected)


# ---- files, processes, threads


def test_at_the_end_of_the_process_the_thread_ends_and_files_are_closed(manager: SwapManager, tmp_path: Path) -> None:
    manager.configure(min_bytes=0, folder=tmp_path)
    gradients(swapped(), X, wait=True)
    thread = manager.engine.back_end._thread._thread
    assert thread is not None and thread.is_alive()
    _close_at_exit()
    assert not thread.is_alive()
    assert open_files_in(tmp_path) == []
    manager.configure()
    _close_at_exit()


def open_files_in(folder: Path) -> list[os.stat_result]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(folder) in os.readlink(link):
                found.append(os.stat(link))
        except OSError:  # the descriptor that lists the folder
            continue
    return found


def test_slabs_have_no_name_and_are_for_their_owner_only(manager: SwapManager, tmp_path: Path) -> None:
    manager.configure(min_bytes=0, folder=tmp_path)
    gradients(swapped(), X, wait=True)
    assert list(tmp_path.iterdir()) == []
    (slab,) = open_files_in(tmp_path)
    assert stat.S_IMODE(slab.st_mode) == 0o600
    assert slab.st_nlink == 0


def test_reset_and_new_settings_close_the_files(manager: SwapManager, tmp_path: Path) -> None:
    manager.configure(min_bytes=0, folder=tmp_path)
    gradients(swapped(), X, wait=True)
    manager.reset()
    assert open_files_in(tmp_path) == []
    gradients(swapped(), X, wait=True)
    manager.configure(min_bytes=0)
    assert open_files_in(tmp_path) == []


def test_a_forked_child_keeps_the_settings_has_nothing_swapped_and_does_not_hang(manager: SwapManager) -> None:
    manager.configure(min_bytes=0, window="3MiB")
    gradients(swapped(), X, wait=True)
    child = os.fork()
    if child == 0:
        try:
            kept = SwapManager().settings.window == 3 * 2**20
            answer = 0 if kept and SwapManager().stats() == SwapStats() else 1
        except BaseException:
            answer = 2
        os._exit(answer)
    done = threading.Event()
    status: list[int] = []
    waiter = threading.Thread(target=lambda: (status.append(os.waitpid(child, 0)[1]), done.set()), daemon=True)
    waiter.start()
    if not done.wait(20):
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status[0]) == 0


def test_two_threads_that_take_turns_at_training_get_their_own_numbers(manager: SwapManager, tier: str) -> None:
    inputs = [numbers(8, 8, seed=seed) for seed in (1, 2)]
    nets = [Stack([activation_policy(P.MUST_SWAP)(Layer(8, seed=seed)) for seed in range(k, k + 3)]) for k in (0, 5)]
    expected = []
    for k, x in zip((0, 5), inputs, strict=True):
        net = Stack([Layer(8, seed=seed) for seed in range(k, k + 3)])
        expected.append(ms.grad(net)(x).asnumpy().copy())
    wrong: list[str] = []
    turn = threading.Lock()  # MindSpore 2.10 itself fails when two threads take a gradient at the same time

    def train(index: int) -> None:
        try:
            grad = ms.grad(lambda x: nets[index](x))
            for step in range(8):
                with turn:
                    got = grad(inputs[index]).asnumpy()
                if not np.array_equal(got, expected[index]):
                    wrong.append(f"net {index}, step {step}")
        except Exception as error:
            wrong.append(f"net {index}: {error!r}")

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
