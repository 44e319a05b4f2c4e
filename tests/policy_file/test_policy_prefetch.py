"""What is loaded ahead, in which mode a net runs, and which format a source has."""

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn

from hyper_parallel import PolicyError, SwapManager, apply_policy, load_policy
from hyper_parallel.core.activation_memory import prefetch_layers


def document(*pairs: tuple[str, str], policy: str = "must_swap", **others: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "rules": [{"cells": "layers.*", "policy": policy}],
        "prefetch": [{"load": load, "at": at} for load, at in pairs],
        **others,
    }


def first_of(*cells: nn.Cell) -> set[int]:
    return prefetch_layers.first_of(tuple(map(id, cells)))


def refusal(net: nn.Cell, *pairs: tuple[str, str]) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(document(*pairs)).resolve(net)
    return str(caught.value)


class TestPrefetch:
    def test_pairs_are_given_to_the_swap_manager(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, document(("layers.0", "layers.2"), ("layers.1", "layers.2")))
        assert first_of(gpt.layers[2]) == {id(gpt.layers[0]), id(gpt.layers[1])}
        plan.remove()
        assert first_of(gpt.layers[2]) == set()

    def test_removing_leaves_pairs_that_were_there_before(self, gpt: nn.Cell) -> None:
        SwapManager().set_forward_prefetch_layer(gpt.layers[0], gpt.layers[2])
        apply_policy(gpt, document(("layers.0", "layers.2"), ("layers.1", "layers.2"))).remove()
        assert first_of(gpt.layers[2]) == {id(gpt.layers[0])}

    def test_removing_forgets_layers_that_are_in_no_pair_any_more(self, gpt: nn.Cell) -> None:
        before = len(prefetch_layers._named)
        apply_policy(gpt, document(("layers.0", "layers.2"), ("layers.1", "layers.2"))).remove()
        assert len(prefetch_layers._named) == before

    def test_a_pair_of_a_net_that_is_gone_is_undone(self, new_gpt: type[nn.Cell]) -> None:
        plan = apply_policy(new_gpt(2), document(("layers.0", "layers.1")))
        plan.remove()

    def test_a_pattern_must_name_one_cell(self, gpt: nn.Cell) -> None:
        found = refusal(gpt, ("layers.*", "head"), ("layers.7", "heat"))
        assert (
            "prefetch pair 1, load: `layers.*` names 4 cells (layers.0, layers.1, layers.2, ...), expected one" in found
        )
        assert "prefetch pair 2, load: `layers.7` matches nothing; the net has `layers.[0-3]`" in found
        assert "prefetch pair 2, at: `heat` matches nothing; the net has `head`" in found

    def test_one_cell_twice_is_an_error(self, gpt: nn.Cell) -> None:
        assert "prefetch pair 1: layers.0 and layers.0 are one cell" in refusal(gpt, ("layers.0", "layers.[0]"))
        with pytest.raises(PolicyError, match=r"pair 1: got .*, expected an earlier and a later layer"):
            load_policy(document(("head", "head")))

    def test_a_pair_of_which_nothing_is_swapped_is_noted(self, gpt: nn.Cell) -> None:
        text = load_policy(document(("embedding", "head"), ("layers.0.mlp", "head"))).describe(gpt)
        assert "note: prefetch pair 1 has no effect: nothing in embedding is swapped" in text
        assert "prefetch pair 2" not in text

    def test_a_plan_lists_its_pairs(self) -> None:
        text = load_policy(document(("layers.0", "layers.2"))).describe()
        assert "prefetch pair 1  layers.0        loaded when backward reaches layers.2" in text

    @pytest.mark.parametrize(
        ("prefetch", "expected"),
        [
            (3, "prefetch: got 3, expected a list of pairs, each with load and at"),
            ([["a", "b"]], "pair 1: got ['a', 'b'], expected a mapping with load and at"),
            ([{"load": "a"}], "pair 1, at is missing, expected a dotted path"),
            ([{"load": "a", "at": "b", "by": 1}], "pair 1, by: unknown key (its value: 1); known are load, at"),
        ],
    )
    def test_wrong_pairs_are_errors(self, prefetch: Any, expected: str) -> None:
        with pytest.raises(PolicyError) as caught:
            load_policy({"version": 1, "prefetch": prefetch})
        assert expected in str(caught.value)


RECOMPUTE = {"version": 1, "rules": [{"cells": "layers.*", "policy": "must_recompute"}]}


class TestMode:
    @pytest.fixture
    def graph_mode(self) -> Iterator[None]:
        ms.set_context(mode=ms.GRAPH_MODE)
        yield
        ms.set_context(mode=ms.PYNATIVE_MODE)

    @pytest.mark.parametrize("mode", ["auto", "pynative"])
    def test_a_net_that_runs_in_pynative_mode_is_fine(self, gpt: nn.Cell, mode: str) -> None:
        assert apply_policy(gpt, document(mode=mode)).applied

    @pytest.mark.usefixtures("graph_mode")
    def test_a_pynative_plan_is_refused_in_graph_mode(self, gpt: nn.Cell) -> None:
        with pytest.raises(PolicyError, match=r"dict \(mode: pynative\): MindSpore is in graph mode, where a PyNative"):
            apply_policy(gpt, document(mode="pynative"))

    @pytest.mark.usefixtures("graph_mode")
    def test_auto_is_graph_in_graph_mode(self, gpt: nn.Cell) -> None:
        plan = apply_policy(gpt, RECOMPUTE)
        assert plan.mode == "graph"
        assert plan.describe().startswith("dict: applied to Gpt in graph mode, ")

    def test_auto_is_pynative_otherwise(self, gpt: nn.Cell) -> None:
        plan = load_policy(RECOMPUTE)
        assert plan.mode == ""
        assert apply_policy(gpt, plan, mode="auto").mode == "pynative"

    def test_a_file_can_say_graph(self, gpt: nn.Cell) -> None:
        assert apply_policy(gpt, RECOMPUTE | {"mode": "graph"}).mode == "graph"

    def test_a_file_and_an_argument_must_agree(self, gpt: nn.Cell) -> None:
        with pytest.raises(PolicyError, match="dict says mode: graph, but mode='pynative' was given; the two must agr"):
            apply_policy(gpt, RECOMPUTE | {"mode": "graph"}, mode="pynative")

    def test_an_unknown_argument_is_an_error(self, gpt: nn.Cell) -> None:
        with pytest.raises(PolicyError, match="mode: got 'grahp', expected one of auto, pynative, graph; did you mean"):
            apply_policy(gpt, RECOMPUTE, mode="grahp")

    def test_another_mode_is_an_error(self) -> None:
        with pytest.raises(
            PolicyError, match="mode: got 'grap', expected 'auto', 'pynative' or 'graph'; did you mean 'gr"
        ):
            load_policy({"version": 1, "mode": "grap"})


class TestFormat:
    def test_the_native_format_is_the_default(self) -> None:
        assert (
            load_policy({"version": 1}, format="native").to_plain_values()
            == load_policy({"version": 1}).to_plain_values()
        )

    @pytest.mark.parametrize("name", ["nativ", "yaml", "", None, 3])
    def test_another_format_is_an_error_that_offers_names(self, name: Any) -> None:
        with pytest.raises(PolicyError, match=f"format: got {name!r}, expected 'native'"):
            load_policy({"version": 1}, format=name)
