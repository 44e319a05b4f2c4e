"""MindFormers' `apply_ac`, unchanged, on a decoder of ours: every mode of its configuration, in two versions of it."""

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from hyper_parallel import CheckpointPolicy, SwapManager
from hyper_parallel import swap_wrapper as our_swap_wrapper
from tests.helpers import Record, assert_same, gradients, seeded, state_of, train
from tests.mindformers.conftest import MindFormers
from tests.mindformers.decoder import Model, hidden, model
from tests.mindformers.held import held

Settings = dict[str, dict[str, Any]]
"""Arguments of `RecomputeConfig`, `RecomputeCommConfig` and `SwapConfig`."""

ALL, BUT_THE_LAST = ["0-3"], ["0-2"]


def full(**more: Any) -> Settings:
    return {"recompute": {"mode": "full", "full_recompute_layer": list(ALL), **more}}


def select(**patterns: list[str]) -> Settings:
    return {"recompute": {"mode": "select", "select_module": patterns}}


def layer_swap() -> Settings:
    return {"swap": {"enable": True, "default_prefetch": 1, "layer_swap": [{"layers": list(BUT_THE_LAST)}]}}


def op_swap(*patterns: str) -> Settings:
    entries = [{"op_name": pattern, "layers": list(BUT_THE_LAST)} for pattern in patterns]
    return {"swap": {"enable": True, "op_swap": entries}}


def excluding() -> dict[str, Any]:
    """What stays out of a recomputed layer, as the version wants it: operators by name, or paths."""
    return {"2.0.0": ["matmul", "Sigmoid"], "2.1.0": {"self_attention": list(ALL), r"mlp\.activation_func": list(ALL)}}


MODES: dict[str, Callable[[str], Settings]] = {
    "full": lambda version: full(),
    "full, some layers": lambda version: {"recompute": {"mode": "full", "full_recompute_layer": ["0", "2-3"]}},
    "select modules": lambda version: select(**{"self_attention": ["0-1"], r"mlp|self_attention\.core.*": ["2-3"]}),
    "select operators": lambda version: select(**{r"mlp\.activation_func": list(ALL), r".*\.gather": list(ALL)}),
    "exclude_op": lambda version: full(exclude_op=excluding()[version]),
    "recompute_comm": lambda version: {
        "recompute_comm": {"enable": True, "select_module": {r"self_attention\.gather": list(ALL)}}
    },
    "layer_swap": lambda version: layer_swap(),
    "op_swap": lambda version: op_swap(r"self_attention\.core_attention", "mlp"),
    "op_swap of an operator": lambda version: op_swap(r"mlp\.activation_func"),
    "layer_swap over full": lambda version: {**full(), **layer_swap()},
    "layer_swap over select": lambda version: {**select(self_attention=list(ALL)), **layer_swap()},
    "op_swap inside full": lambda version: {**full(), **op_swap("mlp")},
}

pytestmark = pytest.mark.slow  # not each of them, but all together

every_mode = pytest.mark.parametrize("mode", MODES)
some_modes = pytest.mark.parametrize("mode", ["select modules", "exclude_op", "op_swap", "layer_swap over full"])
every_swap = pytest.mark.parametrize("mode", [mode for mode in MODES if "swap" in mode])


def apply(mindformers: MindFormers, net: Model, settings: Settings, pp: int = 1) -> Model:
    """The model with its decoder under what the settings say."""
    config = mindformers.config
    mindformers.checkpointing.apply_ac(
        net.decoder,
        config.RecomputeConfig(**settings.get("recompute", {})),
        config.RecomputeCommConfig(**settings.get("recompute_comm", {})),
        config.SwapConfig(**settings.get("swap", {})),
        pp,
    )
    return net


@pytest.fixture
def applied(mindformers: MindFormers) -> Callable[[str], Model]:
    """A new model under a mode, by the version that is tested."""
    return lambda mode: apply(mindformers, model(), MODES[mode](mindformers.version))


@lru_cache
def plain() -> Record:
    return train(model(), hidden(), steps=2, position=0)


@lru_cache
def plain_step() -> tuple[int, Record]:
    return held(model(), hidden())


