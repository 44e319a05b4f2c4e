"""`CopyThread`: one thread that copies, urgent jobs first, under its owner's lock."""

import math
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


class CopyThread:
    """Runs `work(item)` for submitted items, one at a time, and calls what is to be called in between.

    `work` is called with the owner's lock held, and releases it around the copy itself. The thread begins with the
    first item, is a daemon, and ends with `stop()`; every method but `stop` and `soon` is called with the lock held.

    Args:
        lock: The owner's.
        failed: Called, with the lock held, with what a job has raised: a bug, which is reported as any thread would.
    """

    def __init__(self, lock: Any, failed: Callable[[BaseException], None] = lambda error: None) -> None:
        self._failed = failed
        self._lock = lock
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. Unlike a condition it needs no lock: the thread would wait for that as soon as it wakes."""
        self._jobs: OrderedDict[int, tuple[Any, Callable[[Any], None]]] = OrderedDict()
        """By the ids of the items, the next one first."""
        self._timer: tuple[float, Callable[[], None]] | None = None
        self._soon: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0
        """When the thread wakes by itself; 0 while it is awake. Waking it takes longer than all else for a job."""
        self._stopped = False

    def submit(self, item: Any, work: Callable[[Any], None], urgent: bool = False) -> None:
        """Queue a job; an urgent one is next.

        Raises:
            ValueError: The item is queued already.
        """
        if id(item) in self._jobs:
            raise ValueError(f"a job for {item} is queued already")
        self._jobs[id(item)] = item, work
        if urgent:
            self.hurry(item)
        self._start()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call()` in so many seconds; replaces what was to be called before."""
        self._timer = (time.monotonic() + seconds, call)
        if self._thread is None or self._sleeps_until > self._timer[0]:
            self._start()

    def soon(self, call: Callable[[], None]) -> None:
        """Call `call()` before the next job. With the lock or without it."""
        self._soon.append(call)
        if self._thread is None:
            with self._lock:
                self._start()
        elif self._sleeps_until:
            self._ring()

    def cancel(self, item: Any) -> bool:
        """Forget a job that has not begun; False if there is none."""
        return self._jobs.pop(id(item), None) is not None

    def hurry(self, item: Any) -> None:
        """Make a queued job the next one."""
        if id(item) in self._jobs:
            self._jobs.move_to_end(id(item), last=False)

    def stop(self) -> None:
        """End the thread after the job that runs now; queued jobs are dropped. Called without the lock."""
        with self._lock:
            self._stopped = True
            self._jobs.clear()
            self._soon.clear()
            self._timer = None
            self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hyper_parallel-copy", daemon=True)
            thread.start()  # the system may refuse: one that never began can't be joined
            self._thread = thread
        elif self._sleeps_until:
            self._ring()

    def _ring(self) -> None:
        self._sleeps_until = 0.0
        self._bell.put(None)

    def _sleep(self, until: float) -> None:
        self._sleeps_until = until
        if not self._soon:  # asked when everybody can see that this thread sleeps: who comes later rings
            self._lock.release()
            try:
                self._bell.get(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
            except Empty:
                pass
            finally:
                self._lock.acquire()
        self._sleeps_until = 0.0

    def _run(self) -> None:
        with self._lock:
            while not self._stopped:
                if self._soon:
                    call = self._soon.popleft()
                    self._guarded(call)
                    del call
                    continue
                if self._jobs:
                    _, (item, work) = self._jobs.popitem(last=False)
                    self._guarded(work, item)
                    del item, work
                    continue
                until = self._timer[0] if self._timer is not None else math.inf
                if until > time.monotonic():
                    self._sleep(until)
                    continue
                assert self._timer is not None
                call, self._timer = self._timer[1], None
                self._guarded(call)
                del call

    def _guarded(self, work: Callable[..., None], *item: Any) -> None:
        try:
            work(*item)
        except BaseException as error:  # the thread goes on: others wait for it
            self._failed(error)
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))
