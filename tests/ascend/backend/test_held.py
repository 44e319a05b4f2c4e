"""Device memory by policy, by MindSpore's own figures, to the byte."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("held on Ascend")  # one program serves them all

ROW = 64 * 32 * 4
"""Bytes of a block's input, and of its output."""
WIDE = 4 * ROW
"""Bytes of what lies between its two matrix products."""
BESIDE = 512
"""Bytes that MindSpore's pool takes for a tensor, beyond its own."""


@pytest.fixture(scope="module")
def found(emulated: Any) -> dict[str, Any]:
    return emulated(Path(__file__).with_name("held_program.py"), timeout=280).json()


@pytest.mark.parametrize(
    ("policy", "tensors"),
    [
        ("plain", [ROW, WIDE, WIDE]),
        ("must_save", [ROW, WIDE, WIDE]),
        ("prefer_save", [ROW, WIDE, WIDE]),
        ("must_recompute", [ROW]),
        ("prefer_recompute", [ROW]),
        ("must_swap", []),
        ("full", [ROW]),
        ("selective", [ROW, WIDE, ROW]),
        ("every_other_matmul", [ROW, WIDE]),
        ("attention_only", [ROW, WIDE, WIDE, ROW]),
        ("inputs_on_host", []),
    ],
)
def test_a_block_holds_what_its_policy_or_preset_says(found: dict[str, Any], policy: str, tensors: list[int]) -> None:
    """Its input, results of its first product and of the activation, the result of its second product."""
    assert found["held"][policy] == sum(tensors) + BESIDE * len(tensors)


@pytest.mark.parametrize("policy", ["must_save", "prefer_save", "nothing large enough"])
def test_a_policy_that_keeps_everything_holds_what_plain_does(found: dict[str, Any], policy: str) -> None:
    kept, plain = found[policy], found["plain"]
    assert (kept["held"], kept["left"], kept["on host"]) == (plain["held"], 0, 0)


def test_what_is_on_host_is_gone_from_the_device_to_the_byte(found: dict[str, Any]) -> None:
    """All that five blocks save, but for the net's own input, and the last block, after which nothing comes."""
    swap = found["must_swap"]
    assert swap["on host"] == 4 * (ROW + 2 * WIDE) - ROW
    assert swap["held"] == found["plain"]["held"] - swap["on host"] - BESIDE * (4 * 3 - 1)
    assert swap["left"] == 0


def test_the_peak_never_grows_with_the_budget(found: dict[str, Any]) -> None:
    peaks = found["peaks by budget"]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_what_a_function_saves_comes_back_to_where_it_was(found: dict[str, Any]) -> None:
    places = found["places"]
    assert places["swap"] == places["plain"]
    assert {about[0] for about in places["swap"][0]} > {"CPU"}
    assert places["offloaded"] > 0
