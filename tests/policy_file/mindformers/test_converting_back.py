"""From policy files to MindFormers' settings, for both modes."""

import re
from typing import Any

import pytest

from hyper_parallel import PolicyError
from hyper_parallel.policy_file.mindformers import convert_mindformers, mindformers_of_policy

LAYERS = 6


def rule(cells: str | None = None, policy: str = "must_recompute", **more: Any) -> dict[str, Any]:
    return {**({} if cells is None else {"cells": cells}), "policy": policy, **more}


def back(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return mindformers_of_policy({"version": 1, "rules": list(rules), **more}, layers=LAYERS)


SAID: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "layers": ([rule("layers.[0-2]")], {"recompute": {"mode": "full", "full_recompute_layer": ["0-2"]}}),
    "all layers": ([rule("decoder.layers.*")], {"recompute": {"mode": "full", "full_recompute_layer": ["0-5"]}}),
    "layers by number": (
        [rule(layers="0-1, 4")],
        {"recompute": {"mode": "full", "full_recompute_layer": ["0-1", "4"]}},
    ),
    "parts of layers": (
        [rule("layers.[0-2].mlp"), rule(layers="4", cells="mlp.*_fc1")],
        {"recompute": {"mode": "select", "select_module": {"mlp": ["0-2"], r"mlp\.[^.]*_fc1": ["4"]}}},
    ),
    "both": (
        [rule("layers.0"), rule("layers.[1-2].mlp")],
        {"recompute": {"mode": "select", "full_recompute_layer": ["0"], "select_module": {"mlp": ["1-2"]}}},
    ),
    "excluded parts": (
        [rule("layers.[0-2]"), rule("layers.[0-1].mlp", "must_save")],
        {"recompute": {"mode": "full", "full_recompute_layer": ["0-2"], "exclude_op": {"mlp": ["0-1"]}}},
    ),
    "parts that the rule itself excludes": (
        [rule("layers.0", exclude=["mlp.fc1"])],
        {"recompute": {"mode": "full", "full_recompute_layer": ["0"], "exclude_op": {r"mlp\.fc1": ["0"]}}},
    ),
    "swapped layers": (
        [rule("layers.[0-2]", "must_swap")],
        {"swap": {"enable": True, "default_prefetch": 1, "layer_swap": [{"layers": ["0-2"]}]}},
    ),
    "swapped parts": (
        [rule("**.layers.1.mlp", "must_swap")],
        {"swap": {"enable": True, "default_prefetch": 1, "op_swap": [{"op_name": "mlp", "layers": ["1"]}]}},
    ),
    "swapped inputs": (
        [rule("layers.0", swap_inputs=True)],
        {
            "recompute": {"mode": "full", "full_recompute_layer": ["0"]},
            "swap": {"enable": True, "default_prefetch": 1, "layer_swap": [{"layers": ["0"]}]},
        },
    ),
    "presets": (
        [rule("layers.0", preset=["full", "inputs_on_host"])],
        {
            "recompute": {"mode": "full", "full_recompute_layer": ["0"]},
            "swap": {"enable": True, "default_prefetch": 1, "layer_swap": [{"layers": ["0"]}]},
        },
    ),
    "the last rule wins": (
        [rule("layers.[0-3]"), rule("layers.[2-3]", "prefer_save")],
        {"recompute": {"mode": "full", "full_recompute_layer": ["0-1"]}},
    ),
    "nothing": ([], {}),
}


@pytest.mark.parametrize("case", SAID)
def test_what_fits_is_written_in_mindformers_words(case: str) -> None:
    rules, settings = SAID[case]
    assert back(*rules) == settings


