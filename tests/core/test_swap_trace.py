"""`SwapManager().trace()`: what is in the file, when it is written, and that nothing else is touched."""

import atexit
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mindspore import Tensor, nn, ops

import hyper_parallel
from hyper_parallel import CheckpointPolicy, SwapManager, SwapStateError, activation_policy
from hyper_parallel.core.activation_memory.swap_trace import Trace
from tests.helpers import Stack, gradients, numbers

X = numbers(8, 8)
BYTES = 8 * 8 * 4


class Tanh(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


def swapped(depth: int = 4) -> nn.Cell:
    return Stack([activation_policy(CheckpointPolicy.MUST_SWAP)(Tanh()) for _ in range(depth)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


def written(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def spans(file: Path, track: str) -> list[dict[str, Any]]:
    return [event for event in written(file)["traceEvents"] if event.get("cat") == track]


def recording(file: Path, stats: Any = None) -> Trace:
    """A trace without an engine."""
    return Trace(file, {}, lambda trace: stats)


@pytest.fixture
def traced(manager: SwapManager, file: Path) -> Path:
    """The trace of one step."""
    with manager.trace(file):
        gradients(swapped(), X, wait=True)
    return file


# ---- what is in it


def test_every_tensor_that_moves_has_a_span_with_its_bytes_and_cell(traced: Path) -> None:
    for track in ("offload", "load"):
        found = [(event["name"], event["args"]) for event in spans(traced, track)]
        assert found == [("shape (8, 8), dtype float32", {"bytes": BYTES, "cell": "Tanh"})] * 4


@pytest.mark.parametrize(("track", "counter"), [("offload", "offloaded_bytes"), ("load", "loaded_bytes")])
def test_the_bytes_of_spans_are_those_of_stats(manager: SwapManager, traced: Path, track: str, counter: str) -> None:
    total = sum(event["args"]["bytes"] for event in spans(traced, track))
    assert total == getattr(manager.stats(), counter) == written(traced)["otherData"]["stats"][counter] > 0


def test_waits_add_up_to_wait_seconds(manager: SwapManager, file: Path) -> None:
    manager.configure(min_bytes=0, window=BYTES)
    with manager.trace(file):
        gradients(swapped(), X, wait=True)
    found = spans(file, "wait")
    assert found
    assert sum(event["dur"] for event in found) / 1e6 == pytest.approx(manager.stats().wait_seconds, abs=1e-7)


def test_compute_is_every_region_forward_then_backward(traced: Path) -> None:
    assert [event["name"] for event in spans(traced, "compute")] == ["forward Tanh"] * 4 + ["backward Tanh"] * 4


def test_the_highest_levels_are_the_peaks_of_stats(traced: Path) -> None:
    levels = [event["args"] for event in written(traced)["traceEvents"] if event["ph"] == "C"]
    stats = written(traced)["otherData"]["stats"]
    assert {place: max(level[place] for level in levels) for place in levels[0]} == {
        place: stats[f"{place}_peak_bytes"] for place in ("resident", "pending", "window", "host")
    }
    assert set(levels[-1].values()) == {0}


def test_it_says_the_settings_the_limit_and_the_counters_of_each_cell(manager: SwapManager, traced: Path) -> None:
    other = written(traced)["otherData"]
    assert (other["producer"], other["version"]) == ("hyper_parallel", 1)
    assert other["settings"] == manager.settings.model_dump(mode="json")
    assert other["limit"] == manager.engine.tier.limit
    assert other["stats"]["cells"]["Tanh"]["offloaded_bytes"] == 4 * BYTES


_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "C": {"name": str, "pid": int, "ts": (int, float), "args": dict},
}
"""What the Trace Event Format needs of an event of each phase."""


def test_every_event_has_the_fields_that_its_phase_needs(traced: Path) -> None:
    events = written(traced)["traceEvents"]
    assert {event["ph"] for event in events} == set(_FIELDS)
    for event in events:
        for name, kind in _FIELDS[event["ph"]].items():
            assert isinstance(event[name], kind), (name, event)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())


def test_tracks_are_named_and_ordered(traced: Path) -> None:
    about = [event for event in written(traced)["traceEvents"] if event["ph"] == "M"]
    names = {event["tid"]: event["args"]["name"] for event in about if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in about if event["name"] == "thread_sort_index"}
    assert sorted(names, key=order.__getitem__) == [1, 2, 3, 4]
    assert list(names.values()) == ["compute", "wait", "offload", "load"]
    for track in names.values():
        assert {names[event["tid"]] for event in spans(traced, track)} <= {track}


def test_spans_of_one_track_do_not_overlap(traced: Path) -> None:
    events = [event for event in written(traced)["traceEvents"] if event["ph"] == "X"]
    for tid in {event["tid"] for event in events}:
        mine = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == tid)
        for (begin, duration), (after, _) in itertools.pairwise(mine):
            assert begin + duration <= after + 0.002, "more than rounding"


# ---- threads


def test_two_threads_have_tracks_of_their_own(file: Path) -> None:
    trace = recording(file)
    both = threading.Barrier(2)

    def run(name: str) -> None:
        trace.computes(f"forward {name}")
        both.wait(10)
        trace.span("wait", f"load {name}", time.perf_counter(), time.perf_counter())
        trace.computes("")

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    trace.stop()
    names = {
        event["tid"]: event["args"]["name"]
        for event in written(file)["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert list(names.values()) == ["compute", "wait", "offload", "load", "compute, thread 2", "wait, thread 2"]
    assert {event["name"] for event in spans(file, "compute")} == {"forward a", "forward b"}
    assert sorted(names[event["tid"]] for event in spans(file, "compute")) == ["compute", "compute, thread 2"]
    assert sorted(names[event["tid"]] for event in spans(file, "wait")) == ["wait", "wait, thread 2"]


def test_two_threads_that_train_in_turn_do_not_end_each_other_s_spans(manager: SwapManager, file: Path) -> None:
    turn, both = threading.Lock(), threading.Barrier(2)

    def train() -> None:
        both.wait(10)  # a thread that has ended may give its identity to the next
        for _ in range(2):
            with turn:  # MindSpore 2.10 itself fails when two threads take a gradient at the same time
                gradients(swapped(), X)
        both.wait(10)

    threads = [threading.Thread(target=train) for _ in range(2)]
    with manager.trace(file):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    names: dict[int, list[str]] = {}
    for event in spans(file, "compute"):
        names.setdefault(event["tid"], []).append(event["name"])
    assert list(names.values()) == [(["forward Tanh"] * 4 + ["backward Tanh"] * 4) * 2] * 2


def test_what_other_threads_compute_ends_with_the_trace(file: Path) -> None:
    trace = recording(file)
    thread = threading.Thread(target=trace.computes, args=("forward a",))
    thread.start()
    thread.join(10)
    trace.computes("forward b")
    trace.stop()
    assert [event["name"] for event in spans(file, "compute")] == ["forward a", "forward b"]


def test_what_began_before_the_trace_begins_with_it(file: Path) -> None:
    before = time.perf_counter()
    trace = recording(file)
    trace.span("offload", "a tensor", before, time.perf_counter(), bytes=4, cell="layer")
    trace.stop()
    assert spans(file, "offload")[0]["ts"] == 0


# ---- its end


def test_nothing_is_recorded_after_stop(manager: SwapManager, file: Path) -> None:
    trace = manager.trace(file)
    trace.stop()
    before = file.read_bytes()
    gradients(swapped(), X, wait=True)
    trace.computes("forward a")
    trace.span("load", "a tensor", 0.0, 1.0)
    trace.levels({"host": 1})
    trace.stop()
    assert file.read_bytes() == before
    assert trace._events == []


def test_without_a_trace_the_engine_touches_none(manager: SwapManager, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    for name in ("__init__", "span", "levels", "computes", "stop"):
        monkeypatch.setattr(Trace, name, lambda *args, name=name, **details: touched.append(name))
    gradients(swapped(), X, wait=True)
    assert manager.engine.ledger.trace is None
    assert touched == []


def test_a_step_that_raises_leaves_the_trace_of_what_it_did(manager: SwapManager, file: Path) -> None:
    def loss(output: Tensor) -> Tensor:
        raise KeyError("no such token")

    with pytest.raises(KeyError, match="no such token"), manager.trace(file):
        gradients(swapped(2), X, loss=loss)
    manager.abort_step()
    assert [event["name"] for event in spans(file, "compute")] == ["forward Tanh"] * 2


def test_another_error_at_the_end_does_not_hide_the_block_s(file: Path) -> None:
    def stop(trace: Trace) -> None:
        raise RuntimeError("an operator failed")

    def block() -> None:
        with Trace(file, {}, stop) as trace:
            trace.computes("forward a")
            raise KeyError("no such token")

    warned = pytest.warns(RuntimeWarning, match=r"run\.json is not complete: an operator failed")
    with warned, pytest.raises(KeyError, match="no such token"):
        block()
    assert [event["name"] for event in spans(file, "compute")] == ["forward a"]
    assert written(file)["otherData"]["stats"] is None


def test_an_error_at_the_end_is_raised_and_the_file_written(file: Path) -> None:
    def stop(trace: Trace) -> None:
        raise RuntimeError("an operator failed")

    with pytest.raises(RuntimeError, match="an operator failed"), Trace(file, {}, stop):
        pass
    assert written(file)["otherData"]["stats"] is None


def test_two_traces_at_once_raise_and_name_the_first(manager: SwapManager, file: Path, tmp_path: Path) -> None:
    with (
        manager.trace(file),
        pytest.raises(SwapStateError, match=r"run\.json; stop\(\) it first"),
        manager.trace(tmp_path / "other.json"),
    ):
        pass
    with manager.trace(tmp_path / "other.json"):
        pass


def test_settings_do_not_change_while_a_trace_is_recorded(manager: SwapManager, file: Path) -> None:
    with manager.trace(file):
        manager.configure(min_bytes=0)  # what they are
        with pytest.raises(SwapStateError, match=r"while a trace is recorded to .*run\.json; stop\(\) it first"):
            manager.configure(min_bytes=1)
    manager.configure(min_bytes=1)


def test_a_trace_whose_end_failed_does_not_block_the_next(
    manager: SwapManager, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("an operator failed")

    trace = manager.trace(file)
    with monkeypatch.context() as patch:
        patch.setattr("hyper_parallel.core.activation_memory.swap_manager.wait_for_operators", fail)
        with pytest.raises(RuntimeError, match="an operator failed"):
            trace.stop()
    with manager.trace(file):
        pass


def test_a_file_that_can_not_be_written_is_refused_when_it_begins(manager: SwapManager, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        manager.trace(tmp_path)
    with pytest.raises(FileNotFoundError, match="the folder of the trace isn't there"):
        manager.trace(tmp_path / "no" / "run.json")
    assert manager.engine.ledger.trace is None


def test_a_relative_file_stays_where_it_was_when_the_trace_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = recording(Path("run.json"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trace.stop()
    assert written(tmp_path / "run.json")["traceEvents"]


def test_a_program_that_ends_without_stop_leaves_its_trace(file: Path) -> None:
    program = f"""
        from hyper_parallel import SwapManager
        SwapManager().trace({str(file)!r})
        raise KeyError("no such token")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=dict(os.environ, PYTHONPATH=str(Path(hyper_parallel.__file__).parent.parent)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "no such token" in done.stderr
    assert written(file)["otherData"]["stats"]["live_bytes"] == 0


def test_a_forked_child_leaves_the_file_to_its_parent(file: Path) -> None:
    trace = recording(file)
    child = os.fork()
    if child == 0:
        trace.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert file.read_bytes() == b""
    trace.stop()
    assert written(file)["traceEvents"]


def test_a_trace_that_has_ended_is_not_held_until_the_interpreter_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", let_go.append)
    trace = recording(file)
    trace.stop()
    assert let_go == [trace.stop]
