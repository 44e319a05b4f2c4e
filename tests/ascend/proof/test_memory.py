"""What swapping does to MindSpore's own figures of memory, and what it makes possible."""

from typing import Any

import pytest

from tests.ascend.proof.conftest import FIGURES

pytestmark = pytest.mark.xdist_group("figures on Ascend")  # one program serves them all


@pytest.mark.parametrize("case", ["each tensor on its own", "small tensors together"])
def test_the_peak_under_swap_is_that_of_recomputing(figures: dict[str, Any], case: str) -> None:
    assert figures["peaks"]["cases"][case]["swap_by_native"] <= 1.05


@pytest.mark.parametrize("case", ["each tensor on its own", "small tensors together"])
def test_the_peak_drops_by_what_was_predicted_and_little_more(figures: dict[str, Any], case: str) -> None:
    assert 0.99 <= figures["peaks"]["cases"][case]["drop_by_predicted"] <= 1.1


def test_what_is_out_of_device_memory_in_plain_trains_under_swap(emulated: Any, figures: dict[str, Any]) -> None:
    plain = emulated(FIGURES, "plain", env={"ASCSIM_HBM_MB": 80}).json()
    swap = figures["swap in little memory"]
    assert plain["error"] == "RuntimeError"
    assert "alloc" in plain["says"].lower()
    assert swap["live"] == 0
    assert len(swap["losses"]) == 2


def test_an_exhausted_pinned_pool_takes_the_ladder(figures: dict[str, Any]) -> None:
    rung = figures["ladder"]
    assert rung["recomputed"] > 0
    assert rung["host_peak"] <= 512 * 1024
    assert rung["losses"] == figures["plain"]["losses"]


def test_an_exhausted_pinned_pool_without_a_ladder_is_an_error(figures: dict[str, Any]) -> None:
    assert figures["no ladder"]["error"] == "HostMemoryError"
    assert "host_budget" in figures["no ladder"]["says"]