@pytest.mark.parametrize("case", [case for case in SAID if case != "nothing"])
def test_what_was_written_converts_to_the_same_settings_again(case: str) -> None:
    settings = SAID[case][1]
    done = convert_mindformers(settings, layers=LAYERS)
    again = mindformers_of_policy({**done.policy, "prefetch": list(done.policy.get("prefetch", []))}, layers=LAYERS)
    assert again == settings


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "operators": ([rule("layers.0", ops={"MatMul": "must_save"})], "nothing for ops"),
    "a preset": ([rule("layers.0", preset="selective")], "nothing for selective"),
    "a class": ([rule(**{"class": "Block"})], "nothing for class"),
    "values compared": ([rule("layers.0", determinism_check="values")], "nothing for determinism_check"),
    "tensors": ([rule("layers.0", "must_swap", tensors={"min_bytes": 1})], "nothing for tensors"),
    "no layers": ([rule("head")], "'head' must name layers by number"),
    "an expression": ([rule("re:layers[.]0")], "must name layers by number"),
    "a layer that isn't there": ([rule("layers.6")], "names layer 6, but there are 6 layers, 0 to 5"),
    "no multi-token prediction": ([rule("mtp.layers.0")], "there are none for multi-token prediction"),
    "a region in a region": ([rule("layers.0"), rule("layers.0.mlp")], "MindFormers has only the outer one"),
    "keeping outside": ([rule("layers.0.mlp", "must_save")], "excludes only from recomputing"),
    "the last layer": ([rule("layers.5", "must_swap")], "swaps layers up to 4 only"),
    "overlapping patterns": (
        [rule("layers.0.*"), rule("layers.0.mlp", "must_swap")],
        "in MindFormers both would count",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_the_rule(case: str) -> None:
    rules, message = REFUSED[case]
    with pytest.raises(PolicyError, match=message):
        back(*rules)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"default": "must_recompute"}, "default: MindFormers has none but keeping"),
        ({"swap": {"tier": "host"}}, "swap: MindFormers' settings have nothing for it"),
        (
            {"prefetch": [{"load": "layers.0", "at": "layers.2"}], "rules": [rule("layers.[0-1]", "must_swap")]},
            "every swapped layer the same number of layers ahead",
        ),
        (
            {"stages": [{"rules": [rule("layers.0", "must_swap")]}, {"rules": []}]},
            "refuses swap with pipeline stages",
        ),
    ],
)
def test_what_a_file_says_besides_is_refused_where_it_does_not_fit(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        mindformers_of_policy({"version": 1, **more}, layers=LAYERS)


def test_stages_are_drawn_together_by_global_numbers() -> None:
    stages = [{"rules": [rule("layers.[0-1]")]}, {"rules": [rule("layers.[3-4]")]}]
    settings = mindformers_of_policy({"version": 1, "stages": stages}, layers=LAYERS)
    assert settings["recompute"]["full_recompute_layer"] == ["0-1", "3-4"]


def test_layers_for_multi_token_prediction_are_numbered_after_the_decoder() -> None:
    policy = {"version": 1, "rules": [rule("**.mtp.layers.0")]}
    assert mindformers_of_policy(policy, layers=LAYERS, mtp=1)["recompute"]["full_recompute_layer"] == ["6"]


def test_pairs_that_load_ahead_are_the_prefetch() -> None:
    pairs = [{"load": f"layers.{layer}", "at": f"layers.{layer + 2}"} for layer in (0, 1)]
    assert back(rule("layers.[0-1]", "must_swap"), prefetch=pairs)["swap"]["default_prefetch"] == 2


def graph(*rules: dict[str, Any], **options: Any) -> dict[str, Any]:
    return mindformers_of_policy(
        {"version": 1, "rules": list(rules)}, **{"layers": LAYERS, "dialect": "graph", **options}
    )


GRAPH: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "all layers": ([rule("layers.*")], {}, {"recompute_config": {"recompute": True}}),
    "the first layers of stages": (
        [rule("layers.0"), rule("layers.[3-4]")],
        {"stages": 2},
        {"recompute_config": {"recompute": [1, 2]}},
    ),
    "the first layers of chunks": (
        [rule("layers.0"), rule("layers.4")],
        {"layers": 8, "stages": 2, "interleave": 2},
        {"recompute_config": {"recompute": [[1, 0], [1, 0]]}},
    ),
    "parts of layers": (
        [rule("layers.[0-1].mlp"), rule("layers.3.attention.w*")],
        {"stages": 2},
        {"recompute_config": {"select_recompute": {"mlp": [2, 0], r"attention\.w.*": [0, 1]}}},
    ),
    "parts of the layers after those that are recomputed": (
        [rule("layers.0"), rule("layers.[1-2].mlp")],
        {},
        {"recompute_config": {"recompute": [1], "select_recompute": {"mlp": [3]}}},
    ),
    "layer numbers beside swap": (
        [rule("layers.[2-3]"), rule("layers.4", "must_swap"), rule("layers.[0-1].mlp", "must_swap")],
        {},
        {
            "recompute_config": {"recompute": [2, 3]},
            "swap_config": {
                "swap": True,
                "layer_swap": [{"backward_prefetch": 1, "layers": [4]}],
                "op_swap": [{"op_name": "mlp", "backward_prefetch": 1, "layers": [0, 1]}],
            },
        },
    ),
    "layers for multi-token prediction with the last one": (
        [rule("decoder.layers.*"), rule("mtp.layers.0")],
        {"mtp": 1},
        {"recompute_config": {"recompute": True}},
    ),
}


