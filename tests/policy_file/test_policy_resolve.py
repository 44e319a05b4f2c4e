"""Which cell gets which policy, and by whose word."""

import re
from typing import Any

import pytest
from mindspore import Tensor, nn

from hyper_parallel import CheckpointPolicy, PolicyError, activation_policy, load_policy

MUST_RECOMPUTE, MUST_SWAP = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SWAP


def document(*rules: tuple[str, str], **others: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"cells": cells, "policy": policy} for cells, policy in rules], **others}


def decided(net: nn.Cell, *rules: tuple[str, str], **others: Any) -> dict[str, tuple[str, str]]:
    rows = load_policy(document(*rules, **others)).resolve(net)
    return {row.path: (row.policy_text, row.why) for row in rows}


def message(net: nn.Cell, *rules: tuple[str, str], **others: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(document(*rules, **others)).resolve(net)
    return str(caught.value)


def test_the_last_matching_rule_wins(gpt: nn.Cell) -> None:
    rules = ("layers.*", "must_recompute"), ("layers.[2-3]", "must_swap"), ("layers.3", "must_save")
    assert decided(gpt, *rules) == {
        "layers.0": ("must_recompute", "rule 1"),
        "layers.1": ("must_recompute", "rule 1"),
        "layers.2": ("must_swap", "rule 2"),
        "layers.3": ("must_save", "rule 3"),
    }


def test_a_saving_rule_is_a_decision_too(gpt: nn.Cell) -> None:
    assert decided(gpt, ("head", "prefer_save")) == {"head": ("prefer_save", "rule 1")}


def test_swap_inputs_are_part_of_a_row(gpt: nn.Cell) -> None:
    rule = {"cells": "head", "policy": "prefer_recompute", "swap_inputs": True}
    (row,) = load_policy({"version": 1, "rules": [rule]}).resolve(gpt)
    assert row.swap_inputs
    assert row.policy_text == "prefer_recompute + swapped inputs"


def test_rows_are_in_the_order_of_the_net(gpt: nn.Cell) -> None:
    order = [path for path, _ in gpt.cells_and_names()]
    paths = list(decided(gpt, ("head", "must_save"), ("**.mlp", "must_swap"), ("layers.1", "must_recompute")))
    assert paths == sorted(paths, key=order.index)


def test_two_stars_name_every_cell_that_runs(gpt: nn.Cell) -> None:
    running = {path for path, cell in gpt.cells_and_names() if path and not isinstance(cell, nn.CellList)}
    assert set(decided(gpt, ("**", "must_save"))) == running


def test_a_rule_that_matches_nothing_is_an_error_that_offers_close_paths(gpt: nn.Cell) -> None:
    found = message(gpt, ("layers.*", "must_save"), ("layers.0.atention", "must_swap"))
    assert found.startswith("dict: rule 2: `layers.0.atention` matches nothing; the net has `layers.[0-3].attention`")


def test_a_rule_far_from_every_path_is_told_how_paths_begin(gpt: nn.Cell) -> None:
    expected = "dict: rule 1: `x.y` matches nothing; the net has embedding, layers, head"
    assert message(gpt, ("x.y", "must_save")) == expected


def test_a_rule_for_a_net_without_cells_says_so() -> None:
    assert message(nn.ReLU(), ("x", "must_save")) == "dict: rule 1: `x` matches nothing: the net has no cells below it"


def test_a_rule_that_names_only_a_list_of_cells_is_an_error(gpt: nn.Cell) -> None:
    expected = "`layers` matches nothing that runs: layers is a CellList that only holds cells; write 'layers.*'"
    assert expected in message(gpt, ("layers", "must_recompute"))


def test_all_rules_that_match_nothing_are_reported_together(gpt: nn.Cell) -> None:
    found = message(gpt, ("x", "must_save"), ("head", "must_save"), ("layers.[7-9]", "must_save"))
    assert re.findall(r"rule \d", found) == ["rule 1", "rule 3"]


def test_a_rule_is_named_by_the_file(gpt: nn.Cell, write: Any) -> None:
    path = write("version: 1\nrules:\n  - {cells: haed, policy: must_swap}\n")
    with pytest.raises(PolicyError, match=r"^policy\.yaml:3:13: rule 1: `haed` matches nothing; the net has `head`\n"):
        load_policy(path).resolve(gpt)


def test_a_decorator_that_agrees_with_a_rule_is_named_beside_it(gpt: nn.Cell) -> None:
    activation_policy(MUST_RECOMPUTE)(gpt.head)
    assert decided(gpt, ("head", "must_recompute")) == {"head": ("must_recompute", "rule 1, decorator")}


def test_a_decorator_without_a_rule_is_a_row(gpt: nn.Cell) -> None:
    activation_policy(MUST_SWAP)(gpt.head)
    assert decided(gpt) == {"head": ("must_swap", "decorator")}


def test_a_rule_that_contradicts_a_decorator_is_an_error_naming_both(gpt: nn.Cell) -> None:
    activation_policy(MUST_RECOMPUTE)(gpt.head)
    expected = "rule 1: says must_swap for head, which carries must_recompute already (decorator)"
    assert expected in message(gpt, ("head", "must_swap"))


def test_a_rule_without_the_decorators_swapped_inputs_contradicts_it(gpt: nn.Cell) -> None:
    activation_policy(MUST_RECOMPUTE, swap_inputs=True)(gpt.head)
    expected = "says must_recompute for head, which carries must_recompute with swapped inputs already"
    assert expected in message(gpt, ("head", "must_recompute"))


def test_a_rule_that_contradicts_a_decorated_class_is_an_error() -> None:
    @activation_policy(MUST_RECOMPUTE)
    class Decorated(nn.Dense):
        pass

    found = message(nn.SequentialCell(Decorated(2, 2), nn.ReLU()), ("0", "prefer_save"))
    assert "says prefer_save for 0, which carries must_recompute already (decorator)" in found


def test_matching_and_contradiction_errors_are_reported_together(gpt: nn.Cell) -> None:
    activation_policy(MUST_RECOMPUTE)(gpt.head)
    assert message(gpt, ("x", "must_save"), ("head", "must_swap")).startswith("dict has 2 errors:\n")


class TestDefault:
    @pytest.mark.parametrize("default", ["prefer_save", "must_save"])
    def test_a_saving_default_decides_nothing(self, gpt: nn.Cell, default: str) -> None:
        assert decided(gpt, default=default) == {}

    def test_it_goes_to_the_outermost_cells_and_looks_into_lists(self, gpt: nn.Cell) -> None:
        rows = decided(gpt, default="must_recompute")
        assert list(rows) == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
        assert set(rows.values()) == {("must_recompute", "default")}

    def test_it_looks_into_a_dict_of_cells(self) -> None:
        class Net(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.CellDict({"a": nn.Dense(2, 2), "b": nn.ReLU()})

            def construct(self, x: Tensor) -> Tensor:
                return self.parts["b"](self.parts["a"](x))

        assert list(decided(Net(), default="must_swap")) == ["parts.a", "parts.b"]

    def test_it_leaves_a_ruled_cell_and_what_is_in_it_alone(self, gpt: nn.Cell) -> None:
        rows = decided(gpt, ("layers.*", "must_save"), default="must_recompute")
        assert [path for path, (_, why) in rows.items() if why == "default"] == ["embedding", "head"]

    def test_it_goes_beside_a_ruled_cell_in_a_block(self, gpt: nn.Cell) -> None:
        rows = decided(gpt, ("layers.0.mlp.0", "must_swap"), default="must_recompute")
        in_block = [path for path, (_, why) in rows.items() if path.startswith("layers.0") and why == "default"]
        assert sorted(in_block) == ["layers.0.attention", "layers.0.mlp.1", "layers.0.norm1", "layers.0.norm2"]

    def test_it_leaves_decorated_cells_and_what_is_in_them_alone(self, gpt: nn.Cell) -> None:
        activation_policy(MUST_SWAP)(gpt.layers[0])
        assert [path for path in decided(gpt, default="must_recompute") if path.startswith("layers.0")] == ["layers.0"]

    def test_it_touches_nothing_inside_a_decorated_net(self, gpt: nn.Cell) -> None:
        activation_policy(MUST_RECOMPUTE)(gpt)
        assert decided(gpt, default="must_swap") == {"": ("must_recompute", "decorator")}

    def test_it_treats_a_list_with_its_own_construct_as_a_cell(self) -> None:
        class Chain(nn.CellList):
            def construct(self, x: Tensor) -> Tensor:
                for cell in self:
                    x = cell(x)
                return x

        assert list(decided(nn.SequentialCell(Chain([nn.Dense(2, 2)])), default="must_swap")) == ["0"]


class TestSharedCells:
    @pytest.fixture
    def shared(self) -> nn.Cell:
        class Shared(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Dense(2, 2)
                self.second = self.first
                self.other = nn.SequentialCell(self.first, nn.ReLU())

            def construct(self, x: Tensor) -> Tensor:
                return self.other(self.second(self.first(x)))

        return Shared()

    @pytest.mark.parametrize("path", ["first", "second", "other.0"])
    def test_any_of_its_paths_names_it(self, shared: nn.Cell, path: str) -> None:
        assert decided(shared, (path, "must_recompute")) == {path: ("must_recompute", "rule 1")}

    def test_rules_for_two_paths_that_agree_decide_once(self, shared: nn.Cell) -> None:
        rows = decided(shared, ("first", "must_recompute"), ("other.0", "must_recompute"))
        assert rows == {"first": ("must_recompute", "rules 1, 2")}

    def test_rules_for_two_paths_that_disagree_are_an_error_naming_both(self, shared: nn.Cell) -> None:
        found = message(shared, ("first", "must_recompute"), ("other.0", "must_swap"))
        assert (
            "first and other.0 are one cell, but rule 1 says must_recompute and rule 2 says must_swap; "
            "a shared cell has one policy"
        ) in found

    def test_a_later_rule_for_all_paths_settles_it(self, shared: nn.Cell) -> None:
        rules = ("first", "must_recompute"), ("other.0", "must_swap"), ("**", "must_save")
        assert decided(shared, *rules)["first"] == ("must_save", "rule 3")

    def test_the_default_decides_once(self, shared: nn.Cell) -> None:
        assert list(decided(shared, default="must_recompute")) == ["first", "other"]

    def test_the_default_leaves_one_that_is_in_a_ruled_cell_alone(self, shared: nn.Cell) -> None:
        assert decided(shared, ("other", "must_swap"), default="must_recompute") == {"other": ("must_swap", "rule 1")}
