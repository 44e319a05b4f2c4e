"""Conversions: what is said aloud, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import PolicyError
from hyper_parallel.policy_file.mindformers import convert_mindformers
from tests.policy_file.mindformers.blocks import MUL, full, graph, kinds, swapping

SAID = {
    "mp_comm_recompute": (graph(mp_comm_recompute=True), "recompute_config, mp_comm_recompute", "inert"),
    "parallel_optimizer_comm_recompute": (
        graph(parallel_optimizer_comm_recompute=True),
        "recompute_config, parallel_optimizer_comm_recompute",
        "inert",
    ),
    "slicing beside a list": (
        graph(recompute=[1], recompute_slice_activation=True),
        "recompute_config, recompute_slice_activation",
        "inert",
    ),
    "patterns of recomputed layers": (
        graph(recompute=True, select_recompute={MUL: True}),
        "recompute_config, select_recompute",
        "inert",
    ),
    "excluding nothing": (
        graph(recompute=False, select_recompute_exclude={MUL: True}),
        "recompute_config, select_recompute_exclude",
        "inert",
    ),
    "excluding without patterns": (
        graph(recompute=True, select_recompute_exclude=True),
        "recompute_config, select_recompute_exclude",
        "inert",
    ),
    "lists beside swap": (
        {**graph(recompute=[1]), **swapping(layer_swap=[])},
        "recompute_config",
        "meaning",
    ),
    "swap that is off": ({"swap_config": {"swap": False, "layer_swap": []}}, "use_legacy", "assumed"),
    "a prefetch beside lists": (
        swapping(default_prefetch=2, layer_swap=[{"backward_prefetch": 1, "layers": [0]}]),
        "swap_config, default_prefetch",
        "inert",
    ),
    "neither of the lists": (swapping(), "swap_config", "different"),
    "no patterns": (graph(select_recompute=True), "recompute_config, select_recompute", "different"),
    "mode None": ({"recompute": {"mode": "None", "exclude_op": {"mlp": [0]}}}, "recompute, exclude_op", "inert"),
    "patterns beside mode full": (full(0, select_module={"mlp": [0]}), "recompute, select_module", "inert"),
    "swap without enable": ({"swap": {"layer_swap": [{"layers": [0]}]}}, "swap", "inert"),
    "an unescaped dot": (
        {"recompute": {"mode": "select", "select_module": {"mlp.fc": [0]}}},
        "recompute, select_module",
        "assumed",
    ),
    "communication": (
        {"recompute_comm": {"enable": True, "select_module": {"mlp": [0]}}},
        "recompute_comm, select_module",
        "unapplied",
    ),
    "communication that is off": (
        {"recompute_comm": {"select_module": {"mlp": [0]}}},
        "recompute_comm, select_module",
        "inert",
    ),
    "the optimizer's swap": ({**full(0), "optimizer": {"swap": True}}, "optimizer, swap", "different"),
    "prediction": ({**graph(recompute=True), "run_mode": "predict"}, "run_mode", "inert"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_reader_must_know_is_said(case: str) -> None:
    settings, key, kind = SAID[case]
    if case == "swap that is off":
        settings = {**settings, "recompute_config": {}}
    assert kinds(settings)[key] == kind


REFUSED = {
    "a list longer than the stages": (graph(recompute=[1, 2, 3]), {"stages": 2}, r"about 3 stages, but there are 2"),
    "more chunks than there are": (graph(recompute=[[1], [2]]), {}, r"about 2 interleave chunks, but there is 1"),
    "a chunk with too few stages": (
        graph(recompute=[[1], [2]]),
        {"stages": 2, "interleave": 2},
        r"chunk 0: \[1\] is about 1 stages, but there are 2",
    ),
    "a count below 0": (graph(recompute=[-1]), {}, r"stage 0 has -1, expected a count"),
    "a word for counts": (graph(recompute="yes"), {}, r"got 'yes', expected true, false, or a list"),
    "nothing for counts": (graph(recompute=None), {}, r"got None, expected true, false, or a list"),
    "booleans for layers": (
        {**graph(recompute=[False, False]), **swapping(layer_swap=[])},
        {},
        r"has false where a layer number is meant",
    ),
    "a layer that isn't there": (
        swapping(layer_swap=[{"backward_prefetch": 1, "layers": [4]}]),
        {},
        r"layer 4 isn't there: the net has 4 layers, 0 to 3",
    ),
    "a list of patterns beside swap": (
        {**graph(select_recompute=[MUL]), **swapping(layer_swap=[])},
        {},
        r"MindFormers wants the layers of each pattern",
    ),
    "no prefetch": (swapping(layer_swap=[{"layers": [0]}]), {}, r"backward_prefetch: it is missing"),
    "a prefetch of 0": (swapping(layer_swap=[{"backward_prefetch": 0, "layers": [0]}]), {}, r"got 0"),
    "all layers with two prefetches": (
        swapping(layer_swap=[{"backward_prefetch": 1, "layers": True}, {"backward_prefetch": 2, "layers": [0]}]),
        {},
        r"`layers: True` beside entries with other prefetches",
    ),
    "both names of one key": (swapping(cpu_offloading=True), {}, r"which are one setting"),
    "an unknown key": (graph(recompte=True), {}, r"unknown key; did you mean 'recompute'"),
    "an unknown PyNative key": (full(0, select_modul=1), {}, r"unknown key; did you mean 'select_module'"),
    "slicing": (graph(recompute=True, recompute_slice_activation=True), {}, r"--leave-out recompute_slice_activation"),
    "slicing of mcore": (
        {**graph(recompute_slice_activation=True), "use_legacy": False},
        {},
        r"MindFormers refuses it for mcore",
    ),
    "a random operator": (
        graph(select_recompute={r"attention\.drop": True}),
        {"operators": {"drop": "Dropout"}},
        r"can't be done here.*Dropout can't be MUST_RECOMPUTE",
    ),
    "a view to swap": (
        swapping(op_swap=[{"op_name": r"mlp\.reshape", "backward_prefetch": 1, "layers": [0]}]),
        {},
        r"Reshape can't be MUST_SWAP",
    ),
    "excluded and swapped": (
        {**full(0, exclude_op={"mlp": [0]}), "swap": {"enable": True, "op_swap": [{"op_name": "mlp", "layers": [0]}]}},
        {},
        r"mlp: in layers 0 it is excluded from recomputing, and swapped",
    ),
    "a part of no operator's name": (full(0, exclude_op=["matmu1"]), {}, r"'matmu1' is in the name of no operator"),
    "nothing for a part of a name": (full(0, exclude_op=[" "]), {}, r"expected a part of an operator's name"),
    "a list by stage under zero_bubble_v": (
        {
            **graph(recompute=[1, 1]),
            "parallel": {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}},
            "model": {"model_config": {"pp_interleave_num": 2}},
        },
        {"stages": 2},
        r"zero_bubble_v takes one list per interleave chunk",
    ),
    "a word in a list of chunks": (
        graph(recompute=[["a", 1]]),
        {"stages": 2},
        r"chunk 0 is \['a', 1\], expected true, false, or a list of counts",
    ),
    "a word for layers": (
        swapping(layer_swap=[{"backward_prefetch": 1, "layers": "all"}]),
        {},
        r"got 'all', expected true, false, or a list of layer numbers",
    ),
    "a word in a list of layers": (
        swapping(layer_swap=[{"backward_prefetch": 1, "layers": ["0"]}]),
        {},
        r"has '0', expected layer numbers from 0 to 3",
    ),
    "no pattern": (graph(select_recompute={3: True}), {}, r"'3' must be a pattern"),
    "an offset that doesn't add up": (graph(recompute=True), {"layers": 5, "stages": 2}, r"must add up to 1"),
    "an offset for other stages": (
        graph(recompute=True),
        {"layers": 5, "stages": 2, "offset": [1, 0, 0]},
        r"a list with one per stage \(2\)",
    ),
    "an offset that empties a stage": (
        graph(recompute=True),
        {"layers": 6, "stages": 3, "offset": [2, -2, 0]},
        r"leaves a stage without layers",
    ),
    "no range": (full("0-1-2"), {}, r"got '0-1-2', expected a layer such as 5, or a range"),
    "true for a layer": (full(True), {}, r"got True, expected a layer"),
    "layers that fall": (full(2, "0-1"), {}, r"layers must rise"),
    "an empty range": (full("3-1"), {}, r"the range '3-1' is empty; write '1-3'"),
    "two dialects": ({**graph(recompute=True), **full(0)}, {}, r"are two dialects"),
    "nothing": ({"model": {}}, {}, r"nothing to convert"),
    "a block that is no mapping": ({"recompute_config": True}, {}, r"recompute_config must be a mapping"),
    "an operator twice": (
        {"swap": {"enable": True, "op_swap": [{"op_name": "mlp", "layers": [0]}, {"op_name": "mlp", "layers": [1]}]}},
        {},
        r"'mlp' is named twice",
    ),
    "layers that don't divide": (full(0), {"layers": 5, "stages": 2}, r"can't be split evenly"),
    "layers said nowhere": (full(0), {"layers": None}, r"give layers= \(--layers N\)"),
    "an offset in PyNative mode": (full(0), {"offset": [0]}, r"offset is for graph mode"),
    "old models in PyNative mode": (full(0), {"legacy": True}, r"legacy is for graph mode"),
    "leaving out what converts": (graph(recompute=True), {"leave_out": ["recompute"]}, r"leave_out: recompute isn't"),
    "an operator that no pattern names": (graph(), {"operators": {"act": "SiLU"}}, r"no pattern ends in act"),
    "more layers than any net has": (full(0), {"layers": 10**12}, r"at most 10,000, but is 1000000000000"),
    "no layers": (full(0), {"layers": 0}, r"layers must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_has_a_message_that_says_what_to_do(case: str) -> None:
    settings, options, message = REFUSED[case]
    with pytest.raises(PolicyError, match=message):
        convert_mindformers(settings, **{"layers": 4, **options})


def test_all_mistakes_are_told_at_once() -> None:
    settings = graph(recompute=[1, 2], select_recompute={"a.b": True}, other=1)
    with pytest.raises(PolicyError, match="dict has 3 errors"):
        convert_mindformers(settings, layers=4)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("recompute_config:\n  recompute: [1, 2, 3]\n", "config.yaml:2:14"),
        ("recompute_config:\n  select_recompute:\n    a.b: True\n", "config.yaml:3:10"),
        ("recompute: [1, 2, 3]\nselect_recompute: False\n", "config.yaml:1:12"),
        ("swap_config:\n  swap: True\n  layer_swap:\n    - {backward_prefetch: 0, layers: [0]}\n", "config.yaml:4:27"),
        ("recompute:\n  mode: select\n  select_module:\n    mlp: [9]\n", "config.yaml:4:10"),
    ],
)
def test_a_mistake_in_a_file_has_its_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        convert_mindformers(path, layers=4)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize(("layers", "what"), [("4", "'4'"), (True, "True"), (1.0, "1.0")])
def test_a_number_of_layers_that_is_none_is_a_type_error(layers: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"layers must be a whole number, but is {what}"):
        convert_mindformers(full(0), layers=layers)


FILES: dict[str, tuple[bytes, str]] = {
    "a tab": (b"recompute_config:\n\trecompute: True\n", "a tab before the text"),
    "a key twice": (b"recompute_config:\n  recompute: True\n  recompute: False\n", "given twice"),
    "a list": (b"- recompute\n", "must be a mapping, as MindFormers' configurations are, but it holds a list"),
    "empty": (b"", "it is empty"),
    "50 MB": (b"#" * 50 * 2**20, "at most 1 MiB"),
    "no text": (b"recompute_config: \xff\n", "not UTF-8"),
    "an object": (b"recompute_config: !!python/object:os.system {}\n", "tag"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_has_one_clear_message(tmp_path: Path, case: str) -> None:
    content, message = FILES[case]
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        convert_mindformers(path, layers=4)


def test_a_byte_order_mark_at_the_start_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfrecompute_config: {recompute: True}\n")
    assert convert_mindformers(path, layers=4).rules


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is a folder"):
        convert_mindformers(tmp_path, layers=4)


def test_a_source_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a path or a dict, but got list"):
        convert_mindformers([], layers=4)  # type: ignore[arg-type]