@pytest.mark.parametrize("case", GRAPH)
def test_what_fits_graph_mode_is_written_in_its_words(case: str) -> None:
    rules, options, settings = GRAPH[case]
    assert graph(*rules, **options) == settings


@pytest.mark.parametrize("case", GRAPH)
def test_and_converts_to_the_same_layers_again(case: str) -> None:
    _, options, settings = GRAPH[case]
    done = convert_mindformers(settings, **{"layers": LAYERS, **options})
    again = mindformers_of_policy(done.policy, **{"layers": LAYERS, **options}, dialect="graph")
    assert again == settings


NO_GRAPH: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a gap": (
        [rule("layers.0"), rule("layers.2")],
        {},
        "0, 2 of 0-5; in graph mode MindFormers counts the first layers",
    ),
    "not from the first one on": ([rule("layers.1")], {}, "1 of 0-5"),
    "swapped inputs": ([rule("layers.0", swap_inputs=True)], {}, "recompute wins over swap"),
    "a swapped part of a recomputed layer": (
        [rule("layers.0"), rule("layers.0.mlp", "must_swap")],
        {},
        "recompute wins over swap",
    ),
    "a part that runs once": (
        [rule("layers.0"), rule("layers.0.mlp", "must_save")],
        {},
        "excludes only operators from recomputing",
    ),
    "any depth": ([rule("layers.*.**.norm")], {}, "one name, or .*, per level"),
    "multi-token prediction alone": (
        [rule("mtp.layers.0")],
        {"mtp": 1},
        "layers for multi-token prediction get what the last layer gets",
    ),
    "an offset that doesn't fit": ([], {"stages": 4}, "must add up to 2"),
}


@pytest.mark.parametrize("case", NO_GRAPH)
def test_what_does_not_fit_graph_mode_is_refused(case: str) -> None:
    rules, options, message = NO_GRAPH[case]
    with pytest.raises(PolicyError, match=re.escape(message)):
        graph(*rules, **options)


def test_pairs_that_load_ahead_have_no_words_in_graph_mode() -> None:
    policy = {
        "version": 1,
        "prefetch": [{"load": "layers.0", "at": "layers.1"}],
        "rules": [rule("layers.0", "must_swap")],
    }
    with pytest.raises(PolicyError, match="loads operators ahead, not layers"):
        mindformers_of_policy(policy, layers=LAYERS, dialect="graph")


def test_a_dialect_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="legacy"):
        mindformers_of_policy({"version": 1}, layers=LAYERS, dialect="legacy")


def test_more_layers_than_any_net_has_are_refused() -> None:
    with pytest.raises(PolicyError, match="layers must be at least 1 and at most 10,000"):
        mindformers_of_policy({"version": 1}, layers=10**9)
