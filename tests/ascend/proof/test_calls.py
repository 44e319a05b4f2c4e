"""What a step asks of the device: one stored sequence, and never a call that waits for the device."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("calls on Ascend")  # one program serves them all

GOLDEN = Path(__file__).parent / "golden_step.txt"


def test_a_step_asks_for_the_stored_sequence(script: Any) -> None:
    done = script("ascend_calls.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == GOLDEN.read_text("utf-8"), "if this is meant: see the top of scripts/ascend_calls.py"


@pytest.fixture(scope="module")
def host(script: Any) -> dict[str, Any]:
    done = script("bench_ascend.py", "--part", "host", "--rounds", 1, ASCSIM_RACES="off")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    return json.loads(line.removeprefix("found: "))


def test_no_call_of_a_step_waits_for_the_device(host: dict[str, Any]) -> None:
    assert host["tensors"] > 0
    assert {name: count for name, count in host["host_waits_beyond_plain"].items() if count} == {}


def test_a_tensor_costs_few_calls(host: dict[str, Any]) -> None:
    assert host["acl_calls_per_tensor"] <= 8
