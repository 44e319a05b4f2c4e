"""A small trace whose figures are known, and a page taken apart."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

MB = 2**20
SECONDS = 2.0
_TRACKS = {"compute": 1, "wait": 2, "offload": 3, "load": 4}


def span(track: str, name: str, begin: float, seconds: float, **args: Any) -> dict[str, Any]:
    """An event of a trace; times in seconds."""
    event = {"ph": "X", "cat": track, "name": name, "pid": 7, "tid": _TRACKS[track]}
    return {**event, "ts": begin * 1e6, "dur": seconds * 1e6, "args": args}


def levels(at: float, resident: int = 0, pending: int = 0, window: int = 0, host: int = 0) -> dict[str, Any]:
    """Bytes in every place, from a moment on."""
    args = {"resident": resident, "pending": pending, "window": window, "host": host}
    return {"ph": "C", "name": "bytes", "pid": 7, "tid": 0, "ts": at * 1e6, "args": args}


def a_trace() -> dict[str, Any]:
    """Two layers, two tensors of 3 MB and one of 1 MB; 7 MB to host, 4 MB back, 30 ms of waits in 2 seconds."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": line, "args": {"name": track}}
        for track, line in _TRACKS.items()
    ]
    spans = [
        span("compute", "forward layers.0", 0.0, 0.5),
        span("compute", "forward layers.1", 0.5, 0.5),
        span("compute", "backward layers.1", 1.0, 1.0),
        span("offload", "shape (4,), dtype float32", 0.5, 0.1, bytes=3 * MB, cell="layers.0"),
        span("offload", "shape (4,), dtype float32", 0.6, 0.1, bytes=3 * MB, cell="layers.0"),
        span("offload", "shape (2,), dtype float32", 0.9, 0.1, bytes=MB, cell="layers.1"),
        span("load", "shape (2,), dtype float32", 1.0, 0.1, bytes=MB, cell="layers.1"),
        span("load", "shape (4,), dtype float32", 1.2, 0.2, bytes=3 * MB, cell="layers.0"),
        span("wait", "load shape (2,), dtype float32", 1.0, 0.010, cell="layers.1"),
        span("wait", "load shape (4,), dtype float32", 1.2, 0.005, cell="layers.1"),
        span("wait", "offload", 0.6, 0.015, cell="layers.0"),
    ]
    places = [
        levels(0.5, resident=6 * MB, pending=3 * MB),
        levels(0.7, resident=1 * MB, pending=3 * MB, host=6 * MB),
        levels(1.2, resident=4 * MB, window=4 * MB, host=7 * MB),
        levels(1.8),
    ]
    cells = {
        "layers.0": {"offloaded_bytes": 6 * MB, "loaded_bytes": 3 * MB, "wait_seconds": 0.015, "parameter_bytes": MB},
        "layers.1": {"offloaded_bytes": 1 * MB, "loaded_bytes": 1 * MB, "wait_seconds": 0.015},
    }
    other = {
        "producer": "hyper_parallel",
        "version": 1,
        "seconds": SECONDS,
        "settings": {"pending": 4 * MB, "window": 2 * MB, "when_exhausted": ["recompute", "keep"]},
        "limit": 8 * MB,
        "stats": {"offloaded_bytes": 7 * MB, "loaded_bytes": 4 * MB, "wait_seconds": 0.03, "cells": cells},
    }
    return {"traceEvents": [*names, *spans, *places], "displayTimeUnit": "ms", "otherData": other}


def write(folder: Path, trace: Any) -> Path:
    """Write a trace into a folder."""
    file = folder / "run.json"
    file.write_text(json.dumps(trace))
    return file


class Page(HTMLParser):
    """What stands in a page: tables by their id, figures by theirs, the text, and everything that points elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.figures: dict[str, str] = {}
        self.text = ""
        self.tags: list[str] = []
        self.targets: list[str] = []
        self._open: list[str] = []
        self._table = self._figure = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        self.tags.append(tag)
        self._open.append(tag)
        self.targets += [str(known[name]) for name in ("src", "href", "xlink:href", "data") if name in known]
        if tag == "table":
            self._table = str(known["id"])
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        elif tag == "div":
            self._figure = known.get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            self.tables[self._table][-1][-1] += data.strip()
        elif "dd" in self._open:
            self.figures[self._figure] = self.figures.get(self._figure, "") + data
