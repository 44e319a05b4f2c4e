"""``hyper-parallel demo``: bad values, exit statuses, and one small run for real."""

import json

import pytest
from click.testing import CliRunner

from hyper_parallel.cli import demo as demo_command
from hyper_parallel.cli.commands import command
from hyper_parallel.demo.modes import MODES
from hyper_parallel.demo.results import ModeResult, Task
from hyper_parallel.demo.runner import WorkerFailedError, run_task
from hyper_parallel.demo.settings import DemoSettings

# Attention scores of 1 MiB: just large enough to be swapped.
TINY = ["--layers", "2", "--dim", "64", "--batch", "4", "--seq", "128", "--steps", "2"]


def run(*arguments):
    return CliRunner().invoke(command, ["demo", *map(str, arguments)])


@pytest.fixture
def measured(monkeypatch):
    """Modes that are measured by nobody: what they would have measured can be changed by mode."""
    changes = {}

    def run_fake(task, on_step):
        steps = task.settings.steps
        for step in range(steps):
            on_step(step, 4.5 - step)
        values = {
            "mode": task.mode,
            "losses": [(4.5 - step).hex() for step in range(steps)],
            "weights_sha256": "a" * 64,
            "step_starts": [float(step) for step in range(steps)],
            "step_seconds": [0.5] * steps,
            "peak_growth_bytes": 100 * 2**20,
            "samples": [(at / 10, at * 2**20) for at in range(10 * steps)],
            "live_bytes": [0] * steps,
            "swap": {"offloaded_bytes": 0},
        }
        return ModeResult(**{**values, **changes.get(task.mode, {})})

    monkeypatch.setattr(demo_command, "run_task", run_fake)
    return changes


def assert_refused(result, *expected):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.stderr
    for text in expected:
        assert text in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layers", 0], ["layers", "0"]),
        (["--steps", -3], ["steps", "-3"]),
        (["--dim", 30], ["dim", "heads", "30"]),
        (["--modes", "plain,swop"], ["'swop'", "recompute_swap_inputs"]),
        (["--modes", ","], ["--modes", "recompute_swap_inputs"]),
        (["--policy", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_a_bad_value_is_refused_in_one_line(arguments, expected, tmp_path):
    assert_refused(run(*arguments, "--out", tmp_path / "out"), *expected)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(run("--out", tmp_path / "file" / "out"), "--out", "can't write there")


def test_a_policy_file_that_does_not_fit_is_refused_before_anything_runs(tmp_path, measured):
    policy = tmp_path / "policy.yaml"
    policy.write_text('version: 1\nrules: [{cells: "blocks.*", policy: must_swap}]\n')
    assert_refused(run("--layers", 1, "--policy", policy, "--out", tmp_path / "out"), "rule 1", "blocks.*")


def test_the_table_has_a_row_per_mode(measured, tmp_path):
    measured["swap"] = {"peak_growth_bytes": 40 * 2**20, "swap": {"offloaded_bytes": 7 * 2**20}}
    result = run("--steps", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()[:1]}
    for mode in MODES:
        assert rows[mode][2] == "yes"
    assert rows["swap"] == ["swap", "3.500000", "yes", "1.00x", "40", "40%", "7"]


def test_figures_and_picture_are_written(measured, tmp_path):
    assert run("--modes", "plain,swap", "--steps", 2, "--out", tmp_path / "new" / "folder").exit_code == 0
    figures = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert figures["settings"]["steps"] == 2
    assert {"mindspore", "numpy", "python"} <= set(figures["versions"])
    assert [row["mode"] for row in figures["modes"]] == ["plain", "swap"]
    assert figures["details"][1]["losses"]
    assert (tmp_path / "new" / "folder" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_json_goes_to_standard_output_alone(measured, tmp_path):
    result = run("--json", "--modes", "swap", "--steps", 2, "--out", tmp_path)
    assert [row["mode"] for row in json.loads(result.stdout)["modes"]] == ["plain", "swap"]


def test_plain_runs_first_and_says_so_when_it_was_not_asked_for(measured, tmp_path):
    result = run("--modes", "swap,swap", "--steps", 2, "--out", tmp_path)
    assert "plain runs too" in result.stderr
    assert "plain runs too" not in run("--modes", "swap,plain", "--steps", 2, "--out", tmp_path).stderr


@pytest.mark.parametrize("change", [{"weights_sha256": "b" * 64}, {"live_bytes": [0, 1]}])
def test_a_mode_that_breaks_its_promise_gives_exit_status_1(measured, tmp_path, change):
    measured["recompute"] = change
    result = run("--steps", 2, "--out", tmp_path)
    assert result.exit_code == 1
    assert "recompute" in result.stderr.splitlines()[-1]


def test_a_worker_that_fails_gives_exit_status_1_and_its_last_words(monkeypatch, tmp_path):
    def fail(task, on_step):
        raise WorkerFailedError("mode plain ended with exit status -9")

    monkeypatch.setattr(demo_command, "run_task", fail)
    result = run("--out", tmp_path)
    assert result.exit_code == 1
    assert "exit status -9" in result.stderr


def test_a_policy_that_does_not_fit_in_the_worker_is_an_error_of_the_user(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text('version: 1\nrules: [{cells: "blocks.*", policy: must_swap}]\n')
    task = Task(mode="policy.yaml", policy=policy, settings=DemoSettings(layers=1, dim=16, batch=1, seq=8, steps=1))
    with pytest.raises(ValueError, match=r"mode policy\.yaml: PolicyError: .*blocks"):
        run_task(task, lambda step, loss: None)


def test_a_crash_in_the_worker_shows_the_end_of_its_output():
    with pytest.raises(WorkerFailedError, match="KeyError: 'no such mode'"):
        run_task(Task(mode="no such mode"), lambda step, loss: None)


@pytest.mark.slow
def test_every_mode_trains_to_the_same_bits(tmp_path):
    policy = tmp_path / "own.yaml"
    policy.write_text('version: 1\nrules: [{cells: "layers.[0-0]", policy: must_recompute}]\n')
    result = run(*TINY, "--policy", policy, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["modes"]
    assert [row["mode"] for row in rows] == [*MODES, "policy:own.yaml"]
    assert all(row["bit_identical"] and row["all_returned"] for row in rows)
    assert {row["mode"] for row in rows if row["offloaded_bytes"]} >= {"swap", "mixed"}
    assert (tmp_path / "out" / "memory.png").exists()
