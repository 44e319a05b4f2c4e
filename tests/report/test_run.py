"""`read_run`: what is taken for a trace, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.report.run import read_run
from tests.report.runs import MB, SECONDS, a_trace, write


def test_a_trace_is_read(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, a_trace()))
    assert {track: len(run.of(track)) for track in ("compute", "offload", "load", "wait")} == {
        "compute": 3,
        "offload": 3,
        "load": 2,
        "wait": 3,
    }
    assert list(run.tracks.values()) == ["compute", "wait", "offload", "load"]
    assert run.limits == {"pending": 4 * MB, "window": 2 * MB, "host": 8 * MB}
    assert run.stats is not None
    assert run.stats.cells["layers.0"].offloaded_bytes == 6 * MB


def test_a_trace_whose_counters_could_not_be_read_is_read(tmp_path: Path) -> None:
    trace = a_trace()
    trace["otherData"]["stats"] = None
    assert read_run(write(tmp_path, trace)).stats is None


def refusal(tmp_path: Path, content: str | bytes) -> str:
    file = tmp_path / "run.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"run\.json: ") as caught:
        read_run(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty, as a trace is until it is stopped"),
        ("<html>", "is no JSON: Expecting value: line 1 column 1"),
        (b"\xff\xfe\x00", "is no JSON: "),
        ('{"traceEvents": [', "is no JSON: "),
        ("3", "is no trace: it has no otherData of hyper_parallel's"),
        ("{}", "is no trace"),
        ('{"traceEvents": [{"ph": "X", "name": "f"}]}', "is a trace of something else: it has no otherData"),
        ('[{"ph": "B", "name": "f"}]', "is a trace of something else"),
        ('{"traceEvents": [], "otherData": {"producer": "another"}}', "is no trace: it has no otherData"),
    ],
)
def test_what_is_no_trace_of_ours_is_refused(tmp_path: Path, content: str | bytes, expected: str) -> None:
    message = refusal(tmp_path, content)
    assert expected in message
    assert message.endswith("expected the file that SwapManager().trace(FILE) writes when it is stopped")


def test_another_version_is_refused(tmp_path: Path) -> None:
    trace = a_trace()
    trace["otherData"]["version"] = 2
    assert "is a trace of version 2, but this hyper_parallel reads 1" in refusal(tmp_path, json.dumps(trace))


def _without(key: str, of: str) -> dict[str, Any]:
    trace = a_trace()
    del trace[of][key]
    return trace


def test_a_damaged_trace_is_refused_with_the_place(tmp_path: Path) -> None:
    trace = a_trace()
    trace["traceEvents"][4]["dur"] = -1
    assert "traceEvents.4.X.dur: Input should be greater than or equal to 0" in refusal(tmp_path, json.dumps(trace))


@pytest.mark.parametrize("key", ["seconds", "settings", "limit", "stats"])
def test_a_trace_without_a_part_is_refused_with_its_name(tmp_path: Path, key: str) -> None:
    assert f"otherData.{key}: Field required" in refusal(tmp_path, json.dumps(_without(key, "otherData")))


def test_a_track_without_a_name_is_refused(tmp_path: Path) -> None:
    trace = a_trace()
    trace["traceEvents"] = trace["traceEvents"][1:]
    assert "the tracks [1] have spans, but no name" in refusal(tmp_path, json.dumps(trace))


def test_of_many_mistakes_the_first_three_are_told(tmp_path: Path) -> None:
    trace = a_trace()
    for event in trace["traceEvents"][4:9]:
        del event["ts"]
    message = refusal(tmp_path, json.dumps(trace))
    assert message.count("Field required") == 3
    assert "2 more" in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: can't be read: No such file or directory"):
        read_run(tmp_path / "none.json")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_run(tmp_path)


# ---- a part of it


def test_a_part_has_what_happened_in_it(tmp_path: Path) -> None:
    part = read_run(write(tmp_path, a_trace())).between(0.55, 0.95)
    assert [span.name for span in part.of("compute")] == ["forward layers.1"]
    assert [span.args.bytes for span in part.of("offload")] == [3 * MB, 3 * MB, MB]
    assert part.of("load") == []
    assert (part.begin, part.seconds) == (0.55, pytest.approx(0.4))


def test_a_part_begins_with_the_levels_that_held_then(tmp_path: Path) -> None:
    part = read_run(write(tmp_path, a_trace())).between(0.55, 0.95)
    assert [levels.args.resident for levels in part.levels] == [6 * MB, MB]


def test_a_part_ends_with_the_trace(tmp_path: Path) -> None:
    part = read_run(write(tmp_path, a_trace())).between(1.5, 99)
    assert part.seconds == pytest.approx(SECONDS - 1.5)


@pytest.mark.parametrize(("begin", "end"), [(-1, 1), (1, 1), (1, 0.5), (2, 3)])
def test_a_part_that_is_none_is_refused(tmp_path: Path, begin: float, end: float) -> None:
    with pytest.raises(ValueError, match=r"lasts from 0 to 2\.000 seconds and has no part from"):
        read_run(write(tmp_path, a_trace())).between(begin, end)
