"""`activation_policy` on a class: every instance, past and future, and subclasses."""

import inspect
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, PolicyError, activation_policy
from hyper_parallel.core.activation_memory.attach import attach, restore
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from tests.helpers import numbers

P = CheckpointPolicy


def fresh() -> type[nn.Cell]:
    """A class of its own for each test: a decorated class stays decorated."""

    class Tanh(nn.Cell):
        """Counts its calls."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def construct(self, x: Tensor, times: float = 1.0) -> Tensor:
            """Tanh, scaled."""
            self.calls += 1
            return ops.tanh(x) * times

    return Tanh


def calls_in_a_step(cell: nn.Cell) -> int:
    before = cell.calls
    x = numbers(2, 4)
    got = ms.grad(lambda x: ops.sin(cell(x)))(x).asnumpy()
    y = np.tanh(x.asnumpy())
    np.testing.assert_allclose(got, np.cos(y) * (1 - y * y), rtol=1e-5, atol=1e-6)
    return cell.calls - before


@pytest.mark.parametrize("policy", [2, "MUST_RECOMPUTE", True, None])
def test_what_is_no_policy_is_refused_before_it_meets_a_target(policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be a CheckpointPolicy"):
        activation_policy(policy)


def test_swap_inputs_without_a_replay_is_refused() -> None:
    with pytest.raises(PolicyError, match="replays nothing"):
        activation_policy(P.MUST_SAVE, swap_inputs=True)


def test_a_decorated_class_is_the_same_class() -> None:
    cls = fresh()
    signature = inspect.signature(cls.construct)
    assert activation_policy(P.MUST_RECOMPUTE)(cls) is cls
    assert inspect.signature(cls.construct) == signature
    assert cls.construct.__doc__ == "Tanh, scaled."


def test_instances_made_before_and_after_are_under_the_policy() -> None:
    cls = fresh()
    early = cls()
    activation_policy(P.MUST_RECOMPUTE)(cls)
    assert [calls_in_a_step(cell) for cell in (early, cls())] == [2, 2]


def test_unwrap_cell_of_an_instance_is_the_instance() -> None:
    cell = activation_policy(P.MUST_RECOMPUTE)(fresh())()
    assert cell.unwrap_cell is cell


def test_a_subclass_without_a_construct_inherits() -> None:
    cls = activation_policy(P.MUST_RECOMPUTE)(fresh())
    sub = type("Sub", (cls,), {})
    assert spec_of(sub()) == RegionSpec(P.MUST_RECOMPUTE)
    assert calls_in_a_step(sub()) == 2


def test_a_later_subclass_with_a_construct_of_its_own_inherits() -> None:
    cls = activation_policy(P.MUST_RECOMPUTE)(fresh())

    class Sub(cls):  # type: ignore[misc, valid-type]
        def construct(self, x: Tensor) -> Tensor:
            self.calls += 1
            return ops.tanh(x)

    assert calls_in_a_step(Sub()) == 2


def test_an_earlier_subclass_with_a_construct_of_its_own_inherits() -> None:
    cls = fresh()

    class Sub(cls):  # type: ignore[misc, valid-type]
        def construct(self, x: Tensor) -> Tensor:
            self.calls += 1
            return ops.tanh(x)

    cell = Sub()
    activation_policy(P.MUST_RECOMPUTE)(cls)
    assert calls_in_a_step(cell) == 2


def test_super_construct_is_part_of_the_subclass_region() -> None:
    cls = activation_policy(P.MUST_RECOMPUTE)(fresh())

    class Sub(cls):  # type: ignore[misc, valid-type]
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x) * 1.0

    assert calls_in_a_step(Sub()) == 2


def test_a_class_that_only_inherits_its_construct_leaves_its_base_plain() -> None:
    base = fresh()
    sub = type("Sub", (base,), {})
    activation_policy(P.MUST_RECOMPUTE)(sub)
    assert calls_in_a_step(sub()) == 2
    assert calls_in_a_step(base()) == 1
    assert spec_of(base()) is None


def test_an_init_subclass_of_the_class_still_runs() -> None:
    seen: list[str] = []

    class Registered(nn.Cell):
        def __init_subclass__(cls, tag: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(tag)

        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x)

    activation_policy(P.MUST_SAVE)(Registered)

    class Sub(Registered, tag="sub"):
        pass

    assert seen == ["sub"]
    assert spec_of(Sub()) == RegionSpec(P.MUST_SAVE)


def test_decorating_a_class_twice_with_the_same_changes_nothing() -> None:
    cls = fresh()
    for _ in range(2):
        activation_policy(P.MUST_RECOMPUTE)(cls)
    assert calls_in_a_step(cls()) == 2


def test_decorating_a_class_and_its_subclass_makes_one_region() -> None:
    cls = activation_policy(P.MUST_RECOMPUTE)(fresh())

    class Sub(cls):  # type: ignore[misc, valid-type]
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x) * 1.0

    activation_policy(P.MUST_RECOMPUTE)(Sub)
    assert calls_in_a_step(Sub()) == 2


def test_swap_and_recompute_on_a_class_swap_the_inputs() -> None:
    cls = fresh()
    for policy in (P.MUST_SWAP, P.MUST_RECOMPUTE):
        activation_policy(policy)(cls)
    spec = spec_of(cls())
    assert spec is not None
    assert (spec.policy, spec.swap_inputs) == (P.MUST_RECOMPUTE, True)
    assert calls_in_a_step(cls()) == 2


def test_a_contradiction_on_a_class_names_the_class() -> None:
    cls = activation_policy(P.MUST_SAVE)(fresh())
    with pytest.raises(PolicyError, match="class Tanh carries MUST_SAVE"):
        activation_policy(P.MUST_SWAP)(cls)


def test_an_instance_and_its_class_may_not_contradict() -> None:
    cls = activation_policy(P.MUST_SAVE)(fresh())
    with pytest.raises(PolicyError, match="contradicts"):
        activation_policy(P.MUST_SWAP)(cls())


def test_a_policy_on_an_instance_is_taken_off_down_to_that_of_its_class() -> None:
    cls = activation_policy(P.MUST_SWAP)(fresh())
    cell = cls()
    previous = attach(cell, RegionSpec(P.MUST_RECOMPUTE))
    assert calls_in_a_step(cell) == 2
    restore(cell, previous)
    assert spec_of(cell) == RegionSpec(P.MUST_SWAP)
    assert type(cell) is cls
    assert calls_in_a_step(cell) == 1


def test_an_instance_under_a_policy_whose_class_is_decorated_later_is_one_region() -> None:
    cls = fresh()
    cell = activation_policy(P.MUST_RECOMPUTE)(cls())
    activation_policy(P.MUST_RECOMPUTE)(cls)
    assert calls_in_a_step(cell) == 2
