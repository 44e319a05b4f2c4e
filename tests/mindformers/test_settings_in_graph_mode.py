"""What a converted `recompute_config` or `swap_config` names is what MindFormers' own `LayerSetting` does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel import PolicyError
from hyper_parallel.policy_file.mindformers import convert_mindformers
from tests.mindformers.layer_setting import Calls, Rules, layer_settings

INSIDE = [
    "attention_norm.norm",
    "ffn_norm.norm",
    "attention.wq.matmul",
    "attention.softmax",
    "feed_forward.mul",
    "feed_forward.w1.reshape",
    "feed_forward.w1.activation.silu",
    "feed_forward.w2.matmul",
]
"""Operators of a layer, named as in MindFormers' Llama."""

OPERATORS = {
    "norm": ("RmsNorm", "LayerNorm"),
    "matmul": ("MatMul",),
    "softmax": ("Softmax",),
    "mul": ("Mul",),
    "reshape": ("Reshape",),
    "silu": ("SiLU",),
}

MUL, SILU, RESHAPE = r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu", r"feed_forward\.w1\.reshape"
NORM = r".*\.norm"

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 all": ({"recompute_config": {"recompute": True}}, {"layers": 4}),
    "2 by chunk and stage": (
        {
            "recompute_config": {
                "recompute": [[14, 14], [14, 14]],
                "select_recompute": False,
                "select_comm_recompute": False,
                "parallel_optimizer_comm_recompute": False,
                "mp_comm_recompute": False,
            }
        },
        {"layers": 64, "stages": 2, "interleave": 2},
    ),
    "3 by stage": (
        {"recompute_config": {"recompute": [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]}},
        {"layers": 61, "stages": 16, "offset": [1] * 13 + [0] * 3},
    ),
    "4 one stage": ({"recompute_config": {"recompute": [16]}}, {"layers": 32}),
    "5 selected operators": (
        {
            "recompute_config": {
                "recompute": [1, 0],
                "select_recompute": {MUL: [31, 0], SILU: [31, 0], RESHAPE: [31, 0]},
            }
        },
        {"layers": 80, "stages": 2},
    ),
    "6 selected communication": (
        {
            "recompute_config": {
                "recompute": False,
                "select_recompute": {MUL: True, SILU: True},
                "select_comm_recompute": {NORM: [6, 2, 1, 0, 0, 0, 0, 0]},
            }
        },
        {"layers": 64, "stages": 8},
    ),
    "7 MindFormers' own patterns": (
        {
            "recompute_config": {
                "recompute": False,
                "select_recompute": True,
                "select_comm_recompute": [8, 8, 10, 11, 10, 7, 5, 4],
            }
        },
        {"layers": 96, "stages": 8},
    ),
    "8 all, and patterns": (
        {
            "recompute_config": {
                "recompute": True,
                "select_recompute": [r"mlp\.activation_func\.mul", r"input_layernorm\.cast"],
            }
        },
        {"layers": 8},
    ),
    "9 false by stage, patterns by chunk": (
        {"recompute_config": {"recompute": [False, False], "select_recompute": [[1, 2, 2, 5], [1, 3, 6, 5]]}},
        {"layers": 80, "stages": 4, "interleave": 2},
    ),
    "11 layer numbers, and swap": (
        {
            "recompute_config": {"recompute": False, "select_recompute": {"feed_forward": [0, 3]}},
            "swap_config": {
                "swap": True,
                "op_swap": [
                    {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]},
                    {"op_name": "attention", "backward_prefetch": 10, "layers": [3]},
                    {"op_name": "feed_forward", "backward_prefetch": 15, "layers": [1, 2]},
                ],
            },
        },
        {"layers": 4},
    ),
}
"""The shapes of public configurations that are for graph mode; numbers 10 and 12 are for PyNative mode."""

Said = dict[int, set[tuple[str, str, str]]]
"""By layer: an action, a cell inside the layer, and an operator (or nothing)."""


