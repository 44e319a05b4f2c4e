"""What a rule may say besides a policy: presets, tensors, cells left out of the replay."""

import copy
import inspect
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import (
    CheckpointPolicy,
    PolicyError,
    SwapManager,
    activation_policy,
    apply_policy,
    load_policy,
    presets,
    swap_wrapper,
)
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from hyper_parallel.policy_file.rule import PRESET_NAMES
from hyper_parallel.policy_file.tensors import DTYPE_NAMES, TensorSelection
from tests.helpers import settled


def with_rule(**rule: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"cells": "layers.*", **rule}]}


def message(document: dict[str, Any], net: nn.Cell | None = None) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(document).describe(net)
    return str(caught.value)


def spec(net: nn.Cell, path: str) -> RegionSpec | None:
    return spec_of(dict(net.cells_and_names())[path])


@pytest.fixture
def x() -> Tensor:
    return Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))


def gradients(net: nn.Cell, x: Tensor, wait: bool = False) -> list[np.ndarray]:
    def forward(x: Tensor) -> Tensor:
        return settled(net(x)) if wait else net(x)

    _, grads = ms.value_and_grad(forward, None, net.trainable_params())(x)
    return [grad.asnumpy() for grad in grads]


class TestPresets:
    def test_every_preset_has_its_name_in_files(self) -> None:
        functions = [name for name, _ in inspect.getmembers(presets, inspect.isfunction) if not name.startswith("_")]
        assert sorted(PRESET_NAMES) == functions

    @pytest.mark.parametrize("name", PRESET_NAMES)
    def test_a_preset_means_what_its_function_gives(self, gpt: nn.Cell, new_gpt: type[nn.Cell], name: str) -> None:
        apply_policy(gpt, with_rule(preset=name))
        decorated = activation_policy(**getattr(presets, name)())(new_gpt().layers[0])
        found, expected = spec(gpt, "layers.0"), spec_of(decorated)
        for what in ("policy", "swap_inputs", "operators"):
            assert getattr(found, what) == getattr(expected, what)

    @pytest.mark.parametrize("name", PRESET_NAMES)
    def test_gradients_are_those_of_the_plain_net(self, gpt: nn.Cell, x: Tensor, name: str) -> None:
        expected = gradients(gpt, x)
        apply_policy(gpt, with_rule(preset=name))
        for found, plain in zip(gradients(gpt, x), expected, strict=True):
            np.testing.assert_array_equal(found, plain)

    def test_presets_that_go_together_are_listed(self, gpt: nn.Cell) -> None:
        apply_policy(gpt, with_rule(preset=["selective", "inputs_on_host"]))
        found = spec(gpt, "layers.0")
        assert found is not None
        assert (found.swap_inputs, found.operators is not None) == (True, True)

    def test_a_plan_names_the_preset(self, gpt: nn.Cell) -> None:
        (row, *_) = load_policy(with_rule(preset="attention_only")).resolve(gpt)
        assert row.keeps == "inputs on device; 7 cells replayed; operators: preset attention_only"

    def test_a_decorator_with_the_same_preset_agrees(self, gpt: nn.Cell) -> None:
        activation_policy(**presets.attention_only())(gpt.layers[0])
        assert load_policy(with_rule(preset="attention_only")).resolve(gpt)[0].why == "rule 1, decorator"

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            (
                {"preset": "selectiv"},
                "preset, item 1: got 'selectiv', expected 'full', 'selective', 'every_other_matmul'",
            ),
            ({"preset": 3}, "preset: got 3, expected one of full, selective"),
            ({"preset": []}, "preset: got [], expected one of full, selective"),
            ({"preset": None}, "rule 1, policy is missing"),
            ({"preset": ["full", "full"]}, "a preset is named twice"),
            ({"preset": ["selective", "attention_only"]}, "selective and attention_only both say what happens to op"),
            ({"preset": "selective", "ops": {"MatMul": "must_save"}}, "selective and `ops` both say"),
            (
                {"preset": "full", "policy": "prefer_recompute"},
                "full means must_recompute, but policy is prefer_recompute",
            ),
            ({"preset": "selective", "policy": "must_swap"}, "expected a policy that replays"),
        ],
    )
    def test_presets_that_contradict_are_errors(self, rule: dict[str, Any], expected: str) -> None:
        assert expected in message(with_rule(**rule))


