"""Conversions: which rules they give, and what the written file says."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn

from hyper_parallel import PolicyError, apply_policy, load_policy
from hyper_parallel.policy_file.mindformers import as_yaml, convert_mindformers, policy_of_mindformers
from tests.policy_file.mindformers.blocks import MUL, full, graph, kinds, swapping


@pytest.mark.parametrize(
    "content",
    [
        {"recompute": [1, 0], "select_recompute": False},
        {"recompute": False, "swap": True, "op_swap": [{"op_name": "mlp", "backward_prefetch": 1, "layers": [0]}]},
        {"cpu_offloading": True, "cpu_offloading_num_layers": [{"backward_prefetch": 1, "layers": [0]}]},
        {"mode": "full", "full_recompute_layer": [0]},
    ],
)
def test_the_content_of_a_block_is_enough(content: dict[str, Any]) -> None:
    assert convert_mindformers(content, layers=4, stages=2).rules


def test_what_the_configuration_says_about_stages_is_read() -> None:
    settings = {
        **graph(recompute=[[1, 0], [0, 2]]),
        "parallel_config": {"pipeline_stage": 2},
        "parallel": {"pipeline_config": {"pipeline_interleave": True}},
        "model": {"model_config": {"num_layers": 9, "pp_interleave_num": 2, "offset": [[1, 0], [0, 0]]}},
    }
    done = convert_mindformers(settings)
    assert done.pipeline.counts == [[3, 2], [2, 2]]
    assert [(rule.stage, rule.chunk, rule.layers) for rule in done.rules] == [(0, 0, (0,)), (1, 1, (7, 8))]


def test_an_interleave_that_is_not_switched_on_does_not_count() -> None:
    settings = {**graph(recompute=True), "model": {"model_config": {"num_layers": 4, "pp_interleave_num": 2}}}
    done = convert_mindformers(settings)
    assert done.pipeline.interleave == 1
    assert "pp_interleave_num" in {note.key for note in done.notes}


def test_layers_of_each_stage_in_pynative_mode_are_read() -> None:
    settings = {
        **full("0-5"),
        "parallelism": {"pipeline_parallel": 2, "pipeline_parallel_layers_per_stage": ["0-1", "2-5"]},
        "model": {"num_hidden_layers": 6},
    }
    stages = convert_mindformers(settings).policy["stages"]
    assert [entry["rules"][0]["cells"] for entry in stages] == ["**.layers.[0-1]", "**.layers.[2-5]"]


@pytest.mark.parametrize("per_stage", [["0-1"], ["0-1", "3-5"], ["0-1", "2-5,6"], ["0-1", "x"], ["1-0", "2-5"], "0-5"])
def test_wrong_layers_of_a_stage_are_refused(per_stage: Any) -> None:
    settings = {
        **full(0),
        "parallelism": {"pipeline_parallel": 2, "pipeline_parallel_layers_per_stage": per_stage},
        "model": {"num_hidden_layers": 6},
    }
    with pytest.raises(PolicyError, match="pipeline_parallel_layers_per_stage"):
        convert_mindformers(settings)


def test_a_net_of_each_chunk_has_an_entry_of_its_own_in_pynative_mode() -> None:
    done = convert_mindformers(full("0-7"), layers=8, stages=2, interleave=2)
    assert [entry["rules"][0]["cells"] for entry in done.policy["stages"]] == [
        "**.layers.[0-1]",
        "**.layers.[2-3]",
        "**.layers.[4-5]",
        "**.layers.[6-7]",
    ]
    whole = convert_mindformers(full("0-7"), layers=8, stages=2, interleave=2, per_chunk=False)
    assert len(whole.policy["stages"]) == 2


def test_layers_for_multi_token_prediction_come_after_the_decoder() -> None:
    done = convert_mindformers(full("3-4"), layers=4, mtp=1)
    assert [rule.rule["cells"] for rule in done.rules] == ["**.decoder.layers.3", "**.mtp.layers.0"]


def test_in_graph_mode_they_get_what_the_last_layer_gets() -> None:
    cells = [
        rule.rule["cells"] for rule in convert_mindformers(graph(recompute=[0, 1]), layers=2, stages=2, mtp=1).rules
    ]
    assert cells == ["**.decoder.layers.1", "**.mtp.layers.0"]


def test_where_patterns_meet_on_one_operator_recompute_wins_over_swap_and_excluding_over_both() -> None:
    settings = {
        **graph(recompute=[0], select_recompute={MUL: [0]}),
        **swapping(op_swap=[{"op_name": r"feed_forward\.w1\.mul", "backward_prefetch": 1, "layers": [0, 1]}]),
    }
    rules = convert_mindformers(settings, layers=4).policy["rules"]
    assert {rule["cells"]: rule.get("ops", {}).get("Mul") for rule in rules} == {
        "**.layers.0": None,
        "**.layers.1.feed_forward": "must_swap",
    }
    both = {
        **graph(select_recompute={MUL: [1]}),
        **swapping(op_swap=[{"op_name": r"feed_forward\.w1\.mul", "backward_prefetch": 1, "layers": [1]}]),
    }
    done = convert_mindformers(both, layers=4)
    assert [rule.rule["ops"]["Mul"] for rule in done.rules] == ["must_recompute"]
    assert "meaning" in {note.kind for note in done.notes if note.key == "swap_config, op_swap"}


def test_layers_are_loaded_ahead_as_mindformers_does() -> None:
    settings = {"swap": {"enable": True, "default_prefetch": 2, "layer_swap": [{"layers": ["0-1"]}]}}
    assert policy_of_mindformers(settings, layers=4)["prefetch"] == [
        {"load": "**.layers.0", "at": "**.layers.2"},
        {"load": "**.layers.1", "at": "**.layers.3"},
    ]


def test_communication_that_is_a_function_is_computed_again_as_collectives_of_its_part() -> None:
    settings = {"recompute_comm": {"enable": True, "select_module": {r"self_attention\.gather_fn": [0], "mlp": [1]}}}
    done = convert_mindformers(settings, layers=4)
    assert [(rule.rule["cells"], rule.rule["ops"]) for rule in done.rules] == [
        ("**.layers.0.self_attention", {"Collective": "must_recompute", "*": "prefer_save"})
    ]
    assert [note.kind for note in done.notes if note.text.startswith("'mlp' of layers 1")] == ["unapplied"]


def test_an_excluded_slot_keeps_the_collectives_of_its_part() -> None:
    settings = full(0, exclude_op={r"mlp\.input\.allgather": [0]})
    assert [rule.rule for rule in convert_mindformers(settings, layers=4).rules] == [
        {"cells": "**.layers.0", "policy": "must_recompute"},
        {"cells": "**.layers.0.mlp", "policy": "must_recompute", "ops": {"Collective": "must_save"}},
    ]


def test_a_selected_slot_is_reported_as_never_applied() -> None:
    settings = {"recompute": {"mode": "select", "select_module": {"mlp.output.reducescatter": [0]}}}
    done = convert_mindformers(settings, layers=4)
    assert not done.rules
    assert "unapplied" in {note.kind for note in done.notes}


def test_swap_with_stages_is_said_and_has_no_pairs() -> None:
    settings = {"swap": {"enable": True, "layer_swap": [{"layers": ["0"]}]}}
    assert "prefetch" not in policy_of_mindformers(settings, layers=4, stages=2)
    assert kinds(settings, stages=2)["swap"] == "different"


def test_the_written_file_says_the_same_as_the_dict(tmp_path: Path) -> None:
    settings = {
        **graph(recompute=[1, 0], select_recompute={MUL: [2, 1]}, select_comm_recompute={r".*\.norm": [1, 1]}),
        "recompute_comm": None,
    }
    done = convert_mindformers(settings, layers=4, stages=2)
    text = as_yaml(done)
    assert yaml.safe_load(text) == done.policy
    (tmp_path / "policy.yaml").write_text(text)
    assert load_policy(tmp_path / "policy.yaml", stage=1).describe()


def test_the_written_file_says_where_every_rule_is_from() -> None:
    done = convert_mindformers(graph(recompute=[2, 0], select_recompute={MUL: [0, 1]}), layers=8, stages=2)
    lines = as_yaml(done).splitlines()
    assert lines[2].startswith("# Layer numbers are global")
    assert "      # layers 0-1: recompute_config, recompute" in lines
    assert "      # layer 4: recompute_config, select_recompute" in lines
    assert "  # stage 1: layers 4-7" in lines


def test_load_policy_reads_mindformers_settings(write: Callable[[str], Path], gpt: nn.Cell) -> None:
    path = write("recompute_config:\n  recompute: [2]\n")
    plan = apply_policy(gpt, load_policy(path, format="mindformers", layers=4))
    assert [(row.path, row.policy_text) for row in plan.rows] == [
        ("layers.0", "must_recompute"),
        ("layers.1", "must_recompute"),
    ]
    plan.remove()


def test_options_are_refused_for_a_native_file() -> None:
    with pytest.raises(TypeError, match="layers: options are for format='mindformers'"):
        load_policy({"version": 1}, layers=4)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["", "0-1", "mlp", MUL, r".*\.norm", "a|b", "("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["layers", "op_name", "backward_prefetch", "mlp", MUL, "mode", "enable", "layer_swap"]),
            inner,
        )
    ),
    max_leaves=8,
)
GRAPH_KEYS = ["recompute", "select_recompute", "select_comm_recompute", "select_recompute_exclude", "x"]
SWAP_KEYS = ["swap", "layer_swap", "op_swap", "default_prefetch"]
PYNATIVE_KEYS = ["mode", "full_recompute_layer", "select_module", "exclude_op", "enable", "layer_swap", "op_swap"]


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "recompute_config": VALUES | st.dictionaries(st.sampled_from(GRAPH_KEYS), VALUES),
            "swap_config": VALUES | st.dictionaries(st.sampled_from(SWAP_KEYS), VALUES),
        },
    )
    | st.fixed_dictionaries(
        {},
        optional={
            key: VALUES | st.dictionaries(st.sampled_from(PYNATIVE_KEYS), VALUES)
            for key in ("recompute", "recompute_comm", "swap")
        },
    ),
    st.integers(1, 3),
)
def test_any_settings_convert_or_are_refused(content: dict[str, Any], stages: int) -> None:
    with suppress(PolicyError):
        assert as_yaml(convert_mindformers(content, layers=6, stages=stages))
