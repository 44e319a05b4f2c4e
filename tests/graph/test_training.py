"""Training a compiled net under a plan gives the numbers of the compiled plain net, to the last bit."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import Callback, Model

from hyper_parallel import apply_policy
from hyper_parallel.train import PolicyCallback
from tests.graph.nets import IMAGES, POLICIES, TOKENS, conv_net, gradient_of, jit_step, transformer
from tests.helpers import Record, assert_same, flat, state_of

STEPS = 2
Train = Callable[[nn.Cell, Tensor, Any], Record]


def quiet(policy: Any) -> PolicyCallback:
    return PolicyCallback(policy, say=lambda text: None)


class Identity(nn.Cell):
    """A loss that is what the net gives."""

    def construct(self, value: Tensor, label: Tensor) -> Tensor:
        return value * label


def gradient_under_jit(level: str) -> Train:
    def train(net: nn.Cell, x: Tensor, policy: Any) -> Record:
        if policy is not None:
            apply_policy(net, policy, mode="graph")
        return flat(jit_step(net, jit_level=level)(x), "value and gradients")

    return train


def step_under_jit(net: nn.Cell, x: Tensor, policy: Any) -> Record:
    if policy is not None:
        apply_policy(net, policy, mode="graph")
    optimizer, gradient = nn.SGD(net.trainable_params(), 0.1), gradient_of(net)

    @ms.jit(jit_level="O1")
    def step(x: Tensor) -> Tensor:
        value, gradients = gradient(x)
        optimizer(gradients)
        return value

    return {f"loss {i}": step(x).asnumpy() for i in range(STEPS)} | state_of(net)


def train_one_step_cell(net: nn.Cell, x: Tensor, policy: Any) -> Record:
    ms.set_context(mode=ms.GRAPH_MODE)
    if policy is not None:
        apply_policy(net, policy)
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))
    return {f"loss {i}": step(x).asnumpy() for i in range(STEPS)} | state_of(net)


class Losses(Callback):
    """Writes the loss of every step down."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Record = {}

    def on_train_step_end(self, run_context: Any) -> None:
        self.found[f"loss {len(self.found)}"] = run_context.original_args().net_outputs.asnumpy().copy()


def model_train(net: nn.Cell, x: Tensor, policy: Any) -> Record:
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Model(net, Identity(), nn.SGD(net.trainable_params(), 0.1))
    data = ds.NumpySlicesDataset(
        (np.repeat(x.asnumpy()[None], STEPS, 0), np.ones((STEPS, 1), np.float32)), ["x", "y"], shuffle=False
    )
    losses = Losses()
    callbacks = [losses] if policy is None else [quiet(policy), losses]
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    return losses.found | state_of(net)


STYLES: dict[str, Train] = {
    "value_and_grad under jit, O0": gradient_under_jit("O0"),
    "a step under jit, O1": step_under_jit,
    "TrainOneStepCell": train_one_step_cell,
    "Model.train": model_train,
}
NETS: dict[str, tuple[Callable[[], nn.Cell], Tensor]] = {
    "transformer": (transformer, TOKENS),
    "convolutions": (conv_net, IMAGES),
}
_plain: dict[tuple[str, str], Record] = {}


def plain(style: str, net: str) -> Record:
    """What a style gives with a plain net; compiled once."""
    if (style, net) not in _plain:
        make, x = NETS[net]
        _plain[style, net] = STYLES[style](make(), x, None)
    return _plain[style, net]


@pytest.fixture(autouse=True)
def pynative_again() -> Any:
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("style", STYLES)
def test_losses_gradients_and_weights_are_those_of_the_plain_graph(style: str, net: str, policy: str) -> None:
    make, x = NETS[net]
    assert_same(STYLES[style](make(), x, POLICIES[policy]), plain(style, net))
