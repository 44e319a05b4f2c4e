"""`RegionSpec` and what two of them on one cell mean."""

import copy
import itertools
from typing import Any

import pytest

from hyper_parallel import CheckpointPolicy, PolicyError
from hyper_parallel.core.activation_memory.spec import RegionSpec, stack

P = CheckpointPolicy


@pytest.mark.parametrize("bad", [2, "MUST_SAVE", True, None, [P.MUST_SAVE], P])
def test_what_is_no_policy_is_refused_with_value_type_and_choices(bad: Any) -> None:
    with pytest.raises(TypeError) as caught:
        RegionSpec(bad, source="here")
    message = str(caught.value)
    assert repr(bad) in message
    assert type(bad).__name__ in message
    assert "MUST_SWAP" in message
    assert "here" in message


@pytest.mark.parametrize("bad", [1, "yes", None])
def test_swap_inputs_is_a_bool(bad: Any) -> None:
    with pytest.raises(TypeError, match="swap_inputs must be a bool"):
        RegionSpec(P.MUST_RECOMPUTE, swap_inputs=bad)


@pytest.mark.parametrize("policy", [P.MUST_SAVE, P.PREFER_SAVE, P.MUST_SWAP])
def test_swap_inputs_without_a_replay_is_refused(policy: CheckpointPolicy) -> None:
    with pytest.raises(PolicyError, match=f"{policy.name}, which replays nothing"):
        RegionSpec(policy, swap_inputs=True)


def test_a_tensor_policy_is_callable() -> None:
    with pytest.raises(TypeError, match="policy_fn must be callable, but got 3"):
        RegionSpec(P.MUST_SWAP, tensor_policy=3)  # type: ignore[arg-type]


def test_a_deep_copy_of_a_spec_is_the_spec() -> None:
    spec = RegionSpec(P.MUST_RECOMPUTE, context_fn=lambda: (None, None))
    assert copy.deepcopy({"spec": spec})["spec"] is spec


@pytest.mark.parametrize("policy", P)
def test_an_equal_duplicate_changes_nothing(policy: CheckpointPolicy) -> None:
    old = RegionSpec(policy, source="first")
    assert stack(old, RegionSpec(policy, source="second"), "layers.0") is old


@pytest.mark.parametrize("replay", [P.MUST_RECOMPUTE, P.PREFER_RECOMPUTE])
@pytest.mark.parametrize("swap_first", [True, False])
def test_swap_and_recompute_swap_the_inputs_in_either_order(replay: CheckpointPolicy, swap_first: bool) -> None:
    pair = [RegionSpec(P.MUST_SWAP, source="one"), RegionSpec(replay, source="two")]
    old, new = pair if swap_first else pair[::-1]
    both = stack(old, new, "layers.0")
    assert (both.policy, both.swap_inputs) == (replay, True)
    assert both.source == f"{old.source} + {new.source}"
    assert str(both) == f"{replay.name} + swapped inputs"


def _may_be_stacked(old: CheckpointPolicy, new: CheckpointPolicy) -> bool:
    return old is new or (old.swaps and new.replays) or (old.replays and new.swaps)


CONTRADICTIONS = [pair for pair in itertools.product(P, P) if not _may_be_stacked(*pair)]


@pytest.mark.parametrize(("first", "second"), CONTRADICTIONS)
def test_every_other_pair_raises_and_names_both_and_the_cell(first: P, second: P) -> None:
    with pytest.raises(PolicyError) as caught:
        stack(RegionSpec(first, source="the decorator"), RegionSpec(second, source="rule 2"), "layers.0.mlp")
    assert all(
        text in str(caught.value) for text in (first.name, second.name, "the decorator", "rule 2", "layers.0.mlp")
    )


def test_two_recomputes_of_which_one_swaps_its_inputs_contradict() -> None:
    with pytest.raises(PolicyError, match="contradicts"):
        stack(RegionSpec(P.MUST_RECOMPUTE), RegionSpec(P.MUST_RECOMPUTE, swap_inputs=True), "x")


def test_two_context_functions_contradict() -> None:
    with pytest.raises(PolicyError, match="contradicts"):
        stack(
            RegionSpec(P.MUST_RECOMPUTE, context_fn=lambda: (None, None)),
            RegionSpec(P.MUST_RECOMPUTE, context_fn=lambda: (None, None)),
            "x",
        )


def test_early_stop_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match=r"early_stop must be a bool, but got 1 \(rule 2\)"):
        RegionSpec(P.MUST_RECOMPUTE, early_stop=1, source="rule 2")  # type: ignore[arg-type]


def test_an_unknown_determinism_check_names_the_two_there_are() -> None:
    with pytest.raises(PolicyError, match=r"must be one of operators, values, but got 'bits' \(rule 2\)"):
        RegionSpec(P.MUST_RECOMPUTE, determinism_check="bits", source="rule 2")


@pytest.mark.parametrize("policy", [policy for policy in P if not policy.replays])
def test_values_can_be_compared_only_where_something_is_replayed(policy: CheckpointPolicy) -> None:
    with pytest.raises(PolicyError, match=rf"the policy is {policy.name}, which replays nothing"):
        RegionSpec(policy, determinism_check="values")


@pytest.mark.parametrize("changed", [{"determinism_check": "values"}, {"early_stop": False}])
def test_two_recomputes_that_compare_or_stop_differently_contradict(changed: dict) -> None:
    with pytest.raises(PolicyError, match="contradicts"):
        stack(RegionSpec(P.MUST_RECOMPUTE), RegionSpec(P.MUST_RECOMPUTE, **changed), "x")


def test_comparing_values_is_shown() -> None:
    assert str(RegionSpec(P.MUST_RECOMPUTE, determinism_check="values")) == "MUST_RECOMPUTE + values compared"
