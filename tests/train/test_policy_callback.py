"""`PolicyCallback` in `Model.train`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import Callback, LossMonitor, Model

from hyper_parallel import PolicyError, apply_policy, load_policy
from hyper_parallel.core.activation_memory.spec import spec_of
from hyper_parallel.train import PolicyCallback
from tests.helpers import assert_same, seeded, state_of

RECOMPUTE = {"version": 1, "rules": [{"cells": "0", "policy": "must_recompute"}]}


def make(loss: Any = None) -> tuple[Model, nn.Cell]:
    net = seeded(nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 1)))
    return Model(net, loss or nn.MSELoss(), nn.Adam(net.trainable_params(), 0.01)), net


def data() -> ds.Dataset:
    x = np.random.RandomState(0).randn(6, 4).astype(np.float32)
    return ds.NumpySlicesDataset((x, x[:, :1]), ["x", "y"], shuffle=False).batch(2)


def train(model: Model, *callbacks: Callback, epochs: int = 1) -> None:
    model.train(epochs, data(), callbacks=list(callbacks), dataset_sink_mode=False)


class Losses(Callback):
    """Writes the loss of every step down."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.found.append(run_context.original_args().net_outputs.asnumpy().copy())


def test_training_gives_the_numbers_of_the_plain_net() -> None:
    (plain, plain_net), (model, net) = make(), make()
    plain_losses, losses = Losses(), Losses()
    train(plain, plain_losses, epochs=2)
    train(model, PolicyCallback(RECOMPUTE, say=lambda text: None), losses, epochs=2)
    assert [loss.tobytes() for loss in losses.found] == [loss.tobytes() for loss in plain_losses.found]
    assert_same(state_of(net), state_of(plain_net))