@pytest.fixture(scope="module")
def rules(unpacked: dict[str, Path]) -> Iterator[Rules]:
    with layer_settings(unpacked["2.1.0"]) as loaded:
        yield loaded


def converted(settings_: dict[str, Any], **options: Any) -> Said:
    """What the rules of a converted policy say."""
    said: Said = {layer: set() for layer in range(options["layers"])}
    words = {"must_recompute": "recompute", "must_swap": "swap", "must_save": "exclude"}
    for rule in convert_mindformers(settings_, **options).rules:
        cells = rule.rule["cells"].removeprefix("**.layers.").partition(".")[2]
        for layer in rule.layers:
            ops = {name: policy for name, policy in rule.rule.get("ops", {}).items() if name != "*"}
            if not rule.rule.get("ops", {}).get("*"):
                said[layer].add((words[rule.rule["policy"]], cells, ""))
            said[layer] |= {(words[policy], cells, name) for name, policy in ops.items()}
    for items in said.values():  # a part of a recomputed layer has a rule of its own for what it excludes
        if ("recompute", "", "") in items:
            items -= {item for item in items if item[0] == "recompute" and item[1]}
    return said


def written_down(calls: Calls) -> Said:
    """The same of MindFormers' calls: an operator counts for the part of the layer that it is in.

    Communication counts for every part of the layer: a pattern with a star is about all of them.
    """
    said: Said = {}
    for layer, of_layer in calls.items():
        said[layer] = set()
        for action, path in of_layer:
            last = path.split(".")[-1]
            if action.endswith("communication"):
                said[layer].add(("recompute", "*", "Collective"))
            elif last in OPERATORS:
                said[layer] |= {(action, path.split(".")[0], name) for name in OPERATORS[last]}
            else:
                said[layer].add((action, path, ""))
    return said