class TestTensors:
    @pytest.mark.parametrize(
        ("size", "dtype", "goes"),
        [(100, ms.float16, True), (99, ms.float16, False), (100, ms.bfloat16, True), (100, ms.float32, False)],
    )
    def test_a_tensor_goes_by_size_and_dtype(self, size: int, dtype: Any, goes: bool) -> None:
        assert TensorSelection(100, ("float16", "bfloat16")).selects(size, dtype) is goes

    @pytest.mark.parametrize("name", DTYPE_NAMES)
    def test_every_dtype_is_known_by_its_name(self, name: str) -> None:
        assert TensorSelection(0, (name,)).selects(1, getattr(ms, {"bool": "bool_"}.get(name, name)))

    def test_only_large_tensors_of_the_region_are_moved(
        self, gpt: nn.Cell, x: Tensor, swap_manager: SwapManager
    ) -> None:
        def moved(**tensors: Any) -> tuple[int, int]:
            plan = apply_policy(
                gpt, with_rule(policy="must_swap", **tensors) | {"swap": {"min_bytes": 1, "tier": "host"}}
            )
            swap_manager.reset()
            gradients(gpt, x, wait=True)
            stats = swap_manager.stats()
            plan.remove()
            return stats.offloaded_bytes, stats.kept_bytes

        everything, _ = moved()
        means_and_variances = 4 * 4 * 3 * 4  # of the norms; the rest has 48 bytes each
        assert moved(tensors={"min_bytes": 48}) == (everything - means_and_variances, means_and_variances)
        assert moved(tensors={"min_bytes": 49}) == (0, everything)
        assert moved(tensors={"dtype": "float16"}) == (0, everything)
        assert moved(tensors={"dtype": ["float16", "float32"]}) == (everything, 0)

    def test_gradients_are_those_of_the_plain_net(self, gpt: nn.Cell, x: Tensor) -> None:
        expected = gradients(gpt, x)
        rule = {"policy": "must_recompute", "swap_inputs": True, "tensors": {"dtype": "float32"}}
        plan = apply_policy(gpt, with_rule(**rule) | {"swap": {"min_bytes": 1}})
        for found, plain in zip(gradients(gpt, x), expected, strict=True):
            np.testing.assert_array_equal(found, plain)
        plan.remove()

    def test_a_plan_says_which_tensors_go(self, gpt: nn.Cell) -> None:
        rule = {"policy": "must_swap", "tensors": {"min_bytes": "2MiB", "dtype": "bfloat16"}}
        assert load_policy(with_rule(**rule)).resolve(gpt)[0].keeps == (
            "saved tensors >= 2.0 MiB of bfloat16 on host (file tier)"
        )

    def test_a_size_below_that_of_all_regions_is_noted(self, gpt: nn.Cell) -> None:
        text = load_policy(with_rule(policy="must_swap", tensors={"min_bytes": 10})).describe(gpt)
        assert (
            "note: tensors.min_bytes has no effect for layers.0, layers.1, layers.2 and 1 more: swap.min_bytes leaves "
            "all tensors below 1.0 MiB on the device"
        ) in text

    def test_a_policy_of_tensors_of_a_wrapper_stays(self, gpt: nn.Cell) -> None:
        def mine(tensor: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        swap_wrapper(gpt.layers[0], policy_fn=mine)
        apply_policy(gpt, with_rule(policy="must_swap"))
        found = spec(gpt, "layers.0")
        assert found is not None
        assert found.tensor_policy is mine

    def test_a_policy_of_tensors_of_a_wrapper_and_of_a_rule_contradict(self, gpt: nn.Cell) -> None:
        swap_wrapper(gpt.layers[0], policy_fn=lambda tensor: CheckpointPolicy.MUST_SAVE)
        assert "the two must agree" in message(with_rule(policy="must_swap", tensors={"min_bytes": 1}), gpt)

    def test_a_rule_that_selects_tensors_contradicts_a_decorator_that_does_not(self, gpt: nn.Cell) -> None:
        activation_policy(CheckpointPolicy.MUST_SWAP)(gpt.layers[0])
        assert (
            "says must_swap of tensors >= 1 bytes for layers.0, which carries must_swap already (decorator); the two"
        ) in message(with_rule(policy="must_swap", tensors={"min_bytes": 1}), gpt)

    def test_a_copy_of_a_net_may_get_the_same_plan(self, gpt: nn.Cell) -> None:
        document = with_rule(policy="must_swap", tensors={"min_bytes": 1})
        plan = apply_policy(gpt, document)
        apply_policy(copy.deepcopy(gpt), document).remove()
        plan.remove()

    @pytest.mark.parametrize(
        "rule",
        [
            {"policy": "must_recompute"},
            {"policy": "must_save"},
            {"policy": "must_recompute", "ops": {"MatMul": "must_save"}},
        ],
    )
    def test_tensors_of_a_rule_that_swaps_nothing_are_an_error(self, rule: dict[str, Any]) -> None:
        assert "expected a rule that swaps (must_swap, swap_inputs, or an operator with must_swap)" in message(
            with_rule(**rule, tensors={"min_bytes": 1})
        )

    @pytest.mark.parametrize(
        "rule", [{"preset": "inputs_on_host"}, {"ops": {"MatMul": "must_swap"}}, {"policy": "must_swap"}]
    )
    def test_tensors_of_a_rule_that_swaps_are_fine(self, rule: dict[str, Any]) -> None:
        load_policy(with_rule(**rule, tensors={"min_bytes": 1}))

    @pytest.mark.parametrize(
        ("tensors", "expected"),
        [
            ({}, "tensors: got {}, expected min_bytes, dtype or both"),
            ({"dtype": "half"}, "tensors, dtype, item 1: got 'half', expected 'bool', 'int8'"),
            ({"dtype": []}, "tensors, dtype: got [], expected one of bool, int8"),
            ({"min_bytes": 0}, "tensors, min_bytes: got 0, it should be greater than or equal to 1"),
            ({"min_byte": 1}, "tensors, min_byte: unknown key (its value: 1); did you mean 'min_bytes'?"),
            (3, "tensors: got 3, expected a mapping with min_bytes, dtype or both"),
            ({"min_bytes": 2**63}, "a size is below 8 EiB"),
            ({"min_bytes": "9" * 400}, "a size is below 8 EiB"),
        ],
    )
    def test_wrong_tensors_are_errors(self, tensors: Any, expected: str) -> None:
        assert expected in message(with_rule(policy="must_swap", tensors=tensors))


class TestExclude:
    def test_an_excluded_cell_runs_once(self, gpt: nn.Cell) -> None:
        rows = load_policy(with_rule(policy="must_recompute", exclude="mlp")).resolve(gpt)
        assert [(row.path, row.why, row.keeps) for row in rows[:2]] == [
            ("layers.0", "rule 1", "inputs on device; 4 cells replayed"),
            ("layers.0.mlp", "rule 1 (exclude)", "everything, and its output; runs once"),
        ]

    def test_gradients_are_those_of_the_plain_net(self, gpt: nn.Cell, x: Tensor) -> None:
        expected = gradients(gpt, x)
        apply_policy(gpt, with_rule(policy="must_recompute", exclude=["mlp.0", "norm*"]))
        for found, plain in zip(gradients(gpt, x), expected, strict=True):
            np.testing.assert_array_equal(found, plain)

    def test_a_later_rule_decides_about_the_excluded_cell(self, gpt: nn.Cell) -> None:
        document = with_rule(policy="must_recompute", exclude="mlp")
        document["rules"].append({"cells": "layers.0.mlp", "policy": "must_swap"})
        rows = {row.path: row.why for row in load_policy(document).resolve(gpt)}
        assert (rows["layers.0.mlp"], rows["layers.1.mlp"]) == ("rule 2", "rule 1 (exclude)")

    def test_an_earlier_rule_does_not(self, gpt: nn.Cell) -> None:
        document = with_rule(policy="must_recompute", exclude="mlp")
        document["rules"].insert(0, {"cells": "layers.*.mlp", "policy": "must_swap"})
        rows = {row.path: row.why for row in load_policy(document).resolve(gpt)}
        assert rows["layers.0.mlp"] == "rule 2 (exclude)"

    def test_where_another_rule_decides_about_the_cell_nothing_is_excluded(self, gpt: nn.Cell) -> None:
        document = with_rule(policy="must_recompute", exclude="mlp")
        document["rules"].append({"cells": "layers.0", "policy": "must_swap"})
        rows = [row.path for row in load_policy(document).resolve(gpt)]
        assert "layers.0.mlp" not in rows
        assert "layers.1.mlp" in rows

    def test_a_rule_may_exclude_what_it_names_itself(self, gpt: nn.Cell) -> None:
        document = {"version": 1, "rules": [{"cells": "layers.0.**", "policy": "must_recompute", "exclude": "mlp"}]}
        rows = {row.path: row.policy_text for row in load_policy(document).resolve(gpt)}
        assert rows["layers.0.mlp"] == "must_save"

    def test_an_exclusion_that_matches_nothing_is_an_error(self, gpt: nn.Cell) -> None:
        assert message(with_rule(policy="must_recompute", exclude=["mlp", "router"]), gpt) == (
            "dict: rule 1, exclude: `router` matches nothing below layers.0 or the other cells of the rule"
        )

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            ({"policy": "must_swap", "exclude": "mlp"}, "replays nothing, so every cell runs once anyway"),
            ({"policy": "must_recompute", "exclude": "a..b"}, "exclude, item 1: malformed pattern 'a..b'"),
            ({"policy": "must_recompute", "exclude": 3}, "exclude: got 3, expected dotted paths below the cells"),
            ({"policy": "must_recompute", "exclude": []}, "exclude: got [], expected dotted paths"),
        ],
    )
    def test_wrong_exclusions_are_errors(self, rule: dict[str, Any], expected: str) -> None:
        assert expected in message(with_rule(**rule))


def test_two_rules_for_a_shared_cell_that_select_other_tensors_contradict() -> None:
    shared = nn.Dense(2, 2)
    net = nn.SequentialCell([shared, nn.SequentialCell(shared)])
    for other in ({"tensors": {"min_bytes": 2}}, {}):
        rules = [
            {"cells": "0", "policy": "must_swap", "tensors": {"min_bytes": 1}},
            {"cells": "1.0", "policy": "must_swap"},
        ]
        rules[1] |= other
        assert "0 and 1.0 are one cell" in message({"version": 1, "rules": rules}, net)
