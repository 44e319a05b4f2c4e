"""The demo's worker, in this process, and its modes."""

from importlib import resources

import pytest
import yaml

from hyper_parallel import load_policy
from hyper_parallel.demo import worker
from hyper_parallel.demo.model import build_model
from hyper_parallel.demo.results import ModeResult, Task, compare
from hyper_parallel.demo.settings import DemoSettings

TINY = DemoSettings(layers=2, dim=16, batch=1, seq=8, steps=3)


@pytest.fixture(scope="module")
def plain():
    return worker.train(Task(mode="plain", settings=TINY), lambda event, **values: None)


@pytest.mark.parametrize("mode", ["plain", "recompute", "swap", "recompute_swap_inputs"])
def test_a_mode_trains_to_the_bits_of_plain(mode, plain):
    events = []
    result = worker.train(Task(mode=mode, settings=TINY), lambda event, **values: events.append((event, values)))
    (row,) = compare([result], plain)
    assert row.passed
    assert [values["step"] for event, values in events if event == "step"] == [0, 1, 2]
    assert [values["loss"].hex() for event, values in events if event == "step"] == result.losses


def test_what_is_measured_has_one_value_per_step(plain):
    assert len(plain.losses) == len(plain.step_starts) == len(plain.step_seconds) == len(plain.live_bytes) == 3
    assert plain.step_starts[0] < plain.step_starts[1] < plain.step_starts[2]
    assert plain.samples[-1][0] > plain.step_starts[-1]
    assert len(set(plain.losses)) == 3


@pytest.mark.parametrize("layers", [1, 3])
def test_the_mixed_policy_fits_a_net_of_any_depth(layers):
    policy = yaml.safe_load(resources.files("hyper_parallel.demo").joinpath("mixed.yaml").read_text("utf-8"))
    rows = load_policy(policy).resolve(build_model(TINY.model_copy(update={"layers": layers}))[0])
    assert {(row.path, row.policy.name) for row in rows} == {
        (f"layers.{number}.{part}", name)
        for number in range(layers)
        for part, name in (("attention", "MUST_SWAP"), ("mlp", "MUST_RECOMPUTE"))
    }


def test_the_result_is_left_in_a_file(tmp_path, capfd, plain):
    task, result = tmp_path / "task.json", tmp_path / "result.json"
    task.write_text(Task(mode="plain", settings=TINY).model_dump_json())
    assert worker.main([str(task), str(result)]) == 0
    assert ModeResult.model_validate_json(result.read_text()).losses == plain.losses
    assert capfd.readouterr().out.count('{"event": "step"') == 3
