"""Training on the emulated device with what is swapped on its way: same numbers, no race, no host synchronisation."""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("steps on Ascend")  # one program serves them all

PROGRAM = Path(__file__).with_name("steps_program.py")


@pytest.fixture(scope="module")
def run(emulated: Any) -> Any:
    return emulated(PROGRAM, seed=1, env={"ASCSIM_JITTER_US": 200}, trace=True, timeout=280)


@pytest.fixture(scope="module")
def found(run: Any) -> dict[str, Any]:
    return run.json()


@pytest.mark.parametrize(
    "way",
    [
        "swap",
        "recompute",
        "recompute, swapped inputs",
        "recompute, swapped operators",
        "fused",
        "default limits",
        "verified",
        "file",
        "file, verified",
        "by hand",
        "second order",
        "broken forward",
        "broken backward",
    ],
)
def test_numbers_are_those_of_the_plain_net_and_nothing_stays(found: dict[str, Any], way: str) -> None:
    assert found[way]["same"] is True
    assert found[way].get("live", 0) == 0


def test_what_is_swapped_leaves_and_comes_back(found: dict[str, Any]) -> None:
    assert found["swap"]["offloaded"] == found["swap"]["loaded"] > 0


def test_a_step_asks_for_no_host_synchronisation(run: Any, found: dict[str, Any]) -> None:
    waits = [call["name"] for call in run.trace if call["mark"] == "step 4" and "Synchronize" in call["name"]]
    copies = [call for call in run.trace if call["mark"] == "step 4" and call["name"].startswith("aclrtMemcpyAsync")]
    assert copies
    assert waits == []


def test_a_step_copies_nothing_but_pinned_memory(run: Any, found: dict[str, Any]) -> None:
    step = [call["name"] for call in run.trace if call["mark"] == "step 4"]
    assert "aclrtMemcpy" not in step
    assert not [call for call in run.trace if call["mark"] == "step 4" and "pageable" in call["kind"]]


def test_after_a_first_step_nothing_is_pinned_made_or_kept(found: dict[str, Any]) -> None:
    levels = found["steady"]["levels"]
    assert levels[2] == levels[3] == levels[4]


def test_limits_are_kept(found: dict[str, Any]) -> None:
    tensor = 64 * 32 * 4 * 4
    assert found["limits"]["pending"] <= 64 * 2**10 + tensor
    assert found["limits"]["window"] <= 48 * 2**10 + tensor


def test_the_host_never_waits(found: dict[str, Any]) -> None:
    assert found["limits"]["waits"] == 0


def test_a_budget_below_one_tensor_is_refused_by_name(found: dict[str, Any]) -> None:
    error = found["budget below one tensor"]["error"]
    assert error.startswith("HostMemoryError: ")
    assert "host_budget is 4096 bytes" in error


def test_a_budget_beyond_the_machine_is_refused_by_name(found: dict[str, Any]) -> None:
    error = found["more than the machine has"]["error"]
    assert error.startswith("HostMemoryError: host_budget is 1125899906842624 bytes of pinned memory, but this machine")


@pytest.mark.parametrize("ladder", ["ladder keep", "ladder recompute"])
def test_an_exhausted_budget_is_followed_by_the_ladder(found: dict[str, Any], ladder: str) -> None:
    assert found[ladder]["same"] is True
    assert found[ladder]["counted"] > 0
    assert 0 < found[ladder]["peak"] <= 160 * 2**10


def test_a_call_out_of_turn_raises(found: dict[str, Any]) -> None:
    assert found["by hand"]["twice"].startswith("SwapStateError: launch_load('group 0')")


def test_what_a_user_moves_by_hand_goes_and_comes(found: dict[str, Any]) -> None:
    assert found["by hand"]["offloaded"] == found["by hand"]["loaded"] > 0


def test_a_forward_without_backward_leaves_nothing(found: dict[str, Any]) -> None:
    assert found["no backward"]["before"] > 0
    assert found["no backward"]["live"] == 0


def test_statistics_let_go_of_nothing_on_a_thread_that_does_not_train(found: dict[str, Any]) -> None:
    assert found["no backward"]["watched"] == found["no backward"]["before"]


def test_threads_and_their_streams_do_not_meet(found: dict[str, Any]) -> None:
    assert found["two threads"] == {"same": [True, True], "live": 0}


def test_spans_of_a_trace_do_not_overlap(found: dict[str, Any]) -> None:
    assert {"compute", "load", "offload"} <= set(found["trace"]["tracks"])
    assert found["trace"]["overlaps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", {"ci": [2], "full": [2, 3, 4, 5]}[os.environ.get("HYPOTHESIS_PROFILE", "ci")])
def test_other_schedules_give_the_same(emulated: Any, seed: int) -> None:
    found = emulated(PROGRAM, seed=seed, env={"ASCSIM_JITTER_US": 500}, timeout=280).json()
    assert all(part.get("same", True) in (True, [True, True]) for part in found.values())
