"""`Trace`: what was computed, copied and waited for, and when, in the format of Chrome's and Perfetto's viewers.

Source of the format: "Trace Event Format", Google, 2016.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

_TRACKS = {"compute": 1, "wait": 2, "offload": 3, "load": 4}
"""A line of the picture each, from top to bottom."""


class Trace:
    """What happens until `stop()`, which writes it; a context manager.

    Args:
        file: Where it is written to, as JSON.
        about: Settings and limits, for the reader.
        stop: Called when it ends, before the file is written; gives the statistics.
    """

    def __init__(self, file: "str | os.PathLike[str]", about: dict[str, Any], stop: Callable[["Trace"], Any]) -> None:
        self.file = Path(file)
        self._about = about
        self._stop = stop
        self._begin = time.perf_counter()
        self._events: list[tuple] = []
        self._is_open = True
        self._computing: tuple[str, float] | None = None

    def span(self, track: str, name: str, begin: float, end: float, **details: Any) -> None:
        """Something took from `begin` to `end`, in seconds of `time.perf_counter`."""
        self._events.append((track, name, begin, end, details))

    def levels(self, now: dict[str, int]) -> None:
        """So many bytes lie in every place now."""
        self._events.append(("levels", "bytes", time.perf_counter(), None, dict(now)))

    def computes(self, name: str) -> None:
        """A thread of the user's goes on with something else; ends what it did before. Empty: with nothing of ours."""
        now = time.perf_counter()
        if self._computing is not None:
            before, begin = self._computing
            self.span("compute", before, begin, now)
        self._computing = (name, now) if name else None

    def stop(self) -> None:
        """Write the file; again: nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.computes("")
        stats = self._stop(self)
        self.file.write_text(json.dumps({"traceEvents": self._as_json(), "otherData": {**self._about, "stats": stats}}))

    def _as_json(self) -> list[dict[str, Any]]:
        process = os.getpid()
        found: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": line, "args": {"name": track}}
            for track, line in _TRACKS.items()
        ]
        for track, name, begin, end, details in self._events:
            event = {"name": name, "pid": process, "ts": round((begin - self._begin) * 1e6, 1), "args": details}
            if end is None:
                found.append({**event, "ph": "C"})
            else:
                found.append(
                    {**event, "ph": "X", "cat": track, "tid": _TRACKS[track], "dur": round((end - begin) * 1e6, 1)}
                )
        return found

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