def beside_communication(said: Said) -> Said:
    """Without what a star says of the parts that have rules of their own."""
    return {
        layer: {item for item in items if item[2] != "Collective" or item[1] == "*"} for layer, items in said.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_of_public_configurations_names_what_mindformers_sets(rules: Rules, shape: str) -> None:
    content, options = SHAPES[shape]
    assert beside_communication(converted(content, **options)) == written_down(rules.calls(content, INSIDE, **options))


MCORE_INSIDE = [
    "mlp.mul",
    "mlp.activation_func.silu",
    "mlp.shared_experts.mul",
    "mlp.shared_experts.activation_func.silu",
]

MCORE: dict[str, dict[str, Any]] = {
    "MindFormers' own patterns": {"recompute_config": {"select_recompute": [2, 1]}},
    "layers": {"recompute_config": {"recompute": [2, 1]}},
    "swapped layers by their other names": {
        "swap_config": {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": [{"backward_prefetch": 1, "layers": [0, 5]}],
        }
    },
}


@pytest.mark.parametrize("case", MCORE)
def test_settings_of_mcore_models_name_what_mindformers_sets(rules: Rules, case: str) -> None:
    where: dict[str, Any] = {"layers": 6, "stages": 2, "legacy": False}
    assert converted(MCORE[case], **where) == written_down(rules.calls(MCORE[case], MCORE_INSIDE, **where))


def test_the_golden_vector_of_mindformers_documentation(rules: Rules) -> None:
    where = {"layers": 48, "stages": 5, "interleave": 2, "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]}
    done = convert_mindformers({"recompute_config": {"recompute": [2, 1, 0, 0, 0]}}, **where)
    counts = [[0] * 5, [0] * 5]
    for rule in done.rules:
        counts[rule.chunk][rule.stage] += len(rule.layers)
    assert counts == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    everything = convert_mindformers({"recompute_config": {"recompute": True}}, **where)
    counts = [[0] * 5, [0] * 5]
    for rule in everything.rules:
        counts[rule.chunk][rule.stage] += len(rule.layers)
    assert counts == [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]


EXCLUDING: dict[str, dict[str, Any]] = {
    "of a recomputed layer": {"recompute": [2, 0], "select_recompute_exclude": {MUL: [1, 1]}},
    "of a recomputed part": {"select_recompute": {"feed_forward": [2, 2]}, "select_recompute_exclude": {MUL: [1, 2]}},
    "the same pattern": {"select_recompute": {MUL: [2, 2], SILU: True}, "select_recompute_exclude": {MUL: [1, 0]}},
    "a pattern with a star": {
        "select_recompute": {MUL: True, SILU: True},
        "select_recompute_exclude": {r".*\.mul": False},
    },
}


@pytest.mark.parametrize("case", EXCLUDING)
def test_excluded_operators_are_those_that_mindformers_excludes(rules: Rules, case: str) -> None:
    content, options = {"recompute_config": EXCLUDING[case]}, {"layers": 8, "stages": 2}
    theirs = written_down(rules.calls(content, INSIDE, **options))
    ours = converted(content, **options)
    recomputed = {layer: {item for item in items if item[0] == "recompute"} for layer, items in theirs.items()}
    assert {layer: {item for item in items if item[0] == "recompute"} for layer, items in ours.items()} == recomputed
    for layer, items in theirs.items():  # where nothing is recomputed around it, excluding does nothing
        around = {"", "feed_forward"} & {cells for action, cells, name in items if action == "recompute" and not name}
        assert {item for item in ours[layer] if item[0] == "exclude"} == {
            item for item in items if item[0] == "exclude" and around
        }


SWAPPING: dict[str, dict[str, Any]] = {
    "MindFormers' own pattern": {"swap_config": {"swap": True}},
    "layers": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 3]}]}},
    "every layer": {"swap_config": {"swap": True, "layer_swap": {"backward_prefetch": 1, "layers": True}}},
    "several names": {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": ["attention", r"feed_forward\.mul"], "backward_prefetch": 1, "layers": [1, 2]}],
        }
    },
    "recomputed layers": {
        "recompute_config": {"recompute": [0, 2], "select_recompute": {"attention": [1, 2]}},
        "swap_config": {"swap": True, "op_swap": [{"op_name": MUL, "backward_prefetch": 1, "layers": [1]}]},
    },
}


@pytest.mark.parametrize("case", SWAPPING)
def test_swapped_layers_and_operators_are_those_that_mindformers_swaps(rules: Rules, case: str) -> None:
    inside = [*INSIDE, "attention.flash_attention"]
    theirs = written_down(rules.calls(SWAPPING[case], inside, layers=5))
    attention = {
        ("swap", "*", "Attention") if name == "attention.flash_attention" else (action, name, operator)
        for action, name, operator in set().union(*theirs.values())
    }
    if case == "MindFormers' own pattern":
        assert converted(SWAPPING[case], layers=5) == dict.fromkeys(range(5), attention)
    else:
        assert converted(SWAPPING[case], layers=5) == theirs


