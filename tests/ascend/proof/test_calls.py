"""What a step asks of the device: one stored sequence, and never a call that waits for the device."""

from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden_step.txt"


@pytest.mark.xdist_group("calls on Ascend")
def test_a_step_asks_for_the_stored_sequence(script: Any) -> None:
    done = script("ascend_calls.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == GOLDEN.read_text("utf-8"), "if this is meant: see the top of scripts/ascend_calls.py"


@pytest.mark.xdist_group("figures on Ascend")  # one program serves these and others
class TestCosts:
    def test_no_call_of_a_step_waits_for_the_device(self, figures: dict[str, Any]) -> None:
        assert figures["host"]["tensors"] > 0
        assert {name: count for name, count in figures["host"]["host_waits_beyond_plain"].items() if count} == {}

    def test_a_tensor_costs_few_calls(self, figures: dict[str, Any]) -> None:
        assert figures["host"]["acl_calls_per_tensor"] <= 8
