"""`scripts/ascend_bandwidth.py`: the table follows from the formulas that it states."""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("bandwidth")  # one program serves them all

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ascend_bandwidth.py"
LAYER = ("--width", 1000, "--heads", 10, "--tokens", 100, "--batch", 2, "--layers", 3)
MACHINE = ("--tflops", 100, "--utilisation", 0.5)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("ascend_bandwidth", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ascend_bandwidth"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(script: Any) -> Any:
    def run(*arguments: object) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            script.main(list(map(str, arguments)))
        return out.getvalue()

    return run


@pytest.fixture(scope="module")
def policies(run: Any) -> Any:
    def policies(*arguments: object) -> dict[str, dict[str, Any]]:
        return {row["policy"]: row for row in json.loads(run(*LAYER, *MACHINE, *arguments, "--json"))["policies"]}

    return policies


def test_bytes_of_a_layer_are_those_of_the_formula(policies: Any) -> None:
    found = policies()
    assert found["swap"]["bytes_per_layer"] == 34 * 100 * 2 * 1000
    assert found["recompute + swapped inputs"]["bytes_per_layer"] == 2 * 100 * 2 * 1000
    assert found["recompute"]["bytes_per_step"] == 0
    assert found["swap"]["bytes_per_step"] == 2 * 3 * found["swap"]["bytes_per_layer"]


def test_attention_that_is_not_fused_keeps_its_scores(policies: Any) -> None:
    more = policies("--unfused-attention")["swap"]["bytes_per_layer"] - policies()["swap"]["bytes_per_layer"]
    assert more == 5 * 10 * 100 * 100 * 2


def test_time_is_operations_by_what_the_device_reaches(policies: Any) -> None:
    flop = 24 * 2 * 100 * 1000**2 + 4 * 2 * 100**2 * 1000
    found = policies()["swap"]
    assert found["forward_ms"] == pytest.approx(flop / 50e12 * 1e3)
    assert found["backward_ms"] == pytest.approx(2 * found["forward_ms"])
    assert policies()["recompute"]["backward_ms"] == pytest.approx(3 * found["forward_ms"])


def test_ranks_of_one_host_share_its_memory(policies: Any) -> None:
    one = policies("--ranks", 1, "--link-gbps", 50, "--host-gbps", 100)["swap"]
    eight = policies("--ranks", 8, "--link-gbps", 50, "--host-gbps", 100)["swap"]
    assert eight["host_gbps"] == pytest.approx(8 * one["host_gbps"])
    assert eight["added"] > one["added"]


def test_copies_that_fit_under_computation_add_nothing(policies: Any) -> None:
    need = policies()["swap"]["to_host_gbps"]
    fits = policies("--ranks", 1, "--link-gbps", need, "--host-gbps", 10 * need)["swap"]
    half = policies("--ranks", 1, "--link-gbps", need / 2, "--host-gbps", 10 * need)["swap"]
    assert fits["added"] == pytest.approx(0)
    assert half["added"] == pytest.approx(1 / 3), "a forward more, of the three that a step takes"


def test_a_quantity_that_is_none_is_refused(run: Any) -> None:
    with pytest.raises(SystemExit, match="--ranks must be positive, but is 0"):
        run("--ranks", 0)


def test_the_table_is_labelled_as_computed(run: Any) -> None:
    assert "computed:" in run(*LAYER)