measured: dict[tuple[str, str], tuple[int, int]] = {}
"""Bytes on the device before backward, and bytes taken to host, by version and mode."""


@pytest.fixture
def measure(mindformers: MindFormers, applied: Callable[[str], Model]) -> Callable[[str], tuple[int, int]]:
    """Measures a step of a mode, once."""

    def measure(mode: str) -> tuple[int, int]:
        key = mindformers.version, mode
        if key not in measured:
            net = applied(mode)
            SwapManager().reset()
            measured[key] = held(net, hidden())[0], SwapManager().stats().offloaded_bytes
        return measured[key]

    return measure


@every_mode
def test_two_steps_give_the_plain_numbers(mode: str, applied: Callable[[str], Model]) -> None:
    assert_same(train(applied(mode), hidden(), steps=2, position=0, wait=True), plain())


@every_mode
def test_less_waits_for_backward_on_the_device(mode: str, measure: Callable[[str], tuple[int, int]]) -> None:
    assert measure(mode)[0] < plain_step()[0]


@every_mode
def test_only_a_mode_with_swap_takes_bytes_to_host(mode: str, measure: Callable[[str], tuple[int, int]]) -> None:
    assert (measure(mode)[1] > 0) == ("swap" in mode)


def test_what_is_excluded_is_kept_in_a_recomputed_layer(measure: Callable[[str], tuple[int, int]]) -> None:
    assert measure("exclude_op")[0] > measure("full")[0]


def test_swapping_a_recomputed_layer_keeps_less_than_recomputing_it(
    measure: Callable[[str], tuple[int, int]],
) -> None:
    assert measure("layer_swap over full")[0] < measure("full")[0]


@every_mode
def test_names_of_parameters_stay(mode: str, applied: Callable[[str], Model]) -> None:
    def names(net: nn.Cell) -> list[tuple[str, str]]:
        return [(key, parameter.name) for key, parameter in net.parameters_and_names()]

    assert names(applied(mode)) == names(model())


@every_mode
def test_a_checkpoint_holds_what_the_plain_one_holds(
    mode: str, applied: Callable[[str], Model], tmp_path: Path
) -> None:
    def saved(net: nn.Cell, name: str) -> Record:
        ms.save_checkpoint(net, str(tmp_path / name))
        return {key: value.asnumpy() for key, value in ms.load_checkpoint(str(tmp_path / name)).items()}

    assert_same(saved(applied(mode), "policy.ckpt"), saved(model(), "plain.ckpt"))


@every_mode
def test_a_plain_checkpoint_loads(mode: str, applied: Callable[[str], Model], tmp_path: Path) -> None:
    net, file = applied(mode), str(tmp_path / "plain.ckpt")
    ms.save_checkpoint(model(), file)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 0))
    assert ms.load_checkpoint(file, net).keys() == {parameter.name for parameter in net.get_parameters()}
    assert_same(state_of(net), state_of(model()))


@some_modes
def test_a_class_put_on_top_afterwards_keeps_the_policy(
    mode: str, applied: Callable[[str], Model], measure: Callable[[str], tuple[int, int]]
) -> None:
    called = []

    class Sharded:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self)
            return super().__call__(*args, **kwargs)

    net = applied(mode)
    for layer in net.decoder.layers:
        layer.__class__ = type(f"Sharded{type(layer).__name__}", (Sharded, type(layer)), {})
    bytes_held, record = held(net, hidden())
    assert called
    assert bytes_held == measure(mode)[0]
    assert_same(record, plain_step()[1])


@some_modes
def test_a_deep_copy_has_its_own_weights_and_the_policy(
    mode: str, applied: Callable[[str], Model], measure: Callable[[str], tuple[int, int]]
) -> None:
    net = applied(mode)
    other = copy.deepcopy(net)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 0))
    bytes_held, record = held(other, hidden())
    assert bytes_held == measure(mode)[0]
    assert_same(record, plain_step()[1])


