"""The figures of a run are those of its trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.report.run import Run, read_run
from hyper_parallel.report.run_summary import Copies, TensorRow, summarize
from tests.report.runs import MB, a_trace, levels, span, write


def run_of(tmp_path: Path, *more: dict[str, Any]) -> Run:
    trace = a_trace()
    trace["traceEvents"] += more
    return read_run(write(tmp_path, trace))


def test_copies_are_counted_added_and_timed(tmp_path: Path) -> None:
    summary = summarize(run_of(tmp_path))
    assert summary.offloads == Copies(3, 7 * MB, pytest.approx(0.3))
    assert summary.loads == Copies(2, 4 * MB, pytest.approx(0.3))


def test_peaks_are_the_highest_levels_beside_their_limits(tmp_path: Path) -> None:
    rows = {row.place: (row.peak_bytes, row.limit_bytes) for row in summarize(run_of(tmp_path)).places}
    assert rows == {
        "resident": (6 * MB, None),
        "pending": (3 * MB, 4 * MB),
        "window": (4 * MB, 2 * MB),
        "host": (7 * MB, 8 * MB),
    }


def test_peaks_of_a_trace_without_levels_are_0(tmp_path: Path) -> None:
    trace = a_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] != "C"]
    assert {row.peak_bytes for row in summarize(read_run(write(tmp_path, trace))).places} == {0}


def test_waits_are_added_per_cell_and_cause_the_longest_first(tmp_path: Path) -> None:
    more = [span("wait", "operators", 1.5, 0.001, cell="layers.0"), span("wait", "wait_load", 1.6, 0.002, cell="mine")]
    summary = summarize(run_of(tmp_path, *more))
    assert [
        (row.cell, row.cause, row.count, round(row.seconds * 1e3), round(row.longest_seconds * 1e3))
        for row in summary.waits
    ] == [
        ("layers.0", "forward waits for copies to host (limit: pending)", 1, 15, 15),
        ("layers.1", "backward waits for a tensor", 2, 15, 10),
        ("mine", "the user waits: wait_load", 1, 2, 2),
        ("layers.0", "backward waits for operators (limit: window)", 1, 1, 1),
    ]
    assert summary.wait_seconds == pytest.approx(0.033)


def test_equal_tensors_of_a_cell_are_one_row_the_largest_first(tmp_path: Path) -> None:
    assert summarize(run_of(tmp_path)).largest_tensors == [
        TensorRow("layers.0", "shape (4,), dtype float32", 3 * MB, offloads=2, loads=1),
        TensorRow("layers.1", "shape (2,), dtype float32", MB, offloads=1, loads=1),
    ]


def test_ten_tensors_are_named(tmp_path: Path) -> None:
    more = [span("offload", f"shape ({size},)", 1.5, 0.0, bytes=size, cell="head") for size in range(1, 21)]
    rows = summarize(run_of(tmp_path, *more)).largest_tensors
    assert [row.bytes for row in rows] == [3 * MB, MB, *range(20, 12, -1)]


def test_it_says_when_the_counters_hold_more_than_the_trace(tmp_path: Path) -> None:
    assert not summarize(run_of(tmp_path)).counters_hold_more
    trace = a_trace()
    trace["otherData"]["stats"]["loaded_bytes"] += 1
    assert summarize(read_run(write(tmp_path, trace))).counters_hold_more


def test_it_can_be_written_as_json(tmp_path: Path) -> None:
    found = json.loads(json.dumps(summarize(run_of(tmp_path, levels(1.9))).as_json()))
    assert found["cells"]["layers.0"]["offloaded_bytes"] == 6 * MB
    assert found["settings"]["when_exhausted"] == ["recompute", "keep"]
    assert found["largest_tensors"][0]["tensor"] == "shape (4,), dtype float32"
