"""What `describe()` tells a reader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import CheckpointPolicy, PolicyError, SwapManager, activation_policy, apply_policy, load_policy
from hyper_parallel.policy_file.sizes import size_in_words
from tests.helpers import settled


def rule(cells: str, policy: str, **others: Any) -> dict[str, Any]:
    return {"cells": cells, "policy": policy, **others}


def document(*rules: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules), **others}


def kept(net: nn.Cell, *rules: dict[str, Any], **others: Any) -> dict[str, str]:
    return {row.path: row.keeps for row in load_policy(document(*rules, **others)).resolve(net)}


def notes(net: nn.Cell, *rules: dict[str, Any], **others: Any) -> list[str]:
    plan = apply_policy(net, document(*rules, **others))
    plan.remove()
    return plan.notes


def test_before_it_is_applied_a_plan_lists_its_rules() -> None:
    plan = load_policy(
        document(
            rule("layers.*", "must_recompute", swap_inputs=True),
            rule("head", "MUST_SWAP"),
            default="must_save",
            swap={"tier": "file", "window": "16MiB", "when_exhausted": ["recompute", "keep"]},
        )
    )
    assert plan.describe().splitlines() == [
        "dict: not applied to a net",
        "rule 1   layers.*        must_recompute + swapped inputs",
        "rule 2   head            must_swap",
        "default  any other cell  must_save",
        "swap: tier file, window 16.0 MiB, when_exhausted recompute, then keep",
    ]
    assert plan.rows == []


def test_an_applied_plan_has_one_aligned_line_per_cell(gpt: nn.Cell) -> None:
    plan = apply_policy(gpt, document(rule("layers.[0-1]", "must_recompute"), rule("head", "prefer_save")))
    assert plan.describe().splitlines() == [
        "dict: applied to Gpt, 3 of 31 cells decided",
        "path      cell   policy          why     keeps",
        "layers.0  Block  must_recompute  rule 1  inputs on device; 7 cells replayed",
        "layers.1  Block  must_recompute  rule 1  inputs on device; 7 cells replayed",
        "head      Dense  prefer_save     rule 2  everything",
    ]
    plan.remove()


def test_a_plan_can_be_described_for_a_net_without_attaching(gpt: nn.Cell) -> None:
    plan = load_policy(document(rule("head", "must_save")))
    assert plan.describe(gpt).startswith("dict: worked out for Gpt, 1 of 31 cells decided\n")
    assert not plan.applied


def test_a_removed_plan_says_so(gpt: nn.Cell) -> None:
    plan = apply_policy(gpt, document(rule("head", "must_save")))
    plan.remove()
    assert plan.describe().startswith("dict: removed from Gpt, 1 of 31 cells decided\n")


def test_the_net_itself_has_a_name(gpt: nn.Cell) -> None:
    activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(gpt)
    assert "\n(the net)  Gpt   must_recompute  decorator  inputs on device; 31 cells replayed" in load_policy(
        document()
    ).describe(gpt)


class TestKeeps:
    def test_a_replayed_cell_keeps_its_inputs(self, gpt: nn.Cell) -> None:
        assert kept(gpt, rule("head", "must_recompute")) == {"head": "inputs on device; 1 cell replayed"}

    def test_swapped_inputs_are_on_host(self, gpt: nn.Cell) -> None:
        found = kept(gpt, rule("layers.0", "must_recompute", swap_inputs=True))
        assert found == {"layers.0": "inputs on host (file tier); 7 cells replayed"}

    def test_a_swapped_cell_has_its_large_tensors_on_host(self, gpt: nn.Cell) -> None:
        assert kept(gpt, rule("head", "must_swap")) == {"head": "saved tensors >= 1.0 MiB on host (file tier)"}

    def test_the_files_settings_show(self, gpt: nn.Cell) -> None:
        found = kept(gpt, rule("head", "must_swap"), swap={"tier": "host", "min_bytes": "1536KiB"})
        assert found == {"head": "saved tensors >= 1.5 MiB on host (host tier)"}

    def test_without_a_smallest_size_every_saved_tensor_is_on_host(self, gpt: nn.Cell) -> None:
        assert kept(gpt, rule("head", "must_swap"), swap={"min_bytes": 0}) == {
            "head": "saved tensors on host (file tier)"
        }

    @pytest.mark.parametrize("policy", ["must_save", "prefer_save"])
    def test_a_saving_cell_keeps_everything(self, gpt: nn.Cell, policy: str) -> None:
        assert kept(gpt, rule("head", policy)) == {"head": "everything"}

    def test_a_saving_cell_inside_a_replayed_one_runs_once_and_is_not_replayed(self, gpt: nn.Cell) -> None:
        assert kept(gpt, rule("layers.0", "must_recompute"), rule("layers.0.mlp", "must_save")) == {
            "layers.0": "inputs on device; 4 cells replayed",
            "layers.0.mlp": "everything, and its output; runs once",
        }

    def test_a_swapped_cell_inside_a_replayed_one_runs_once(self, gpt: nn.Cell) -> None:
        found = kept(gpt, rule("layers.0", "must_recompute"), rule("layers.0.mlp", "must_swap"), swap={"min_bytes": 0})
        assert found["layers.0.mlp"] == "output and saved tensors on host (file tier); runs once"

    def test_a_replayed_cell_inside_a_replayed_one_keeps_no_inputs(self, gpt: nn.Cell) -> None:
        found = kept(gpt, rule("layers.0", "must_recompute"), rule("layers.0.mlp", "must_recompute"))
        assert found == {
            "layers.0": "inputs on device; 7 cells replayed",
            "layers.0.mlp": "inputs replayed with layers.0; 3 cells replayed",
        }

    def test_a_replayed_cell_inside_a_swapped_one_has_its_inputs_on_host(self, gpt: nn.Cell) -> None:
        found = kept(gpt, rule("layers.0", "must_swap"), rule("layers.0.mlp", "must_recompute"))
        assert found["layers.0.mlp"] == "inputs on host (file tier); 3 cells replayed"

    def test_what_the_swap_manager_was_told_shows(self, gpt: nn.Cell, swap_manager: SwapManager) -> None:
        swap_manager.configure(tier="host", min_bytes="2MiB")
        found = kept(gpt, rule("head", "must_swap"), swap={"min_bytes": "2MiB"})
        assert found == {"head": "saved tensors >= 2.0 MiB on host (host tier)"}

    def test_a_saving_cell_inside_a_swapped_one_keeps_everything(self, gpt: nn.Cell) -> None:
        assert (
            kept(gpt, rule("layers.0", "must_swap"), rule("layers.0.mlp", "must_save"))["layers.0.mlp"] == "everything"
        )


class TestNotes:
    def test_a_rule_that_is_overruled_everywhere_is_noted(self, gpt: nn.Cell) -> None:
        found = notes(gpt, rule("layers.1", "must_swap"), rule("layers.*", "must_recompute"))
        assert found == ["rule 1 (layers.1) has no effect: rule 2 overrules it on every cell it matches"]

    def test_a_rule_may_be_overruled_by_several(self, gpt: nn.Cell) -> None:
        found = notes(gpt, rule("layers.*", "must_swap"), rule("**.[0-1]", "must_save"), rule("**.[2-3]", "must_save"))
        assert found == ["rule 1 (layers.*) has no effect: rules 2, 3 overrule it on every cell it matches"]

    def test_a_rule_that_is_overruled_in_part_is_not_noted(self, gpt: nn.Cell) -> None:
        assert notes(gpt, rule("layers.*", "must_recompute"), rule("layers.1", "must_save")) == []

    def test_what_is_never_moved_is_noted_when_something_is_swapped(self, gpt: nn.Cell) -> None:
        (note,) = notes(gpt, rule("head", "must_swap"))
        assert note == (
            "never moved to host: parameters, their views and casts, tensors owned outside the region, "
            "tensors below 1.0 MiB, and tensors without computation between their forward and their backward"
        )

    def test_swapped_inputs_count_as_swapped(self, gpt: nn.Cell) -> None:
        (note,) = notes(gpt, rule("head", "must_recompute", swap_inputs=True))
        assert note.startswith("never moved to host: parameters")

    def test_swapped_inputs_inside_a_replayed_cell_are_noted(self, gpt: nn.Cell) -> None:
        inner = rule("layers.0.mlp", "must_recompute", swap_inputs=True)
        found = notes(gpt, rule("layers.0", "must_recompute"), inner)
        assert found[0] == "swap_inputs has no effect for layers.0.mlp: layers.0 replays its inputs"

    def test_the_ladder_is_noted(self, gpt: nn.Cell) -> None:
        found = notes(gpt, rule("head", "must_swap"), swap={"when_exhausted": ["recompute", "keep"]})
        assert found[0] == "when the host budget is exhausted, a region may recompute, then keep instead of swapping"

    def test_swap_settings_without_a_swapped_cell_are_noted(self, gpt: nn.Cell) -> None:
        found = notes(gpt, rule("head", "must_save"), swap={"window": "16MiB"})
        assert found == ["swap has no effect: nothing is swapped"]

    def test_a_default_for_which_no_cell_is_left_is_noted(self, gpt: nn.Cell) -> None:
        found = notes(gpt, rule("**", "must_save"), default="must_recompute")
        assert found == ["default (must_recompute) has no effect: no cell is left for it"]

    def test_a_plan_without_decisions_says_that_everything_is_kept(self, gpt: nn.Cell) -> None:
        assert notes(gpt) == ["no cell is under a policy: every cell keeps everything"]

    def test_other_paths_of_a_shared_cell_are_noted(self) -> None:
        class Twice(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Dense(2, 2)
                self.second, self.third = self.first, self.first

            def construct(self, x: Tensor) -> Tensor:
                return self.second(self.first(x))

        assert notes(Twice(), rule("second", "must_save")) == ["second is shared: first, third are the same cell"]

    def test_a_note_is_a_line_of_the_description(self, gpt: nn.Cell) -> None:
        assert load_policy(document()).describe(gpt).splitlines() == [
            "dict: worked out for Gpt, 0 of 31 cells decided",
            "note: no cell is under a policy: every cell keeps everything",
        ]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**39, "1.5 TiB"),
        (2**53, "8192.0 TiB"),
    ],
)
def test_a_size_is_written_in_binary_units(size: int, words: str) -> None:
    assert size_in_words(size) == words


@pytest.mark.parametrize("order", [("must_save", "must_swap"), ("must_swap", "must_save")], ids=" then ".join)
def test_of_two_rules_with_the_same_pattern_the_later_one_acts_and_the_report_says_so(
    gpt: nn.Cell, swap_manager: SwapManager, write: Callable[[str], Path], order: tuple[str, str]
) -> None:
    swap_manager.configure(min_bytes=0)
    swap_manager.reset()
    last = order[1]
    rules = "".join(f'  - {{cells: "layers.*", policy: {policy}}}\n' for policy in order)
    plan = apply_policy(gpt, write(f"version: 1\nrules:\n{rules}"))
    assert "rule 1 (layers.*) has no effect: rule 2 overrules it on every cell it matches" in plan.describe()
    assert {(row.policy_text, row.why) for row in plan.rows} == {(last, "rule 2")}
    x = Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    ms.grad(lambda x: settled(gpt(x)))(x)
    swapped = {path for path, cell in swap_manager.stats().cells.items() if cell.offloaded_bytes}
    assert swapped == ({f"layers.{index}" for index in range(4)} if last == "must_swap" else set())


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ("{MatMul: must_save, MatMulExt: must_swap}", "'MatMul' says MUST_SAVE and 'MatMulExt' says MUST_SWAP"),
        ("{MatMul: must_save, MatMul: must_swap}", "the key 'MatMul' is given twice"),
    ],
)
def test_an_operator_in_two_entries_is_an_error_that_names_both(
    write: Callable[[str], Path], ops: str, expected: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(write(f'version: 1\nrules:\n  - {{cells: "layers.*", ops: {ops}}}\n'))
    assert expected in str(caught.value)
    assert "policy.yaml:3" in str(caught.value)
