"""Applying a plan to a net, and removing it."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import (
    CheckpointPolicy,
    HostMemoryError,
    PolicyError,
    SwapManager,
    SwapStateError,
    activation_policy,
    apply_policy,
    checkpoint_wrapper,
    load_policy,
)
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from hyper_parallel.policy_file import applying

MUST_RECOMPUTE, MUST_SWAP = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SWAP

BLOCKS = {"version": 1, "rules": [{"cells": "layers.*", "policy": "must_recompute"}]}
HEAD = {"version": 1, "rules": [{"cells": "head", "policy": "must_recompute"}]}


def carried(net: nn.Cell) -> dict[str, RegionSpec]:
    return {path: spec for path, cell in net.cells_and_names() if (spec := spec_of(cell)) is not None}


def gradients(net: nn.Cell, x: Tensor) -> list[np.ndarray]:
    _, grads = ms.value_and_grad(net, None, net.trainable_params())(x)
    return [grad.asnumpy() for grad in grads]


@pytest.fixture
def x() -> Tensor:
    return Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))


class TestApply:
    def test_the_cells_carry_what_the_rules_say(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS)
        specs = carried(gpt)
        assert list(specs) == ["layers.0", "layers.1", "layers.2", "layers.3"]
        assert {spec.policy for spec in specs.values()} == {MUST_RECOMPUTE}

    def test_a_spec_knows_its_rule_and_its_path(self, gpt: nn.Cell, write: Callable[[str], Path]) -> None:
        apply_policy(gpt, write("version: 1\nrules: [{cells: head, policy: must_swap}]\n"))
        spec = carried(gpt)["head"]
        assert (spec.source, spec.path) == ("policy.yaml: rule 1", "head")

    def test_the_default_is_attached_with_its_source(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, {"version": 1, "default": "must_recompute"})
        assert carried(gpt)["layers.2"].source == "dict: default"

    def test_a_saving_default_attaches_nothing(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, {"version": 1, "default": "must_save"})
        assert carried(gpt) == {}

    def test_a_saving_rule_is_attached(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, {"version": 1, "rules": [{"cells": "head", "policy": "prefer_save"}]})
        assert carried(gpt)["head"].policy is CheckpointPolicy.PREFER_SAVE

    def test_the_source_is_kept(self, gpt: nn.Cell, write: Callable[[str], Path]) -> None:
        path = write("version: 1\n")
        assert apply_policy(gpt, path).source == str(path)

    def test_what_a_file_cannot_say_stays_with_a_cell_that_agrees(self, gpt: nn.Cell) -> None:
        def contexts() -> tuple[Any, Any]:
            return nullcontext(), nullcontext()

        checkpoint_wrapper(gpt.head, context_fn=contexts)
        apply_policy(gpt, HEAD)
        assert carried(gpt)["head"].context_fn is contexts

    def test_gradients_are_those_of_the_plain_net(self, gpt: nn.Cell, x: Tensor) -> None:
        expected = gradients(gpt, x)
        apply_policy(gpt, BLOCKS)
        for found, plain in zip(gradients(gpt, x), expected, strict=True):
            np.testing.assert_array_equal(found, plain)

    @pytest.mark.parametrize("net", [None, "net", lambda x: x])
    def test_what_is_no_cell_is_a_type_error(self, net: Any) -> None:
        with pytest.raises(TypeError, match=f"to a mindspore.nn.Cell, but got {type(net).__name__}"):
            apply_policy(net, BLOCKS)

    def test_a_class_is_a_type_error_that_asks_for_an_instance(self) -> None:
        with pytest.raises(TypeError, match="got the class Dense; make an instance"):
            apply_policy(nn.Dense, BLOCKS)

    def test_resolving_for_what_is_no_cell_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="but got int"):
            load_policy(BLOCKS).resolve(3)

    def test_a_source_of_another_type_is_a_type_error(self, gpt: nn.Cell) -> None:
        with pytest.raises(TypeError, match="a path or a dict, but got list"):
            apply_policy(gpt, ["layers"])

    def test_resolving_attaches_nothing(self, gpt: nn.Cell) -> None:
        load_policy(BLOCKS).resolve(gpt)
        assert carried(gpt) == {}

    def test_a_shared_cell_is_attached_once(self) -> None:
        cell = nn.Dense(2, 2)
        net = nn.SequentialCell([cell, nn.SequentialCell(cell)])
        plan = apply_policy(net, {"version": 1, "rules": [{"cells": "0", "policy": "must_save"}]})
        plan.remove()
        assert carried(net) == {}


class TestNothingIsHalfApplied:
    def test_an_error_in_a_file_leaves_the_net_alone(self, gpt: nn.Cell) -> None:
        rules = [{"cells": "head", "policy": "must_swap"}, {"cells": "x", "policy": "must_swap"}]
        with pytest.raises(PolicyError):
            apply_policy(gpt, {"version": 1, "rules": rules})
        assert carried(gpt) == {}

    def test_a_failure_while_attaching_restores_what_was_attached(
        self, gpt: nn.Cell, swap_manager: SwapManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attach = applying.attach

        def failing(cell: nn.Cell, spec: RegionSpec, must_agree: bool = False) -> RegionSpec | None:
            if spec.path == "layers.2":
                raise PolicyError("refused")
            return attach(cell, spec, must_agree=must_agree)

        monkeypatch.setattr(applying, "attach", failing)
        with pytest.raises(PolicyError, match="refused"):
            apply_policy(gpt, BLOCKS | {"swap": {"window": "48MiB"}})
        assert carried(gpt) == {}
        swap_manager.configure(window="16MiB")

    def test_after_a_failure_another_plan_can_be_applied(self, gpt: nn.Cell) -> None:
        with pytest.raises(PolicyError):
            apply_policy(gpt, {"version": 1, "rules": [{"cells": "x", "policy": "must_swap"}]})
        assert apply_policy(gpt, BLOCKS).applied

    def test_swap_settings_that_contradict_configure_leave_the_net_alone(
        self, gpt: nn.Cell, swap_manager: SwapManager
    ) -> None:
        swap_manager.configure(tier="host")
        with pytest.raises(PolicyError, match="tier"):
            apply_policy(gpt, BLOCKS | {"swap": {"tier": "file"}})
        assert carried(gpt) == {}

    def test_a_spill_folder_that_is_missing_leaves_the_net_alone(self, gpt: nn.Cell, tmp_path: Path) -> None:
        with pytest.raises(HostMemoryError, match="missing"):
            apply_policy(gpt, BLOCKS | {"swap": {"folder": str(tmp_path / "missing")}})
        assert carried(gpt) == {}


class TestRemove:
    def test_the_cells_carry_nothing_again(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, BLOCKS)
        plan.remove()
        assert carried(gpt) == {}
        assert not plan.applied

    def test_a_decorator_stays(self, gpt: nn.Cell) -> None:
        activation_policy(MUST_RECOMPUTE)(gpt.head)
        apply_policy(gpt, HEAD).remove()
        assert carried(gpt)["head"].source == "decorator"

    def test_gradients_are_those_of_the_plain_net(self, gpt: nn.Cell, x: Tensor) -> None:
        expected = gradients(gpt, x)
        apply_policy(gpt, BLOCKS).remove()
        for found, plain in zip(gradients(gpt, x), expected, strict=True):
            np.testing.assert_array_equal(found, plain)

    def test_the_swap_settings_are_undone(self, gpt: nn.Cell, swap_manager: SwapManager) -> None:
        plan = apply_policy(gpt, HEAD | {"swap": {"window": "48MiB"}})
        with pytest.raises(PolicyError, match="window"):
            swap_manager.configure(window="16MiB")
        plan.remove()
        swap_manager.configure(window="16MiB")

    def test_swap_settings_that_refuse_leave_the_plan_applied(
        self, gpt: nn.Cell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refusing(given: dict[str, Any], source: str) -> Callable[[], None]:
            def undo() -> None:
                if refusals:
                    raise SwapStateError(refusals.pop())

            return undo

        refusals = ["12 bytes are swapped"]
        monkeypatch.setattr(SwapManager, "adopt", staticmethod(refusing))
        plan = apply_policy(gpt, HEAD | {"swap": {"window": "48MiB"}})
        with pytest.raises(SwapStateError, match="12 bytes"):
            plan.remove()
        assert plan.applied
        assert list(carried(gpt)) == ["head"]
        plan.remove()
        assert carried(gpt) == {}

    def test_removing_twice_is_an_error(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, BLOCKS)
        plan.remove()
        with pytest.raises(PolicyError, match="the plan from dict isn't applied"):
            plan.remove()

    def test_removing_a_plan_that_was_never_applied_is_an_error(self) -> None:
        with pytest.raises(PolicyError, match="isn't applied, so there is nothing to remove"):
            load_policy(BLOCKS).remove()


class TestOnePlanPerNet:
    def test_a_second_plan_is_an_error_that_names_the_first(self, gpt: nn.Cell, write: Callable[[str], Path]) -> None:
        path = write("version: 1\n")
        apply_policy(gpt, path)
        with pytest.raises(PolicyError) as caught:
            apply_policy(gpt, HEAD)
        assert str(caught.value) == f"Gpt is under the plan from {path} already; call remove() on that plan first"

    def test_the_same_plan_twice_is_an_error(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, HEAD)
        with pytest.raises(PolicyError, match=r"the plan from dict is applied to Gpt already; call its remove\(\)"):
            apply_policy(gpt, plan)

    def test_an_applied_plan_is_not_for_another_net(self, new_gpt: type[nn.Cell]) -> None:
        plan = apply_policy(new_gpt(), HEAD)
        with pytest.raises(PolicyError, match="applied to Gpt already"):
            apply_policy(new_gpt(), plan)

    def test_a_plan_for_a_part_is_found_from_the_whole(self, gpt: nn.Cell) -> None:
        apply_policy(gpt.layers[1], {"version": 1})
        with pytest.raises(PolicyError, match=r"layers\.1 in Gpt is under the plan from dict already"):
            apply_policy(gpt, HEAD)

    def test_a_plan_for_the_whole_is_found_from_a_cell_that_it_decided(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS)
        with pytest.raises(PolicyError, match="Block is under the plan from dict already"):
            apply_policy(gpt.layers[1], {"version": 1})

    def test_after_removal_another_plan_can_be_applied(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS).remove()
        assert list(carried(gpt)) == []
        apply_policy(gpt, HEAD)
        assert list(carried(gpt)) == ["head"]


class TestPlansAreReused:
    def test_a_loaded_plan_serves_several_nets(self, new_gpt: type[nn.Cell]) -> None:
        loaded, nets = load_policy(BLOCKS), [new_gpt(), new_gpt(2)]
        plans = [apply_policy(net, loaded) for net in nets]
        assert [len(plan.rows) for plan in plans] == [4, 2]
        assert not loaded.applied

    def test_a_removed_plan_can_be_applied_again(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, BLOCKS)
        plan.remove()
        assert apply_policy(gpt, plan) is plan
        assert plan.applied
        assert len(carried(gpt)) == 4

    def test_a_removed_plan_can_be_applied_to_another_net(self, gpt: nn.Cell, new_gpt: type[nn.Cell]) -> None:
        plan = apply_policy(gpt, BLOCKS)
        plan.remove()
        apply_policy(new_gpt(2), plan)
        assert len(plan.rows) == 2

    def test_repr_says_where_it_is_applied(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, HEAD)
        assert repr(plan) == "<PolicyPlan from dict, applied to Gpt>"
        plan.remove()
        assert repr(plan) == "<PolicyPlan from dict, not applied>"


class TestDeepcopy:
    def test_a_copy_is_under_the_same_policies(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS)
        assert list(carried(copy.deepcopy(gpt))) == list(carried(gpt))

    def test_a_copy_trains_its_own_weights(self, gpt: nn.Cell, x: Tensor) -> None:
        apply_policy(gpt, BLOCKS)
        copied = copy.deepcopy(gpt)
        for parameter in copied.get_parameters():
            parameter.set_data(parameter * 2)
        plain = copy.deepcopy(copied)
        expected = gradients(plain, x)
        assert any(grad.any() for grad in expected)
        for found, wanted in zip(gradients(copied, x), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)

    def test_a_copy_keeps_its_policies_when_the_plan_is_removed(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, BLOCKS)
        copied = copy.deepcopy(gpt)
        plan.remove()
        assert carried(gpt) == {}
        assert len(carried(copied)) == 4

    def test_a_copy_may_get_the_same_plan(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS)
        plan = apply_policy(copy.deepcopy(gpt), BLOCKS)
        assert plan.rows[0].why == "rule 1, dict: rule 1"

    def test_a_copy_does_not_keep_the_original_alive(self, gpt: nn.Cell, new_gpt: type[nn.Cell]) -> None:
        net = new_gpt(1)
        apply_policy(net, BLOCKS)
        copied, original = copy.deepcopy(net), weakref.ref(net.layers[0])
        del net
        gc.collect()
        assert original() is None
        assert len(carried(copied)) == 1

    def test_a_net_may_hold_its_plan(self, gpt: nn.Cell) -> None:
        gpt.plan = apply_policy(gpt, BLOCKS)
        assert not copy.deepcopy(gpt).plan.applied
        assert gpt.plan.applied


class TestLifetime:
    def test_a_plan_does_not_keep_its_net_alive(self, new_gpt: type[nn.Cell]) -> None:
        net = new_gpt(1)
        plan, alive = apply_policy(net, BLOCKS), weakref.ref(net.layers[0])
        del net
        gc.collect()
        assert alive() is None
        plan.remove()

    def test_a_net_remembers_a_plan_that_nobody_holds(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, BLOCKS)
        gc.collect()
        with pytest.raises(PolicyError, match="under the plan from dict already"):
            apply_policy(gpt, HEAD)

    def test_a_plan_leaves_no_attribute_on_a_net_without_a_decision(self, gpt: nn.Cell) -> None:
        before = set(vars(gpt))
        apply_policy(gpt, BLOCKS)
        assert set(vars(gpt)) == before
