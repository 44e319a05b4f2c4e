"""``hyper-parallel report``."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hyper_parallel
from hyper_parallel.cli.commands import command
from tests.cli.models import assert_refused
from tests.report.runs import MB, Page, a_trace, write


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A function that runs the command on a trace in a folder of its own, without the picture, which takes a second."""
    monkeypatch.setattr("hyper_parallel.report.page.run_as_svg", lambda run: "<svg></svg>")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path, a_trace())

    def run(*arguments):
        return CliRunner().invoke(command, ["report", *(arguments or ["run.json"])])

    return run


def test_the_page_is_written_and_named(report, tmp_path):
    result = report()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "page: report.html"
    assert Page((tmp_path / "report.html").read_text("utf-8")).figures["offloaded"] == "7.0"


def test_the_command_runs_as_a_process_with_its_picture(tmp_path):
    file = write(tmp_path, a_trace())
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", "report", str(file), "-o", str(tmp_path / "mine.html")],
        env=dict(os.environ, PYTHONPATH=str(Path(hyper_parallel.__file__).parent.parent)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "peak 6.0 MB" in Page((tmp_path / "mine.html").read_text("utf-8")).text


@pytest.mark.parametrize("option", ["-o", "--out"])
def test_the_page_goes_where_it_is_wanted(report, tmp_path, option):
    (tmp_path / "pages").mkdir()
    assert report("run.json", option, "pages/mine.html").exit_code == 0
    assert (tmp_path / "pages" / "mine.html").exists()
    assert not (tmp_path / "report.html").exists()


def test_peaks_limits_copies_waits_and_cells_are_printed(report):
    lines = [line.split() for line in report().stdout.splitlines()]
    assert ["window", "loaded,", "not", "given", "up", "4", "2"] in lines
    assert ["layers.0", "6.0", "3.0", "15.0", "1.0"] in lines
    assert ["to", "host:", "7", "MB", "in", "3", "copies,", "back:", "4", "MB", "in", "2"] in lines
    assert ["waits:", "30.0", "ms,", "1.5%", "of", "the", "time"] in lines


def test_json_has_the_figures_of_the_trace(report, tmp_path):
    found = json.loads(report("run.json", "--json").stdout)
    assert found["run"] == "run.json"
    assert found["offloads"] == {"count": 3, "bytes": 7 * MB, "seconds": pytest.approx(0.3)}
    assert [row["cell"] for row in found["largest_tensors"]] == ["layers.0", "layers.1"]
    assert found["cells"]["layers.1"]["loaded_bytes"] == MB
    assert (tmp_path / "report.html").exists()


def test_a_part_of_the_trace_can_be_looked_at(report):
    found = json.loads(report("run.json", "--between", "0.85", "1.15", "--json").stdout)
    assert (found["offloads"]["bytes"], found["loads"]["bytes"]) == (MB, MB)


def test_a_trace_without_counters_prints_no_cells(report, tmp_path):
    trace = a_trace()
    trace["otherData"]["stats"] = None
    write(tmp_path, trace)
    result = report()
    assert result.exit_code == 0
    assert "layers.0" not in result.stdout


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        ("nothing", "is no JSON"),
        ("", "is empty"),
        ('[{"ph": "X"}]', "is a trace of something else"),
        ('{"traceEvents": []}', "has no otherData of hyper_parallel's"),
    ],
)
def test_bad_input_is_refused_and_no_page_written(report, tmp_path, content, expected):
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    assert_refused(report("bad.json"), "bad.json", expected)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("out", "expected"), [("no/report.html", "No such file"), (".", "Is a directory")])
def test_a_page_that_can_not_be_written_is_refused(report, out, expected):
    assert_refused(report("run.json", "-o", out), f"--out {out}: can't be written", expected)


def test_a_part_that_is_none_is_refused(report):
    assert_refused(report("run.json", "--between", "5", "6"), "has no part from 5.0 to 6.0")


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_its_libraries_it_says_how_to_get_them(report, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "hyper_parallel.cli.report.find_spec", lambda name: None if name == missing else find_spec(name)
    )
    assert_refused(report(), f"needs {missing}; install with: pip install 'hyper-parallel[report]'")
