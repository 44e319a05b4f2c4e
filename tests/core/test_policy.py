"""`CheckpointPolicy`, and the family of errors."""

import pytest

import hyper_parallel
from hyper_parallel import (
    ActivationMemoryError,
    CheckpointPolicy,
    HostMemoryError,
    PolicyError,
    ReplayMismatchError,
    SwapStateError,
)


def test_names_and_values_are_the_five_that_users_know() -> None:
    assert {policy.name: policy.value for policy in CheckpointPolicy} == {
        "MUST_SAVE": 0,
        "PREFER_SAVE": 1,
        "MUST_RECOMPUTE": 2,
        "PREFER_RECOMPUTE": 3,
        "MUST_SWAP": 4,
    }


def test_a_policy_is_found_by_value_and_by_name() -> None:
    assert CheckpointPolicy(4) is CheckpointPolicy["MUST_SWAP"]


def test_exactly_one_predicate_holds_for_every_policy() -> None:
    says = {policy.name: (policy.saves, policy.replays, policy.swaps) for policy in CheckpointPolicy}
    assert says == {
        "MUST_SAVE": (True, False, False),
        "PREFER_SAVE": (True, False, False),
        "MUST_RECOMPUTE": (False, True, False),
        "PREFER_RECOMPUTE": (False, True, False),
        "MUST_SWAP": (False, False, True),
    }


def test_the_docstring_names_every_policy_and_the_swap_manager() -> None:
    text = CheckpointPolicy.__doc__ or ""
    assert all(name in text for name in [*CheckpointPolicy.__members__, "SwapManager"])


@pytest.mark.parametrize("error", [PolicyError, ReplayMismatchError, SwapStateError, HostMemoryError])
def test_one_except_clause_catches_every_error_of_ours(error: type[Exception]) -> None:
    assert issubclass(error, ActivationMemoryError)
    with pytest.raises(ActivationMemoryError):
        raise error("what")


def test_a_bad_policy_is_a_value_error_too() -> None:
    assert issubclass(PolicyError, ValueError)


@pytest.mark.parametrize("error", [ReplayMismatchError, SwapStateError, HostMemoryError])
def test_what_happens_in_a_step_is_no_mistake_in_an_argument(error: type[Exception]) -> None:
    assert not issubclass(error, (ValueError, TypeError))


def test_every_public_name_exists() -> None:
    assert [name for name in hyper_parallel.__all__ if not hasattr(hyper_parallel, name)] == []
