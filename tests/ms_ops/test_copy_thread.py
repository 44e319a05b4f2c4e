"""`CopyThread`: one thread, urgent jobs first."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ms_ops.copy_thread import CopyThread


class Desk:
    """A lock, its thread, and what was worked on; the first job waits until `gate` opens."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = CopyThread(self.lock)
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.done: list[Any] = []

    def work(self, item: Any) -> None:
        if item == "first":
            self.begun.set()
            self.lock.release()
            try:
                self.gate.wait(10)
            finally:
                self.lock.acquire()
        self.done.append(item)

    def submit(self, item: Any, **options: Any) -> None:
        with self.lock:
            self.thread.submit(item, self.work, **options)

    def hold(self) -> None:
        """Keep the thread busy, so that what is submitted now queues."""
        self.submit("first")
        assert self.begun.wait(10)

    def finish(self) -> list[Any]:
        self.gate.set()
        self.wait(lambda: not self.thread._jobs and "first" in self.done)
        return self.done[1:]

    def wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 10
        while True:
            with self.lock:
                if condition():
                    return
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.gate.set()
    made.thread.stop()


def test_no_thread_runs_before_the_first_job(desk: Desk) -> None:
    assert desk.thread._thread is None


def test_jobs_run_in_the_order_in_which_they_came(desk: Desk) -> None:
    desk.hold()
    for item in "abc":
        desk.submit(item)
    assert desk.finish() == ["a", "b", "c"]


def test_an_urgent_job_is_next(desk: Desk) -> None:
    desk.hold()
    for item, urgent in [("a", False), ("b", True), ("c", False), ("d", True)]:
        desk.submit(item, urgent=urgent)
    assert desk.finish() == ["d", "b", "a", "c"]


def test_a_job_that_has_not_begun_can_be_cancelled(desk: Desk) -> None:
    desk.hold()
    items = [object(), object()]
    for item in items:
        desk.submit(item)
    with desk.lock:
        assert desk.thread.cancel(items[0])
        assert not desk.thread.cancel(items[0])
        assert not desk.thread.cancel("first")
    assert desk.finish() == [items[1]]


def test_an_item_that_is_queued_is_refused(desk: Desk) -> None:
    desk.hold()
    desk.submit("a")
    with pytest.raises(ValueError, match="a job for a is queued already"):
        desk.submit("a")
    assert desk.finish() == ["a"]


def test_equal_items_are_told_apart_by_identity(desk: Desk) -> None:
    desk.hold()
    first, second = [1], [1]
    desk.submit(first)
    desk.submit(second)
    with desk.lock:
        assert desk.thread.cancel(second)
    assert desk.finish()[0] is first


def test_a_queued_job_can_be_made_the_next_one(desk: Desk) -> None:
    desk.hold()
    a, b, c = (object() for _ in range(3))
    for item in (a, b, c):
        desk.submit(item)
    with desk.lock:
        desk.thread.hurry(c)
        desk.thread.hurry(object())
    assert desk.finish() == [c, a, b]


def test_a_call_for_later_comes_after_its_time(desk: Desk) -> None:
    called = threading.Event()
    with desk.lock:
        begin = time.monotonic()
        desk.thread.later(0.05, called.set)
    assert called.wait(10)
    assert time.monotonic() - begin >= 0.05


def test_a_later_call_replaces_the_one_before(desk: Desk) -> None:
    calls: list[str] = []
    with desk.lock:
        desk.thread.later(0.01, lambda: calls.append("old"))
        desk.thread.later(0.02, lambda: calls.append("new"))
    desk.wait(lambda: calls)
    time.sleep(0.02)
    assert calls == ["new"]


def test_what_is_called_soon_comes_before_the_jobs_and_in_order(desk: Desk) -> None:
    desk.hold()
    desk.submit("job")
    for name in "ab":
        desk.thread.soon(lambda name=name: desk.done.append(name))
    assert desk.finish() == ["a", "b", "job"]


def test_a_call_without_the_lock_begins_the_thread_and_wakes_it_every_time(desk: Desk) -> None:
    for count in range(500):
        desk.thread.soon(lambda: desk.done.append("called"))
        deadline = time.monotonic() + 10
        while len(desk.done) <= count:  # the next one comes while the thread falls asleep
            assert time.monotonic() < deadline, f"call {count} was missed"
            time.sleep(0)


def test_what_is_called_soon_runs_under_the_lock_of_the_owner(desk: Desk) -> None:
    desk.submit("a")  # the thread runs
    with desk.lock:
        desk.thread.soon(lambda: desk.done.append("called"))
        time.sleep(0.02)
        assert "called" not in desk.done
    desk.wait(lambda: "called" in desk.done)


def test_a_thread_that_was_woken_for_nothing_still_waits_for_the_time_of_a_call(desk: Desk) -> None:
    called = threading.Event()
    with desk.lock:
        begin = time.monotonic()
        desk.thread.later(0.05, called.set)
    for _ in range(3):
        desk.thread.soon(lambda: None)
    assert called.wait(10)
    assert time.monotonic() - begin >= 0.05


def test_work_is_done_under_the_lock_of_the_owner(desk: Desk) -> None:
    with desk.lock:
        desk.thread.submit("a", desk.work)
        time.sleep(0.02)
        assert desk.done == []
    desk.wait(lambda: desk.done == ["a"])


def test_stop_drops_what_is_queued_and_ends_the_thread(desk: Desk) -> None:
    desk.hold()
    desk.submit("queued")
    with desk.lock:
        desk.thread.later(0.0, lambda: desk.done.append("timer"))
    stopper = threading.Thread(target=desk.thread.stop)
    stopper.start()
    desk.wait(lambda: desk.thread._stopped)
    desk.gate.set()
    stopper.join(10)
    assert desk.done == ["first"]
    assert not desk.thread._thread.is_alive()


def test_stop_without_a_job_and_twice_does_nothing(desk: Desk) -> None:
    desk.thread.stop()
    desk.thread.stop()


def test_stop_from_the_thread_itself_does_not_wait_for_itself(desk: Desk) -> None:
    with desk.lock:
        desk.thread.submit("a", lambda item: (desk.thread.stop(), desk.done.append(item)))
    desk.wait(lambda: desk.done == ["a"])
    desk.thread._thread.join(10)
    assert not desk.thread._thread.is_alive()


def test_a_finished_job_is_not_held_by_the_thread(desk: Desk) -> None:
    class Item:
        pass

    item = Item()
    reference = weakref.ref(item)
    with desk.lock:
        desk.thread.submit(item, lambda item: None)
    del item
    desk.wait(lambda: reference() is None)


def test_the_thread_is_a_daemon(desk: Desk) -> None:
    desk.submit("a")
    assert desk.thread._thread.daemon


def test_a_job_that_raises_is_reported_and_the_next_one_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda what: reported.append(what.exc_value))

    def fail(item: Any) -> None:
        raise LookupError("a bug")

    with desk.lock:
        desk.thread.submit("bad", fail)
        desk.thread.submit("good", desk.work)
    desk.wait(lambda: desk.done == ["good"])
    assert [str(error) for error in reported] == ["a bug"]
