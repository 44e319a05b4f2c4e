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
    @pytest.mark.parametrize("case", ["each tensor on its own", "small tensors together"])
    def test_no_call_of_a_step_waits_for_the_device(self, figures: dict[str, Any], case: str) -> None:
        found = figures["host"][case]
        assert found["tensors"] > 0
        assert {name: count for name, count in found["host_waits_beyond_plain"].items() if count} == {}

    @pytest.mark.parametrize(("case", "most"), [("each tensor on its own", 12), ("small tensors together", 8)])
    def test_a_tensor_costs_few_calls(self, figures: dict[str, Any], case: str, most: int) -> None:
        assert figures["host"][case]["acl_calls_per_tensor"] <= most
