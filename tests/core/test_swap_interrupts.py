"""Interrupts and bugs in the middle of the engine's work: it is given up, and a retry gives plain's numbers."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mindspore import Tensor, nn

from hyper_parallel import SwapManager, SwapStateError, swap_wrapper
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_in import Loads
from hyper_parallel.core.activation_memory.swap_ledger import Ledger
from hyper_parallel.core.activation_memory.swap_out import Offloads
from hyper_parallel.core.activation_memory.swap_takeover import Takeovers
from hyper_parallel.core.activation_memory.swap_tensor import Piece, SwapTensor
from ms_ops.copy_thread import CopyThread
from ms_ops.cpu import CpuBackEnd
from ms_ops.host import Tier
from tests.core.swap_fakes import FakeTier, engine_with, group_of, tensor_of, wait_for
from tests.core.swap_nets import BYTES, KINDS, X, assert_clean, net
from tests.helpers import SWAP, Record, assert_same, gradients


@pytest.fixture(scope="module")
def plain() -> Record:
    return gradients(net(), X)


@pytest.fixture(params=KINDS)
def swapping(request: pytest.FixtureRequest) -> nn.Cell:
    return net(**KINDS[request.param])


# ---- a bug in the copy thread


@pytest.mark.parametrize("counter", ["offloaded_bytes", "loaded_bytes"])
def test_a_bug_in_the_copy_thread_reaches_the_user_and_nobody_waits_for_it(
    manager: SwapManager, plain: Record, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch, counter: str
) -> None:
    reported: list[Any] = []
    count = Ledger.count

    def breaks(ledger: Ledger, path: str, name: str, amount: float) -> None:
        if name == counter:
            raise LookupError("a bug")
        count(ledger, path, name, amount)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda what: reported.append(what.exc_value))
        patch.setattr(Ledger, "count", breaks)
        with pytest.raises(SwapStateError, match=r"was given up, since LookupError\('a bug'\).*take the step again"):
            gradients(swapping, X, wait=counter == "loaded_bytes" or None)
    assert [str(error) for error in reported[:1]] == ["a bug"]
    assert_same(gradients(swapping, X, wait=True), plain)
    assert_clean(manager)


# ---- KeyboardInterrupt


@contextmanager
def interrupted(owner: type, name: str, call: int) -> Iterator[list[int]]:
    """KeyboardInterrupt when the method is called so many times on this thread."""
    method, calls, this = getattr(owner, name), [0], threading.current_thread()

    def interrupts(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is this:
            calls[0] += 1
            if calls[0] == call:
                raise KeyboardInterrupt
        return method(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupts)
        yield calls


WITHIN = [
    (Takeovers, "_note"),
    (Takeovers, "_add"),
    (Piece, "__init__"),
    (Ledger, "move"),
    (Ledger, "count"),
    (SwapTensor, "move"),
    (CopyThread, "submit"),
    (CopyThread, "later"),
    (Offloads, "_submit"),
    (Offloads, "cancel"),
    (Loads, "_prefetch"),
    (Tier, "take"),
    (Tier, "give_back"),
    (SwapEngine, "_release"),
]


@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize(("owner", "name"), WITHIN, ids=[f"{owner.__name__}.{name}" for owner, name in WITHIN])
def test_an_interrupt_between_two_steps_of_the_books_leaves_nothing(
    manager: SwapManager, plain: Record, owner: type, name: str, call: int
) -> None:
    swapping = net(policy=SWAP)
    manager.configure(min_bytes=0, window=2 * BYTES, pending=BYTES, fuse_below=0)
    with interrupted(owner, name, call) as calls, contextlib.suppress(KeyboardInterrupt):
        gradients(swapping, X, wait=True)
    assert calls[0] >= 1, "never called"
    assert_clean(manager)
    assert_same(gradients(swapping, X, wait=True), plain)
    assert_clean(manager)


@pytest.fixture
def usr1_interrupts() -> Iterator[None]:
    """SIGUSR1 raises KeyboardInterrupt, as SIGINT does: MindSpore 2.10 ends the process at SIGINT during a step."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_forward_waits_loses_nothing_of_the_engine(
    manager: SwapManager, plain: Record, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch, usr1_interrupts: None
) -> None:
    manager.configure(min_bytes=0, pending=1)
    engine, go_on, pwritev = manager.engine, threading.Event(), os.pwritev
    presses = threading.Thread(target=lambda: press_when_waiting(engine, go_on))

    def slow(*args: Any) -> int:
        assert go_on.wait(10)
        return pwritev(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        presses.start()
        with pytest.raises(KeyboardInterrupt):
            gradients(swapping, X)
    presses.join(10)
    assert_same(gradients(swapping, X, wait=True), plain)
    assert manager.engine is engine, "nothing is half done while it waits"
    assert_clean(manager)


def test_an_interrupt_while_backward_waits_loses_nothing_of_the_engine(
    manager: SwapManager, plain: Record, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch, usr1_interrupts: None
) -> None:
    engine, go_on, preadv = manager.engine, threading.Event(), os.preadv
    presses = threading.Thread(target=lambda: press_when_waiting(engine, go_on))

    def slow(*args: Any) -> int:
        assert go_on.wait(10)
        return preadv(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow)
        presses.start()
        with pytest.raises(KeyboardInterrupt):
            gradients(swapping, X, wait=True)
    presses.join(10)
    assert_same(gradients(swapping, X, wait=True), plain)
    assert manager.engine is engine
    assert_clean(manager)


def press_when_waiting(engine: SwapEngine, go_on: threading.Event) -> None:
    wait_for(lambda: main_thread_waits(engine))
    while main_thread_waits(engine):  # a signal that comes just before a lock is waited for doesn't end the wait
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
    go_on.set()


def main_thread_waits(engine: SwapEngine) -> bool:
    """Whether it is where `Condition.wait` tidies up if it is interrupted; a few instructions before, it doesn't."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    if frame.f_code is not threading.Condition.wait.__code__:
        return False
    assert isinstance(engine.back_end, CpuBackEnd)
    here = frame.f_locals
    return here.get("self") is engine.back_end._changed and "gotit" in here


def test_statistics_go_on_when_an_engine_is_replaced(manager: SwapManager) -> None:
    swapping = net(policy=SWAP)
    gradients(swapping, X, wait=True)
    before = manager.stats()
    with interrupted(Takeovers, "_note", 1), pytest.raises(KeyboardInterrupt):
        gradients(swapping, X)
    after = manager.stats()
    assert (after.offloaded_bytes, after.host_peak_bytes) == (before.offloaded_bytes, before.host_peak_bytes)


def test_a_tensor_of_an_engine_that_was_given_up_says_so() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = group_of(engine, tensor_of(1))
        engine.breaks(KeyboardInterrupt())
        with pytest.raises(SwapStateError, match=r"since KeyboardInterrupt\(\) came .*; take the step again"):
            handle.get()
        with pytest.raises(SwapStateError, match="was given up"):
            group_of(engine, tensor_of(2))


def test_a_value_that_a_tensor_policy_raises_is_not_a_broken_engine(manager: SwapManager) -> None:
    def policy(tensor: Tensor) -> Any:
        raise KeyboardInterrupt

    engine = manager.engine
    with pytest.raises(KeyboardInterrupt):
        gradients(swap_wrapper(net(), policy_fn=policy), X)
    assert manager.engine is engine


def test_an_interrupt_while_room_is_made_for_what_a_region_saves_breaks_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = FakeTier()
    tier.gate.clear()  # so that what is launched stays on its way
    with engine_with(tier) as engine:
        handles = group_of(engine, tensor_of(2))
        engine.region_begins()
        monkeypatch.setattr(engine.limits, "pending", 1)
        with interrupted(type(engine.back_end), "advance", 1), pytest.raises(KeyboardInterrupt):
            engine.makes_way(handles[0].group)
        assert isinstance(engine.ledger.broken, KeyboardInterrupt)
