"""`scripts/check_ascend.py` runs on the emulated device, and says so; without a device it says what is missing."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.ascend.proof.conftest import SCRIPTS

pytestmark = pytest.mark.xdist_group("checks on Ascend")  # one program serves them all


@pytest.fixture(scope="module")
def found(script: Any) -> dict[str, Any]:
    done = script("check_ascend.py", "--size", "small", "--steps", 1, "--rounds", 5, "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_the_emulated_device_is_labelled(found: dict[str, Any]) -> None:
    assert found["emulated"] is True
    assert found["about"]["device"].endswith("(EMULATED)")


def test_every_kind_of_check_has_run_and_passed(found: dict[str, Any]) -> None:
    assert {row["check"] for row in found["rows"]} == {"exactness", "ordering", "peak memory", "overlap"}
    assert [row for row in found["rows"] if row["answer"] == "FAILED"] == []
    assert sum(row["answer"] == "ok" for row in found["rows"]) >= 10


def test_versions_and_settings_are_named(found: dict[str, Any]) -> None:
    assert {"mindspore", "CANN", "device", "python", "settings"} <= set(found["about"])


def test_without_a_device_it_says_what_is_needed() -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SCRIPTS.parent), "GLOG_v": "4"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "check_ascend.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no Ascend device can be used here" in done.stderr
    assert "bash scripts/ascend_emulator/run.sh python scripts/check_ascend.py" in done.stderr
    assert "Traceback" not in done.stderr
