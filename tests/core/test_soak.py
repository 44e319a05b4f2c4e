"""`scripts/soak.py` runs, finds nothing wrong, and writes its figures."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import SwapManager

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_with_every_event_are_right_and_written_down(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "soak.json"
    every = list(soak.EVENTS)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--steps", str(len(every)), "--write", str(file)])
    monkeypatch.setattr("random.Random.choices", lambda self, names, weights: [every.pop()])
    monkeypatch.setattr(soak.gc, "collect", lambda: 0)  # of the whole test session: slow
    assert soak.main() == 0
    written = json.loads(file.read_text())
    assert (written["steps"], written["wrong"]) == (len(soak.EVENTS), [])
    assert set(written["beside"]) == set(soak.EVENTS)
    assert written["offloaded_bytes"] > 0 and written["figures"][0]["resident_kib"] > 0
    SwapManager().configure()


def test_a_gradient_that_differs_is_reported(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    SwapManager().configure(min_bytes=0)
    run = soak.Soak(0)
    run.steps[1] = lambda x: run.steps[0](x * 2)
    monkeypatch.setattr("random.Random.choices", lambda self, names, weights: ["nothing"])
    run.step(1)
    assert run.wrong == ["step 1, after nothing: the gradients differ from plain's"]


def test_the_figures_in_the_docs_are_of_a_run_without_a_fault() -> None:
    written = json.loads((SCRIPT.parents[1] / "docs" / "soak.json").read_text())
    assert written["wrong"] == []
    assert len({row["open_files"] for row in written["figures"]}) == 1
    assert len({row["allocated_bytes"] for row in written["figures"]}) == 1
