"""A converted `recompute` or `swap` puts the policies on a net that MindFormers' own `apply_ac` puts there."""

from types import SimpleNamespace
from typing import Any

import pytest
from mindspore import nn

from hyper_parallel import PolicyError, apply_policy
from hyper_parallel.core.activation_memory.spec import spec_of
from hyper_parallel.policy_file.mindformers import convert_mindformers
from tests.helpers import assert_same, gradients
from tests.mindformers.conftest import MindFormers
from tests.mindformers.decoder import DEPTH, Model, hidden, model
from tests.mindformers.test_apply_ac import apply

pytestmark = pytest.mark.filterwarnings("ignore:.*output_recompute")

Settings = dict[str, dict[str, Any]]


def full(*layers: Any, **more: Any) -> Settings:
    return {"recompute": {"mode": "full", "full_recompute_layer": list(layers), **more}}


def select(**patterns: list[Any]) -> Settings:
    return {"recompute": {"mode": "select", "select_module": patterns}}


def swap(**given: Any) -> Settings:
    return {"swap": {"enable": True, "default_prefetch": 1, **given}}


SETTINGS: dict[str, Settings] = {
    "full": full("0-3"),
    "full, numbers and ranges": full(0, "2-3"),
    "modules": select(self_attention=["0-1"], mlp=["2"]),
    "a part of a name": select(**{"self_attention.*": ["0-3"]}),
    "what is below": select(**{r"self_attention\..*": ["0-1"]}),
    "alternatives": select(**{r"mlp|self_attention\.core.*": ["2-3"]}),
    "alternatives in brackets": select(**{r"self_attention\.linear_(qkv|proj)|(?:mlp)\.linear_fc1": ["1"]}),
    "the end of a name": select(**{r".*layernorm": ["0", "3"]}),
    "at any depth": select(**{r".*\.linear_proj": ["0-3"]}),
    "an expression that dotted patterns can't say": select(**{r"mlp\.\w+_fc\d": ["0-2"]}),
    "an unescaped dot": select(**{"self_attention.core_attention": ["0-2"]}),
    "parents cover children": select(self_attention=["0-3"], **{r"self_attention\.linear_qkv": ["0-3"]}),
    "full layers in mode select": {
        "recompute": {"mode": "select", "full_recompute_layer": ["0"], "select_module": {"mlp": ["0-1"]}}
    },
    "select_module in mode full": full("1", select_module={"mlp": ["0-3"]}),
    "swapped layers": swap(layer_swap=[{"layers": ["0-2"]}]),
    "shape 12: swapped layers by number": swap(layer_swap=[{"layers": [0, 1, 2]}]),
    "only the first entry": swap(layer_swap=[{"layers": ["0"]}, {"layers": ["2"]}]),
    "swapped modules": swap(op_swap=[{"op_name": r"self_attention\.core_attention", "layers": ["0-2"]}]),
    "swapped modules in swapped layers": swap(
        layer_swap=[{"layers": ["1"]}], op_swap=[{"op_name": "mlp", "layers": ["0-2"]}]
    ),
    "swap over full": {**full("0-3"), **swap(layer_swap=[{"layers": ["0-2"]}])},
    "swap inside full": {**full("0-3"), **swap(op_swap=[{"op_name": "mlp", "layers": ["0-2"]}])},
    "swap over modules": {**select(mlp=["0-1"]), **swap(op_swap=[{"op_name": "mlp", "layers": ["1-2"]}])},
    "disabled": {"recompute": {"mode": "None", "full_recompute_layer": ["0-3"]}, "swap": {"enable": False}},
}

EXCLUDING: dict[str, Settings] = {
    "excluded modules": full("0-3", exclude_op={"self_attention": ["0-3"], r"mlp\.linear_fc1": ["1"]}),
    "excluded below a selected module": {
        "recompute": {
            "mode": "select",
            "select_module": {"self_attention": ["0-3"]},
            "exclude_op": {r"self_attention\.core.*": ["0-2"]},
        }
    },
}


def policies(net: nn.Cell) -> dict[str, tuple[str, bool]]:
    """The policy of every cell that has one, by path."""
    found = {}
    for path, cell in net.cells_and_names():
        if (spec := spec_of(cell)) is not None:
            found[path] = (spec.policy.name, spec.swap_inputs)
    return found


def under(settings: Settings) -> Model:
    """A model under the converted settings."""
    net = model()
    apply_policy(net, convert_mindformers(settings, layers=DEPTH).policy)
    return net


@pytest.mark.parametrize("case", SETTINGS)
def test_the_policies_are_those_of_apply_ac(mindformers: MindFormers, case: str) -> None:
    assert policies(under(SETTINGS[case])) == policies(apply(mindformers, model(), _copied(SETTINGS[case])))