def test_where_recompute_and_swap_meet_recompute_wins(rules: Rules) -> None:
    content = {
        "recompute_config": {"recompute": [0, 1]},
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [1, 2]}]},
    }
    done = convert_mindformers(content, layers=3)
    assert [(rule.layers, rule.rule["policy"]) for rule in done.rules] == [
        ((0, 1), "must_recompute"),
        ((2,), "must_swap"),
    ]
    assert any("recompute wins" in note.text for note in done.notes)


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Layers, stages, chunks and an offset that fits."""
    stages, interleave = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parts = stages * interleave
    layers = draw(st.integers(parts, parts * 4))
    offset = [0] * parts
    for index in draw(st.permutations(range(parts)))[: layers % parts]:
        offset[index] += 1
    rows = [offset[chunk * stages : (chunk + 1) * stages] for chunk in range(interleave)]
    if parts == 1:
        return {"layers": layers}
    return {"layers": layers, "stages": stages, "interleave": interleave, "offset": rows if interleave > 1 else rows[0]}


def has_a_list(rows: list[Any]) -> bool:
    """Without one, a list is about stages, not about chunks."""
    return any(isinstance(row, list) for row in rows)


@st.composite
def counts(draw: st.DrawFn, where: dict[str, Any]) -> Any:
    stages, interleave = where.get("stages", 1), where.get("interleave", 1)
    one = st.booleans() | st.integers(0, 6)
    row = st.lists(one, min_size=stages, max_size=stages)
    return draw(
        st.booleans()
        | st.lists(one, max_size=stages)
        | st.lists(row, min_size=interleave, max_size=interleave)
        | st.lists(row | st.booleans(), min_size=interleave, max_size=interleave).filter(has_a_list)
    )


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_counts_in_any_pipeline_name_what_mindformers_sets(rules: Rules, data: st.DataObject) -> None:
    where = data.draw(pipelines())
    content = {
        "recompute_config": {
            "recompute": data.draw(counts(where)),
            "select_recompute": {MUL: data.draw(counts(where)), "attention": data.draw(counts(where))},
        }
    }
    theirs = written_down(rules.calls(_copied(content), INSIDE, **where))
    assert converted(content, **where) == theirs


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=pipelines())
def test_every_layer_is_in_the_stage_in_which_mindformers_has_it(rules: Rules, where: dict[str, Any]) -> None:
    where = {"stages": 1, "interleave": 1, "offset": 0, **where}
    pipeline = convert_mindformers({"recompute_config": {}}, **where).pipeline
    assert [pipeline.place_of(layer)[1] for layer in range(where["layers"])] == rules.stages(**where)


@pytest.mark.parametrize("row", [[3, 2], [1, 0]])
def test_zero_bubble_v_sends_the_second_chunk_backwards(rules: Rules, row: list[int]) -> None:
    content = {
        "recompute_config": {"recompute": [[1, 2], row]},
        "parallel": {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}},
        "parallel_config": {"pipeline_stage": 2},
        "model": {"model_config": {"num_layers": 13, "pp_interleave_num": 2, "offset": [[0, 1], [0, 0]]}},
    }
    where = {"layers": 13, "stages": 2, "interleave": 2, "offset": [[0, 1], [0, 0]], "zero_bubble_v": True}
    done = convert_mindformers(content)
    theirs = rules.calls({"recompute_config": {"recompute": [[1, 2], list(row)]}}, INSIDE, **where)
    assert {layer for rule in done.rules for layer in rule.layers} == {
        layer for layer, calls in theirs.items() if calls
    }
    assert [done.pipeline.place_of(layer)[1] for layer in range(13)] == rules.stages(**where)


def test_a_list_longer_than_the_stages_is_an_index_error_there_and_a_message_here(rules: Rules) -> None:
    content = {"recompute_config": {"recompute": [1, 2, 3]}}
    with pytest.raises(IndexError):
        rules.calls(_copied(content), INSIDE, layers=4, stages=2)
    with pytest.raises(PolicyError, match=r"\[1, 2, 3\] is about 3 stages, but there are 2"):
        convert_mindformers(content, layers=4, stages=2)


def test_booleans_where_layers_are_meant_pass_there_and_are_refused_here(rules: Rules) -> None:
    content = {"recompute_config": {"recompute": [False, False]}, "swap_config": {"swap": True}}
    assert ("recompute", "") in rules.calls(_copied(content), INSIDE, layers=2)[0]
    with pytest.raises(PolicyError, match="MindFormers would take false for layer 0"):
        convert_mindformers(content, layers=2)


def _copied(content: Any) -> Any:
    """MindFormers changes the lists that it gets."""
    if isinstance(content, dict):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(item) for item in content] if isinstance(content, list) else content
