"""`Trace`: what was computed, copied and waited for, and when, in the format of Chrome's and Perfetto's viewers.

Source of the format: "Trace Event Format", Google, 2016.

Note: [Tracks of a trace]
Spans of one track must not overlap, or the viewers drop some. The copy thread does one thing at a time: one track for
offloads and one for loads are enough. Threads of the user's compute and wait side by side: each has two of its own.
"""

import atexit
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PRODUCER = "hyper_parallel"
VERSION = 1
"""Of what `otherData` holds, and of the names and arguments of events."""
_PER_THREAD = ("compute", "wait")
_TRACKS = ("compute", "wait", "offload", "load")
"""From top to bottom."""


class Trace:
    """What happens until `stop()`, which writes it; a context manager.

    It is written when the block ends, by an exception too, and at the latest when the interpreter ends; not if the
    process is killed. Until then its events are in memory, about 300 bytes for each.

    Args:
        file: Where it is written to, as JSON.
        about: Settings and limits, for the reader.
        stop: Called when it ends, before the file is written; gives the statistics.

    Raises:
        OSError: The file can't be written.
    """

    def __init__(self, file: "str | os.PathLike[str]", about: dict[str, Any], stop: Callable[["Trace"], Any]) -> None:
        self.file = Path(file).absolute()  # the working directory may be another one when it ends
        with self.file.open("a"):  # shows now whether it can be written, not after the training
            pass
        self._about = about
        self._stop = stop
        self._begin = time.perf_counter()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._events: list[tuple] = []
        self._threads: dict[int, int] = {}
        """The number of each of the user's threads, from 1, by its identity."""
        self._computing: dict[int, tuple[str, float]] = {}
        """What each of them does, and since when."""
        self._is_open, self._is_stopping = True, False
        atexit.register(self.stop)

    def span(self, track: str, name: str, begin: float, end: float, **details: Any) -> None:
        """Something took from `begin` to `end`, in seconds of `time.perf_counter`; a wait is the calling thread's."""
        thread = threading.get_ident() if track in _PER_THREAD else 0
        with self._lock:
            self._add(track, thread, name, begin, end, details)

    def levels(self, now: dict[str, int]) -> None:
        """So many bytes lie in every place now."""
        with self._lock:
            if self._is_open:
                self._events.append(("levels", 0, "bytes", time.perf_counter(), 0.0, dict(now)))

    def computes(self, name: str) -> None:
        """The calling thread goes on with something else; ends what it did before. Empty: with nothing of ours."""
        now, thread = time.perf_counter(), threading.get_ident()
        with self._lock:
            self._ends(thread, now)
            if name and self._is_open:
                self._computing[thread] = name, now

    def _ends(self, thread: int, now: float) -> None:
        name, begin = self._computing.pop(thread, ("", now))
        if name:
            self._add("compute", thread, name, begin, now, {})

    def _add(self, track: str, thread: int, name: str, begin: float, end: float, details: dict[str, Any]) -> None:
        if self._is_open:
            number = self._threads.setdefault(thread, len(self._threads) + 1) if track in _PER_THREAD else 0
            self._events.append((track, number, name, max(begin, self._begin), end, details))

    def stop(self) -> None:
        """Write the file; again: nothing.

        Raises:
            OSError: The file can't be written.
        """
        atexit.unregister(self.stop)
        if self._is_stopping or os.getpid() != self._process:  # a forked child has a copy: the file is the parent's
            return
        self._is_stopping = True
        stats = None
        try:
            stats = self._stop(self)
        finally:
            now = time.perf_counter()
            with self._lock:
                for thread in list(self._computing):
                    self._ends(thread, now)
                self._is_open = False
            self.file.write_text(json.dumps(self._as_json(now - self._begin, stats)), "utf-8")

    def _as_json(self, seconds: float, stats: Any) -> dict[str, Any]:
        threads = range(1, max(1, len(self._threads)) + 1)
        lines = [(track, number) for track in _TRACKS for number in (threads if track in _PER_THREAD else (0,))]
        line_of = {line: place for place, line in enumerate(sorted(lines, key=_order), 1)}
        found = [self._about_line("process_name", 0, name=PRODUCER)]
        for (track, number), place in line_of.items():
            found.append(self._about_line("thread_name", place, name=_name(track, number)))
            found.append(self._about_line("thread_sort_index", place, sort_index=place))
        for track, number, name, begin, end, details in self._events:
            event = {"name": name, "pid": self._process, "ts": round((begin - self._begin) * 1e6, 3), "args": details}
            if track == "levels":
                found.append({**event, "ph": "C", "tid": 0})
            else:
                place, microseconds = line_of[track, number], round((end - begin) * 1e6, 3)
                found.append({**event, "ph": "X", "cat": track, "tid": place, "dur": microseconds})
        other = {"producer": PRODUCER, "version": VERSION, "seconds": seconds, **self._about, "stats": stats}
        return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}

    def _about_line(self, what: str, place: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._process, "tid": place, "args": args}

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.stop()
            return
        try:
            self.stop()
        except Exception as second:  # the block's own error is the one to be seen
            warnings.warn(f"the trace {self.file} is not complete: {second}", RuntimeWarning, stacklevel=2)


def _order(line: tuple[str, int]) -> tuple[int, int]:
    """A first thread's tracks, those of the copy thread, then those of other threads."""
    track, number = line
    return max(0, number - 1), _TRACKS.index(track)


def _name(track: str, number: int) -> str:
    return track if number < 2 else f"{track}, thread {number}"
