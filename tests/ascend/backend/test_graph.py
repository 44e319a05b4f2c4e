"""GRAPH_MODE on the emulated device: MindSpore's own recomputation and swapping, and the refusals that protect a user.

What MindSpore gets wrong is asserted, too: when it doesn't any more, a refusal in hyper_parallel/graph/swap.py can go.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("graphs on Ascend")  # one program serves them all

DEPTH, TENSOR = 4, 512 * 16 * 4
STEPS = 2


@pytest.fixture(scope="module")
def found(emulated: Any) -> dict[str, Any]:
    done = emulated(Path(__file__).with_name("graph_program.py"), seed=1, env={"ASCSIM_JITTER_US": 200})
    assert done.returncode == 0, done.stderr[-5000:]  # there are races: see below
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_recomputation_gives_the_plain_numbers_and_is_seen_in_the_graph(found: dict[str, Any]) -> None:
    recompute = found["recompute"]
    assert recompute["same"] and recompute["honoured"] and not recompute["races"]
    assert recompute["recomputed"] == {"MatMulExt": DEPTH, "Tanh": DEPTH, "Sigmoid": DEPTH}


def test_recomputation_lowers_the_peak(found: dict[str, Any]) -> None:
    assert found["plain"]["peak"] - found["recompute"]["peak"] >= (DEPTH - 1) * 2 * TENSOR


def test_swap_copies_what_backward_needs_and_gives_the_plain_numbers(found: dict[str, Any]) -> None:
    swap = found["swap"]
    assert swap["same"] and swap["honoured"] and not swap["races"]
    assert swap["d2h_async"] == swap["h2d_async"] == STEPS * DEPTH * 2, "the results of tanh and sigmoid"
    assert swap["d2h_async_bytes"] == swap["h2d_async_bytes"] == STEPS * DEPTH * 2 * TENSOR
    assert swap["moves"]["CPU"] == swap["moves"]["Ascend"] > 0


def test_mindspore_gives_no_memory_back_for_what_it_has_moved_and_the_plan_says_so(found: dict[str, Any]) -> None:
    assert found["swap"]["peak"] > found["plain, blocking"]["peak"]
    assert found["swap"]["notes"]


def test_mindspore_does_not_order_its_copies_unless_launches_wait(found: dict[str, Any]) -> None:
    assert found["by hand"]["d2h_async"] == STEPS * DEPTH * 2
    assert found["by hand"]["races"] > 0


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("no blocking", r"without mindspore.runtime.launch_blocking(), under which every launch is waited for"),
        ("planned memory", r"with mindspore.runtime.set_memory(optimize_level='O1') MindSpore copies to another place"),
        ("inlined early", "neither the cell's class nor one of a cell around it is under lazy_inline"),
        ("under jit", "MindSpore swaps only on Ascend, in GRAPH_MODE, in cells whose class is under lazy_inline"),
    ],
)
def test_where_swapping_would_go_wrong_it_is_refused(found: dict[str, Any], how: str, why: str) -> None:
    error = found["refused"][how]
    assert f"must_swap isn't honoured here: {why}" in error
    assert "use must_recompute" in error


def test_a_cell_that_cannot_be_swapped_takes_the_rung_of_the_file(found: dict[str, Any]) -> None:
    assert found["instead"]["scope"] == "recompute_blocks.0"
    assert any(
        "must_swap can't be honoured in this graph, so they recompute" in note for note in found["instead"]["notes"]
    )


def test_kernels_that_mindspore_makes_fail_by_name_on_the_emulator(found: dict[str, Any]) -> None:
    assert "rtKernelLaunch is not emulated: it runs a kernel that MindSpore has made" in found["missing"]["O1"]
