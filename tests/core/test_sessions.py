"""Recompute sessions: replays run early, on any thread, once; what they give is held until the session is cleared."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import ReplayMismatchError, is_recomputing
from hyper_parallel.core.activation_checkpoint import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from hyper_parallel.core.activation_memory import sessions
from hyper_parallel.core.activation_memory.replay import Invocation
from ms_ops.autograd import wait_for_operators
from tests.helpers import RECOMPUTE, SAVE, Layer, Stack, gradients, numbers, on

X = numbers(2, 4)


class Looks(Layer):
    """Notes when it is replayed, and on which thread."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.replays: list[str] = []

    def construct(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self.replays.append(threading.current_thread().name)
        return super().construct(x)


@pytest.fixture(autouse=True)
def nothing_is_held() -> Iterator[None]:
    assert sessions._held == {}
    yield
    sessions._held.clear()


def net_of(cells: list[Looks]) -> nn.Cell:
    return Stack([on(cell, RECOMPUTE) for cell in cells])


def early(net: nn.Cell, run: Callable[[list[Any]], None]) -> Callable[[Tensor], Tensor]:
    """A forward, after which `run` gets its handles."""

    def forward(x: Tensor) -> Tensor:
        with recompute_handle_collector_ctx() as handles:
            y = net(x)
        run(handles)
        return (y**2).sum()

    return forward


def plain() -> np.ndarray:
    return ms.grad(lambda x: (Stack([Layer(seed=1), Layer(seed=2)])(x) ** 2).sum())(X).asnumpy()


def test_there_is_a_handle_for_every_outermost_replayed_region_in_forward_order() -> None:
    net = Stack([on(Layer(), SAVE), on(Stack([on(Layer(), RECOMPUTE)]), RECOMPUTE), on(Layer(), RECOMPUTE), Layer()])
    paths: list[str] = []
    ms.grad(early(net, lambda handles: paths.extend(handle.path for handle in handles)))(X)
    assert paths == ["Stack", "Layer"]


def test_nothing_is_collected_outside_and_without_a_gradient() -> None:
    net = net_of([Looks()])
    with recompute_handle_collector_ctx() as handles:
        net(X)
    assert handles == []
    ms.grad(net)(X)
    assert handles == []


def test_an_early_replay_is_the_only_one_and_gradients_are_plains() -> None:
    cells = [Looks(seed=1), Looks(seed=2)]
    replayed: list[int] = []

    def run(handles: list[Any]) -> None:
        for handle in handles:
            recompute_handle(handle, "s")
            recompute_handle(handle, "s")
        replayed.extend(len(cell.replays) for cell in cells)

    got = ms.grad(early(net_of(cells), run))(X).asnumpy()
    assert replayed == [len(cell.replays) for cell in cells] == [1, 1]
    assert np.array_equal(got, plain())
    clear_recompute_session("s")


def test_a_replay_may_run_on_another_thread() -> None:
    cells = [Looks(seed=1), Looks(seed=2)]
    failures: list[BaseException] = []

    def run(handles: list[Any]) -> None:
        def work() -> None:
            try:
                recompute_handle(handles[1], "s")
            except BaseException as error:
                failures.append(error)

        worker = threading.Thread(target=work, name="worker")
        worker.start()
        worker.join()

    got = ms.grad(early(net_of(cells), run))(X).asnumpy()
    assert failures == []
    assert cells[1].replays == ["worker"]
    assert np.array_equal(got, plain())
    clear_recompute_session("s")


def test_weights_get_their_gradients_from_an_early_replay() -> None:
    net = net_of([Looks(seed=1), Looks(seed=2)])

    class Early(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def construct(self, x: Tensor) -> Tensor:
            with recompute_handle_collector_ctx() as handles:
                y = self.net(x)
            for handle in handles:
                recompute_handle(handle, 7)
            return y

    want = gradients(Stack([Layer(seed=1), Layer(seed=2)]), X)
    assert [value.tobytes() for value in gradients(Early(), X).values()] == [value.tobytes() for value in want.values()]
    clear_recompute_session(7)


def held() -> int:
    gc.collect()
    return sum(len(placeholders) for placeholders in sessions._held.values())


def invocations() -> int:
    wait_for_operators()
    gc.collect()
    return sum(type(thing) is Invocation for thing in gc.get_objects())


@pytest.mark.parametrize("retains", [True, False])
def test_what_backward_has_read_is_held_until_the_session_is_cleared_if_it_retains(retains: bool) -> None:
    before = invocations()
    with recompute_session_ctx("dx", retain_on_unpack=retains):
        ms.grad(early(net_of([Looks(seed=1), Looks(seed=2)]), lambda handles: None))(X)
    assert (held() > 0) is retains
    clear_recompute_session("dx")
    assert held() == 0
    assert invocations() <= before


def test_a_session_that_is_cleared_too_early_says_so() -> None:
    def run(handles: list[Any]) -> None:
        recompute_handle(handles[0], "early")
        clear_recompute_session("early")

    with pytest.raises(ReplayMismatchError, match=r"Looks: its recompute session 'early' was cleared before backward"):
        ms.grad(early(net_of([Looks(seed=1)]), run))(X)
    ms.grad(net_of([Looks(seed=1)]))(X)


def test_sessions_of_micro_batches_are_apart() -> None:
    net = net_of([Looks(seed=1), Looks(seed=2)])
    inputs = [numbers(2, 4, seed=seed) for seed in (3, 4)]

    def session(net: nn.Cell, run: Callable[[int, list[Any]], None]) -> list[np.ndarray]:
        net.set_grad()
        pull = ops.GradOperation(get_all=True, sens_param=True)(net)
        found, outputs = [], []
        for index, x in enumerate(inputs):
            with recompute_handle_collector_ctx() as handles:
                outputs.append(net(x))
            run(index, handles)
        for index in (1, 0):
            found.append(pull(inputs[index], outputs[index])[0].asnumpy())
            clear_recompute_session(index)
        return found

    def run(index: int, handles: list[Any]) -> None:
        for handle in handles:
            recompute_handle(handle, index)

    want = session(Stack([Layer(seed=1), Layer(seed=2)]), lambda index, handles: None)
    for got, plain_one in zip(session(net, run), want, strict=True):
        assert np.array_equal(got, plain_one)


def test_clearing_a_session_of_nothing_is_allowed() -> None:
    clear_recompute_session("never used")


def test_what_is_no_handle_is_refused() -> None:
    with pytest.raises(TypeError, match="recompute_handle takes what recompute_handle_collector_ctx has collected"):
        recompute_handle(3, "s")  # type: ignore[arg-type]


def test_a_session_is_named_by_something_hashable_and_retains_or_not() -> None:
    with pytest.raises(TypeError, match="unhashable"), recompute_session_ctx([]):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="unhashable"):
        clear_recompute_session([])  # type: ignore[arg-type]
    match = "retain_on_unpack must be a bool, but got 1"
    with pytest.raises(TypeError, match=match), recompute_session_ctx("s", retain_on_unpack=1):  # type: ignore[arg-type]
        pass


def test_a_failing_forward_stops_collecting() -> None:
    with pytest.raises(LookupError), recompute_handle_collector_ctx():
        raise LookupError
    assert sessions._of_thread.collectors == []
