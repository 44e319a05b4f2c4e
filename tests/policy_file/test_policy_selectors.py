"""Which cells a rule names: by path, by class, by number of layer, by regular expression."""

from typing import Any

import pytest
from mindspore import Tensor, nn

from hyper_parallel import PolicyError, load_policy
from hyper_parallel.policy_file.layers import layer_numbers, layers_as_text


def named(net: nn.Cell, **selector: Any) -> list[str]:
    rule = {"class" if key == "class_" else key: value for key, value in selector.items()} | {"policy": "must_save"}
    return [row.path for row in load_policy({"version": 1, "rules": [rule]}).resolve(net)]


def refusal(net: nn.Cell, **selector: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        named(net, **selector)
    return str(caught.value)


class Two(nn.Cell):
    """An encoder and a decoder, each with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.CellList([nn.Dense(2, 2) for _ in range(2)])
        self.decoder = nn.CellList([nn.SequentialCell(nn.Dense(2, 2), nn.ReLU()) for _ in range(3)])

    def construct(self, x: Tensor) -> Tensor:
        return x


class TestPaths:
    def test_alternatives_name_several_parts(self, gpt: nn.Cell) -> None:
        assert named(gpt, cells="layers.{0,[2-3]}.{attention,mlp}") == [
            f"layers.{index}.{part}" for index in (0, 2, 3) for part in ("attention", "mlp")
        ]

    def test_a_regular_expression_describes_whole_paths(self, gpt: nn.Cell) -> None:
        assert named(gpt, cells=r"re:layers\.[02]\.(attention|norm\d)") == [
            f"layers.{index}.{part}" for index in (0, 2) for part in ("norm1", "norm2", "attention")
        ]

    def test_cells_of_one_name_at_any_depth(self, gpt: nn.Cell) -> None:
        assert named(gpt, cells="**.{0,head}") == [
            *("layers.0", "layers.0.mlp.0", "layers.1.mlp.0", "layers.2.mlp.0", "layers.3.mlp.0", "head")
        ]

    @pytest.mark.parametrize(
        ("pattern", "closest"),
        [
            ("layers.9.attn", "layers.[0-3].attention"),
            ("layers.[7-9]", "layers.[0-3]"),
            ("**.attn", "layers.[0-3].attention"),
            ("layer.*.mlp", "layers.[0-3].mlp"),
            ("embeding", "embedding"),
        ],
    )
    def test_a_path_that_matches_nothing_is_told_the_closest(self, gpt: nn.Cell, pattern: str, closest: str) -> None:
        assert refusal(gpt, cells=pattern) == f"dict: rule 1: `{pattern}` matches nothing; the net has `{closest}`"

    def test_layers_that_have_gaps_are_told_as_they_are(self, gpt: nn.Cell) -> None:
        gpt.layers[1].attention = None
        assert "the net has `layers.{0,[2-3]}.attention`" in refusal(gpt, cells="layers.9.attn")


class TestClasses:
    def test_a_class_names_its_cells_wherever_they_are(self, gpt: nn.Cell) -> None:
        assert named(gpt, class_="Block") == [f"layers.{index}" for index in range(4)]

    def test_a_class_names_cells_of_classes_derived_from_it(self) -> None:
        class Wide(nn.Dense):
            pass

        assert named(nn.SequentialCell(Wide(2, 2), nn.Dense(2, 2), nn.ReLU()), class_="Dense") == ["0", "1"]

    def test_a_class_may_be_a_pattern(self, gpt: nn.Cell) -> None:
        assert named(gpt, class_="{Layer*,Block}", cells="layers.0.**") == [
            "layers.0",
            "layers.0.norm1",
            "layers.0.norm2",
        ]
        assert named(gpt, class_="re:.*ense", cells="*") == ["embedding", "head"]

    def test_a_class_together_with_layers_looks_into_them(self, gpt: nn.Cell) -> None:
        assert named(gpt, class_="Dense", layers="0, 2") == [
            *("layers.0.attention", "layers.0.mlp.0", "layers.2.attention", "layers.2.mlp.0")
        ]

    def test_an_unknown_class_is_told_the_closest(self, gpt: nn.Cell) -> None:
        assert "rule 1: `Blok` matches nothing; did you mean 'Block'?" in refusal(gpt, class_="Blok")
        assert "the net has cells of class Dense, Block, LayerNorm" in refusal(gpt, class_="Qqq")

    def test_cells_of_another_class_are_told(self, gpt: nn.Cell) -> None:
        assert "`Block` matches nothing: what `head` names is of class Dense" in refusal(
            gpt, class_="Block", cells="head"
        )

    def test_a_module_is_no_part_of_a_class_s_name(self, gpt: nn.Cell) -> None:
        assert "expected the name of a Cell class, such as 'Attention'" in refusal(gpt, class_="nn.Dense")


class TestLayers:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [(3, [3]), ("0-2", [0, 1, 2]), ("0-1, 3", [0, 1, 3]), ([0, "2-3"], [0, 2, 3]), (" 1 - 2 ,0", [0, 1, 2])],
    )
    def test_layers_are_named_by_number(self, gpt: nn.Cell, given: Any, expected: list[int]) -> None:
        assert named(gpt, layers=given) == [f"layers.{index}" for index in expected]

    def test_cells_are_then_looked_for_in_the_layers(self, gpt: nn.Cell) -> None:
        assert named(gpt, layers="1-2", cells="mlp.*") == [
            "layers.1.mlp.0",
            "layers.1.mlp.1",
            "layers.2.mlp.0",
            "layers.2.mlp.1",
        ]
        assert named(gpt, layers="1-2", cells="re:mlp[.]0") == ["layers.1.mlp.0", "layers.2.mlp.0"]

    def test_what_is_in_no_layer_is_told_what_they_have(self, gpt: nn.Cell) -> None:
        assert refusal(gpt, layers="1-2", cells="attn") == (
            "dict: rule 1: `attn` matches nothing in the layers 1-2; layers.1 has `attention`"
        )

    def test_a_layer_that_is_not_there_is_an_error(self, gpt: nn.Cell) -> None:
        assert "rule 1: there is no layer 4: `layers` has 4 layers, 0 to 3" in refusal(gpt, layers="0-5")

    def test_a_sequential_net_counts_its_own_cells(self) -> None:
        assert named(nn.SequentialCell(nn.Dense(2, 2), nn.ReLU()), layers=1) == ["1"]

    def test_several_containers_are_listed(self) -> None:
        assert refusal(Two(), layers=0) == (
            "dict: rule 1: several containers have numbered cells: encoder (2 cells), decoder (3 cells); say which, as "
            "`container: encoder`"
        )

    def test_the_container_says_which(self) -> None:
        assert named(Two(), layers="0, 2", container="decoder") == ["decoder.0", "decoder.2"]
        assert named(Two(), layers=1, container="decoder.1") == ["decoder.1.1"]

    def test_a_container_that_is_none_is_told_which_there_are(self) -> None:
        assert "`decoders` is no numbered container of the net; encoder (2 cells), decoder (3 cells)" in refusal(
            Two(), layers=0, container="decoders"
        )

    def test_a_net_without_numbered_cells_says_so(self) -> None:
        assert "the net has no numbered container (a CellList or SequentialCell); use `cells`" in refusal(
            nn.Dense(2, 2), layers=0
        )

    def test_a_container_without_layers_is_an_error(self) -> None:
        assert "container: got 'decoder', it says where `layers` counts, but the rule has no layers" in refusal(
            Two(), cells="encoder.*", container="decoder"
        )

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (True, "got True, expected layer numbers such as 3, '0-5, 8' or [0-5, 8]; true and false are no layers"),
            ([0, False], "true and false are no layers"),
            ("5-2", "got '5-2', the range 5-2 is empty; write 2-5"),
            ("0-3, 2", "layer 2 is named twice"),
            ([1, 1], "layer 1 is named twice"),
            ("", "expected layer numbers"),
            ([], "it names no layer"),
            ("all", "got 'all', expected layer numbers"),
            (-1, "got -1, expected layer numbers"),
            (1.5, "got 1.5, expected layer numbers"),
            ({"a": 1}, "expected layer numbers"),
            ("0-99999999", "expected layer numbers below 100,000"),
            (None, "got None, expected layer numbers"),
        ],
    )
    def test_what_is_no_layer_is_an_error(self, gpt: nn.Cell, given: Any, expected: str) -> None:
        assert f"rule 1, layers: got {given!r}" in refusal(gpt, layers=given)
        assert expected in refusal(gpt, layers=given)

    def test_numbers_are_written_in_one_way(self) -> None:
        assert layers_as_text([3, "0 -1", "7"]) == "3, 0-1, 7"
        assert layer_numbers("3, 0-1, 7") == [3, 0, 1, 7]


def test_a_rule_without_a_selector_is_an_error(gpt: nn.Cell) -> None:
    assert refusal(gpt) == "dict: rule 1: expected cells, class or layers, to say which cells it is about"


@pytest.mark.parametrize("key", ["cells", "class_", "layers"])
def test_a_selector_without_a_value_is_an_error(gpt: nn.Cell, key: str) -> None:
    assert f"rule 1, {key.strip('_')}: got None, expected" in refusal(gpt, **{"cells": "head", key: None})