class Asked:
    """Puts itself between MindFormers' tensor policies and the library, and writes their answers down."""

    def __init__(self, mindformers: MindFormers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[int, CheckpointPolicy]] = []
        monkeypatch.setattr(mindformers.checkpointing, "swap_wrapper", self.wrapper)

    def wrapper(self, target: Any, policy_fn: Callable[..., Any]) -> Any:
        def answered(tensor: Tensor) -> CheckpointPolicy:
            answer = policy_fn(tensor)
            self.answers.append((tensor.untyped_storage().data_ptr(), answer))
            return answer

        return our_swap_wrapper(target, policy_fn=answered)

    def about(self, tensors: list[Tensor]) -> list[CheckpointPolicy]:
        shared = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [answer for storage, answer in self.answers if storage in shared]


def shared_by_layers(net: Model, version: str) -> list[Tensor]:
    """What the version leaves on the device: 2.0.0 masks by their type and shape, 2.1.0 all inputs of the decoder."""
    return net.shared[:1] if version == "2.0.0" else net.shared


@pytest.mark.parametrize("mode", ["layer_swap", "op_swap", "layer_swap over select"])
def test_what_layers_share_is_asked_about_and_stays(
    mode: str, mindformers: MindFormers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(mindformers, monkeypatch)
    net = apply(mindformers, model(), MODES[mode](mindformers.version))
    SwapManager().reset()
    gradients(net, hidden(), wait=True)
    answers = asked.about(shared_by_layers(net, mindformers.version))
    assert len(answers) >= 3 and set(answers) == {CheckpointPolicy.MUST_SAVE}  # by three layers
    assert SwapManager().stats().kept_bytes > 0


def test_what_layers_share_stays_when_the_layers_are_recomputed(
    mindformers: MindFormers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(mindformers, monkeypatch)
    net = apply(mindformers, model(), MODES["layer_swap over full"](mindformers.version))
    gradients(net, hidden(), wait=True)
    answers = asked.about(shared_by_layers(net, mindformers.version))
    assert answers and set(answers) == {CheckpointPolicy.MUST_SAVE}


def test_settings_that_are_off_change_nothing(mindformers: MindFormers) -> None:
    net = apply(mindformers, model(), {})
    assert [type(cell) for _, cell in net.cells_and_names()] == [type(cell) for _, cell in model().cells_and_names()]


def test_swap_with_pipeline_parallel_is_refused_by_mindformers(mindformers: MindFormers) -> None:
    with pytest.raises(ValueError, match="swap is not supported with pipeline parallel"):
        apply(mindformers, model(), layer_swap(), pp=2)


def test_excluding_exactly_what_is_selected_leaves_it_alone(mindformers: MindFormers) -> None:
    if mindformers.version == "2.0.0":
        return  # its exclude_op has no paths
    settings = select(mlp=list(ALL))
    settings["recompute"]["exclude_op"] = {"mlp": list(ALL)}
    net = apply(mindformers, model(), settings)
    assert_same(gradients(net, hidden()), gradients(model(), hidden()))
    assert all(layer.mlp._hp_spec.policy is CheckpointPolicy.MUST_SAVE for layer in net.decoder.layers)


class PredictionBlock(nn.Cell):
    """Layers for multi-token prediction: they are numbered after those of the decoder."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.layers = nn.CellList([layer])

    def construct(self, x: Tensor, mask: Tensor, rotary_pos_emb: Any = None) -> Tensor:
        return self.layers[0](x, mask, rotary_pos_emb=rotary_pos_emb)[0]


class Predicting(Model):
    """A decoder whose output runs through one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.config.mtp_num_layers = 1
        self.mtp = PredictionBlock(copy.deepcopy(self.decoder.layers[0]))

    def construct(self, x: Tensor) -> Tensor:
        x = super().construct(x)
        return self.mtp(x, self.shared[0], rotary_pos_emb=tuple(self.shared[1:]))


def test_a_layer_for_multi_token_prediction_is_reached(mindformers: MindFormers) -> None:
    config = mindformers.config
    net = seeded(Predicting())
    same = copy.deepcopy(net)
    mindformers.checkpointing.apply_ac(
        net.decoder,
        config.RecomputeConfig(mode="full", full_recompute_layer=["4"]),
        config.RecomputeCommConfig(),
        config.SwapConfig(),
        1,
        mtp_block=net.mtp,
    )
    (bytes_held, record), (plain_bytes, plain_record) = held(net, hidden()), held(same, hidden())
    assert bytes_held < plain_bytes
    assert_same(record, plain_record)
