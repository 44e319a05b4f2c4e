"""``hyper-parallel dryrun`` over the emulated device: peaks, and what it says that it can't know."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.commands import command

pytestmark = pytest.mark.xdist_group("dry run")  # one program serves them all

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "dryrun"
POLICIES = ROOT / "examples" / "policies"


@pytest.fixture(scope="module")
def found(emulator_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    counters = tmp_path_factory.mktemp("dry") / "counters.json"
    policies = ["recompute_all_blocks", "swap_all_blocks"]
    options = [part for name in policies for part in ("--policy", str(POLICIES / f"{name}.yaml"))]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator_environment.items():
            patch.setenv(name, value)
        patch.setenv("ASCSIM_COUNTERS_FILE", str(counters))
        patch.chdir(EXAMPLE)
        done = CliRunner().invoke(command, ["dryrun", "--model", "large_transformer:long", *options, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout) | {"operators": json.loads(counters.read_text())["operators"]}


def row(found: dict[str, Any], mode: str) -> dict[str, Any]:
    (one,) = (row for row in found["rows"] if row["mode"] == mode)
    return one


def test_recomputing_lowers_the_peak_by_what_blocks_no_longer_keep(found: dict[str, Any]) -> None:
    plain, recompute = row(found, "plain"), row(found, "recompute_all_blocks")
    assert recompute["peak_bytes"] < plain["peak_bytes"]
    assert abs(recompute["standing_bytes"] - plain["standing_bytes"]) <= 4096, "but for a scalar or two"
    assert not recompute["is_limit"]


def test_what_no_ordinary_machine_holds_is_counted_all_the_same(found: dict[str, Any]) -> None:
    weights = 2 * 4 * 12 * 1024**2  # 2 blocks of about 12 width**2 weights in float32
    scores = 2 * 4 * 8 * 32768**2  # of 8 heads in each block
    plain = row(found, "plain")
    assert plain["standing_bytes"] >= 3 * weights, "weights and two moments of AdamW"
    assert plain["gradient_bytes"] >= weights
    assert plain["reserved_bytes"] >= plain["peak_bytes"] >= 4 * weights + 2 * scores


def test_what_a_policy_swaps_counts_as_kept_and_the_row_says_so(found: dict[str, Any]) -> None:
    swap = row(found, "swap_all_blocks")
    assert swap["is_limit"]
    assert swap["swapped_bytes"] > 0
    assert swap["peak_bytes"] == pytest.approx(row(found, "plain")["peak_bytes"], rel=0.01)
    assert any("swapping" in each for each in found["cannot_know"])


def test_nothing_is_computed(found: dict[str, Any]) -> None:
    assert found["operators"] == 0


def test_figures_over_the_emulator_are_labelled(found: dict[str, Any]) -> None:
    assert found["emulated"] is True