@pytest.mark.parametrize("case", EXCLUDING)
def test_what_is_excluded_is_what_version_2_1_excludes(mindformers: MindFormers, case: str) -> None:
    if mindformers.version == "2.1.0":
        theirs = policies(apply(mindformers, model(), _copied(EXCLUDING[case])))
        assert policies(under(EXCLUDING[case])) == theirs


def test_a_list_of_parts_of_names_keeps_what_version_2_0_keeps(mindformers: MindFormers) -> None:
    settings = full("0-3", exclude_op=["softmax", "sigmoid"])
    rule = convert_mindformers(settings, layers=DEPTH).policy["rules"][0]
    assert rule["policy"] == "must_recompute"
    assert {"Softmax", "Sigmoid"} <= rule["ops"].keys()
    assert set(rule["ops"].values()) == {"must_save"}
    if mindformers.version == "2.0.0":
        net = apply(mindformers, model(), _copied(settings))
        assert policies(net) == policies(under(settings))


def test_a_step_under_converted_settings_gives_the_numbers_of_apply_ac(mindformers: MindFormers) -> None:
    settings = {**full("0-3"), **swap(op_swap=[{"op_name": "mlp", "layers": ["0-2"]}])}
    theirs = gradients(apply(mindformers, model(), _copied(settings)), hidden())
    assert_same(gradients(under(settings), hidden()), theirs)


def test_layers_are_loaded_ahead_in_the_pairs_of_apply_ac(
    mindformers: MindFormers, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = swap(default_prefetch=2, layer_swap=[{"layers": ["0"]}], op_swap=[{"op_name": "mlp", "layers": ["0-1"]}])
    pairs: list[tuple[nn.Cell, nn.Cell]] = []
    recorder = SimpleNamespace(set_forward_prefetch_layer=lambda load, at: pairs.append((load, at)))
    monkeypatch.setattr(mindformers.checkpointing, "SwapManager", lambda: recorder)
    net = apply(mindformers, model(), _copied(settings))
    paths = {id(cell): path for path, cell in net.cells_and_names()}
    assert [(pair["load"], pair["at"]) for pair in convert_mindformers(settings, layers=DEPTH).policy["prefetch"]] == [
        (paths[id(load)].replace("decoder", "**"), paths[id(at)].replace("decoder", "**")) for load, at in pairs
    ]


def test_shape_10_does_nothing_there_and_is_read_aloud_here(mindformers: MindFormers) -> None:
    settings = select(**{"layers.*.self_attention.*": ["0-3"], "layers.*.mlp.*": ["0-1"]})
    assert not policies(apply(mindformers, model(), _copied(settings)))
    done = convert_mindformers(settings, layers=DEPTH)
    assert [(rule.layers, rule.rule["cells"]) for rule in done.rules] == [
        ((0, 1, 2, 3), "**.layers.[0-3].self_attention*"),
        ((0, 1), "**.layers.[0-1].mlp*"),
    ]
    assert any("in MindFormers it does nothing" in note.text for note in done.notes)


def test_communication_that_apply_ac_never_recomputes_is_reported(mindformers: MindFormers) -> None:
    settings = {"recompute_comm": {"enable": True, "select_module": {r"mlp\.input\.allgather": ["0-3"]}}}
    assert not policies(apply(mindformers, model(), _copied(settings)))
    done = convert_mindformers(settings, layers=DEPTH)
    assert done.policy["rules"] == []
    (note,) = [note for note in done.notes if note.kind == "unapplied"]
    assert r"'mlp\.input\.allgather' of layers 0-3" in note.text


REFUSED: dict[str, Settings] = {
    "a mode without layers": {"recompute": {"mode": "full"}},
    "no layer": full("4"),
    "falling": full("2", "0"),
    "backwards": full("3-1"),
    "no number": full("first"),
    "nothing to load ahead": swap(layer_swap=[{"layers": ["3"]}]),
    "too far ahead": swap(default_prefetch=4, layer_swap=[{"layers": ["0"]}]),
    "an entry without layers": swap(layer_swap=[{"layer": ["0"]}]),
    "an entry without a name": swap(op_swap=[{"layers": ["0"]}]),
    "communication without patterns": {"recompute_comm": {"enable": True}},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_mindformers_refuses_is_refused(mindformers: MindFormers, case: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        apply(mindformers, model(), _copied(REFUSED[case]))
    with pytest.raises(PolicyError):
        convert_mindformers(REFUSED[case], layers=DEPTH)


def _copied(content: Any) -> Any:
    """MindFormers changes the lists that it gets."""
    if isinstance(content, dict):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(item) for item in content] if isinstance(content, list) else content
