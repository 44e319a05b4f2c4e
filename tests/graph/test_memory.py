"""The peak of a compiled net drops as its plan predicts, in fresh processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_graph.py"


def measured(policy: str, style: str, folder: Path) -> dict[str, float]:
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--one", policy, style], cwd=folder, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_full_recomputation_takes_at_most_two_fifths_of_plain(tmp_path: Path) -> None:
    plain, full = (measured(policy, "TrainOneStepCell O0", tmp_path) for policy in ("plain", "full"))
    assert full["loss"] == plain["loss"]
    assert full["mb"] <= 0.4 * plain["mb"]
