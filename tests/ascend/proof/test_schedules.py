"""Under random schedules training gives plain's numbers to the last bit, and the race checker has nothing to say."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("schedules on Ascend")  # one program serves them all

SEEDS = (1, 2)
ROOT = Path(__file__).resolve().parents[3]
NAMES = [
    "transformer, recompute",
    "transformer, swap",
    "transformer, recompute_swap_inputs",
    "transformer, selective_swap",
    "mlp, recompute",
    "mlp, swap",
    "mlp, recompute_swap_inputs",
    "mlp, selective_swap",
    "transformer, swap, loose limits",
    "transformer, swap, verified",
    "mlp, swap, file tier",
    "abandoned forwards",
    "settings change",
    "an engine breaks",
    "file tier, little pinned memory",
    "two owners",
]


@pytest.fixture(scope="module")
def seen(script: Any) -> list[dict[str, Any]]:
    """All scenarios, copies slowed."""
    seeds = ",".join(map(str, SEEDS))
    done = script(
        "ascend_scenarios.py", "--child", seeds, ASCSIM_COPY_DELAY_US="1000", ASCSIM_SEED="1", ASCSIM_STRICT_PINNED="1"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("seen: ")]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_plain(seen: list[dict[str, Any]], name: str) -> None:
    own = [each for each in seen if each["scenario"] == name]
    assert {each["seed"]: each["wrong"] for each in own} == dict.fromkeys(SEEDS, "")


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_race(seen: list[dict[str, Any]], name: str) -> None:
    own = [each for each in seen if each["scenario"] == name]
    assert len(own) == len(SEEDS)
    assert [race for each in own for race in each["races"]] == []


def test_every_scenario_is_run(seen: list[dict[str, Any]]) -> None:
    assert {each["scenario"] for each in seen} == set(NAMES)


def test_fifty_schedules_of_every_scenario_have_been_run() -> None:
    stored = json.loads((ROOT / "docs" / "ascend_races.json").read_text("utf-8"))
    assert stored["scenarios"] == NAMES, "run scripts/ascend_scenarios.py again"
    assert stored["clean"] == stored["schedules"] == 50


def test_nothing_else_in_the_back_end_orders_anything() -> None:
    ordering = {"record", "wait_event", "wait_stream", "synchronize", "query"}
    for path in (ROOT / "ms_ops" / "ascend").glob("*.py"):
        if path.name != "order.py":
            calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
            found = {call.attr for call in calls if isinstance(call, ast.Attribute)} & ordering
            assert not found, f"{path.name} calls {found}: it belongs into order.py, where it is taken out in turn"


def test_every_ordering_action_has_been_taken_out_and_was_missed() -> None:
    stored = json.loads((ROOT / "docs" / "ascend_mutations.json").read_text("utf-8"))
    order = ast.parse((ROOT / "ms_ops" / "ascend" / "order.py").read_text("utf-8"))
    actions = [node.name for node in order.body if isinstance(node, ast.FunctionDef)]
    assert [each["action"] for each in stored["actions"]] == actions, "run scripts/mutate_ascend.py again"
    assert [each["action"] for each in stored["actions"] if not each["caught_by"]] == []


def test_missing_waits_of_both_directions_are_caught(script: Any) -> None:
    done = script("mutate_ascend.py", "wait_until_ready", "wait_until_loaded")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 of 2 caught, 100%" in done.stdout