def test_the_plan_is_applied_before_the_first_step_and_stays() -> None:
    model, net = make()
    seen: list[bool] = []

    class First(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            seen.append(spec_of(net[0]) is not None)

    callback = PolicyCallback(RECOMPUTE, say=lambda text: None)
    train(model, First(), callback, LossMonitor(100))
    assert seen == [True] * 3
    assert callback.plan is not None
    assert callback.plan.applied
    callback.plan.remove()
    assert spec_of(net[0]) is None


def test_the_older_names_of_the_events_do_the_same() -> None:
    callback, net = PolicyCallback(RECOMPUTE, say=lambda text: None), make()[1]
    with pytest.raises(PolicyError, match="too late"):
        callback.step_begin(SimpleNamespace())
    callback.begin(SimpleNamespace(original_args=lambda: SimpleNamespace(network=net)))
    callback.step_begin(SimpleNamespace())
    assert spec_of(net[0]) is not None


def test_evaluation_applies_nothing() -> None:
    net = make()[1]
    model = Model(net, nn.MSELoss(), metrics={"loss"})
    model.eval(data(), callbacks=[PolicyCallback(RECOMPUTE)], dataset_sink_mode=False)
    assert spec_of(net[0]) is None


def test_a_second_training_goes_on_under_the_same_plan() -> None:
    model, _ = make()
    callback = PolicyCallback(RECOMPUTE, say=lambda text: None)
    train(model, callback)
    plan = callback.plan
    train(model, callback)
    assert callback.plan is plan


def test_after_the_plan_is_removed_the_next_training_applies_it_again() -> None:
    model, net = make()
    callback = PolicyCallback(RECOMPUTE, say=lambda text: None)
    train(model, callback)
    assert callback.plan is not None
    callback.plan.remove()
    train(model, callback)
    assert spec_of(net[0]) is not None


def test_another_net_needs_a_callback_of_its_own() -> None:
    callback = PolicyCallback(RECOMPUTE, say=lambda text: None)
    train(make()[0], callback)
    with pytest.raises(PolicyError, match="applied to another net"):
        train(make()[0], callback)


def test_a_net_under_another_plan_is_refused() -> None:
    model, net = make()
    apply_policy(net, RECOMPUTE)
    with pytest.raises(PolicyError, match="is under the plan"):
        train(model, PolicyCallback(RECOMPUTE))


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("", 1), ("3", 0), (None, 1)])
def test_rank_0_prints_the_plan(monkeypatch: pytest.MonkeyPatch, rank: str | None, said: int) -> None:
    monkeypatch.delenv("RANK_ID", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK_ID", rank)
    lines: list[str] = []
    train(make()[0], PolicyCallback(RECOMPUTE, say=lines.append))
    assert len(lines) == said
    assert all("0     Dense  must_recompute" in line for line in lines)


def test_mistakes_of_the_file_show_before_training(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1\nrules:\n  - cells: x\n    policy: must_recompte\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml:4"):
        PolicyCallback(tmp_path / "policy.yaml")


def test_a_rule_that_matches_nothing_stops_training_before_its_first_step() -> None:
    model, net = make()
    before = state_of(net)
    with pytest.raises(PolicyError, match="matches"):
        train(model, PolicyCallback({"version": 1, "rules": [{"cells": "layers.*", "policy": "must_swap"}]}))
    assert_same(state_of(net), before)


def test_the_file_may_be_about_a_cell_of_the_net() -> None:
    class WithLoss(nn.Cell):
        def __init__(self, backbone: nn.Cell) -> None:
            super().__init__()
            self.backbone, self.loss = backbone, nn.MSELoss()

        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.backbone(x), y)

    net = make()[1]
    model = Model(WithLoss(net), optimizer=nn.SGD(net.trainable_params(), 0.01))
    train(model, PolicyCallback(RECOMPUTE, cell="backbone", say=lambda text: None))
    assert spec_of(net[0]) is not None
    with pytest.raises(PolicyError, match=r"cell='body': WithLoss has no such cell; it has backbone, loss"):
        train(model, PolicyCallback(RECOMPUTE, cell="body"))


def test_a_stage_is_passed_on() -> None:
    policy = {"version": 1, "stages": [{"rules": []}, {"rules": RECOMPUTE["rules"]}]}
    model, net = make()
    train(model, PolicyCallback(policy, stage=1, say=lambda text: None))
    assert spec_of(net[0]) is not None


def test_mindformers_settings_and_plans_are_taken() -> None:
    net = nn.Cell()
    net.layers = nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2)])
    settings = {"recompute": {"mode": "full", "full_recompute_layer": [1]}}
    plan = PolicyCallback(settings, format="mindformers", layers=2, say=lambda text: None).apply_to(net)
    assert [row.path for row in plan.rows] == ["layers.1"]
    plan.remove()
    assert PolicyCallback(load_policy(RECOMPUTE), say=lambda text: None).apply_to(make()[1]).applied
    with pytest.raises(TypeError, match="is read already"):
        PolicyCallback(load_policy(RECOMPUTE), format="mindformers")


def test_a_step_without_its_beginning_of_training_is_too_late() -> None:
    with pytest.raises(PolicyError, match="now it is too late"):
        PolicyCallback(RECOMPUTE).on_train_step_begin(SimpleNamespace())


def test_a_net_that_was_compiled_is_too_late() -> None:
    net = make()[1]
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        net(Tensor(np.ones((2, 4), np.float32)))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    with pytest.raises(PolicyError, match="compiled in graph mode already, so it is too late"):
        PolicyCallback(RECOMPUTE).apply_to(net)


def test_a_net_that_is_sharded_is_too_late() -> None:
    net = make()[1]
    mixin = type("HSDPModule", (), {})
    net[0].__class__ = type("HSDPDense", (mixin, nn.Dense), {})
    with pytest.raises(PolicyError, match="0 is sharded already"):
        PolicyCallback(RECOMPUTE).apply_to(net)


def test_in_graph_mode_the_net_gets_flags() -> None:
    model, net = make()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        callback = PolicyCallback(RECOMPUTE, say=lambda text: None)
        train(model, callback)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert callback.plan is not None and callback.plan.mode == "graph"
    assert net[0].get_flags()["output_recompute"] is False


def test_a_net_that_code_compiles_by_jit_says_its_mode() -> None:
    net = make()[1]
    plan = PolicyCallback(RECOMPUTE, mode="graph", say=lambda text: None).apply_to(net)
    assert plan.mode == "graph"
