"""Training a compiled net under a plan: the numbers of the compiled plain net to the last bit, and the copies it wants.

Which operators are computed again is written down by hand from what the nets do, and looked for in the graph that has
trained.
"""

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
from tests.graph.nets import (
    IMAGES,
    POLICIES,
    TOKENS,
    conv_net,
    copies_while,
    gradient_of,
    jit_step,
    transformer,
    wanted_copies,
)
from tests.helpers import Record, assert_same, flat, state_of

STEPS = 2
Train = Callable[[nn.Cell, Tensor, Any, str], Record]


class Identity(nn.Cell):
    """A loss that is what the net gives."""

    def construct(self, value: Tensor, label: Tensor) -> Tensor:
        return value * label


def gradient_under_jit(net: nn.Cell, x: Tensor, policy: Any, level: str) -> Record:
    if policy is not None:
        apply_policy(net, policy, mode="graph")
    return flat(jit_step(net, jit_level=level)(x), "value and gradients")


def step_under_jit(net: nn.Cell, x: Tensor, policy: Any, level: str) -> Record:
    if policy is not None:
        apply_policy(net, policy, mode="graph")
    optimizer, gradient = nn.SGD(net.trainable_params(), 0.1), gradient_of(net)

    @ms.jit(jit_level=level)
    def step(x: Tensor) -> Tensor:
        value, gradients = gradient(x)
        optimizer(gradients)
        return value

    return {f"loss {i}": step(x).asnumpy() for i in range(STEPS)} | state_of(net)


def train_one_step_cell(net: nn.Cell, x: Tensor, policy: Any, level: str) -> Record:
    ms.set_context(mode=ms.GRAPH_MODE)
    if policy is not None:
        apply_policy(net, policy)
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))
    step.set_jit_config(ms.JitConfig(jit_level=level))
    return {f"loss {i}": step(x).asnumpy() for i in range(STEPS)} | state_of(net)


class Losses(Callback):
    """Writes the loss of every step down."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Record = {}

    def on_train_step_end(self, run_context: Any) -> None:
        self.found[f"loss {len(self.found)}"] = run_context.original_args().net_outputs.asnumpy().copy()


def model_train(net: nn.Cell, x: Tensor, policy: Any, level: str) -> Record:
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Model(net, Identity(), nn.SGD(net.trainable_params(), 0.1))
    model.train_network.set_jit_config(ms.JitConfig(jit_level=level))
    data = ds.NumpySlicesDataset(
        (np.repeat(x.asnumpy()[None], STEPS, 0), np.ones((STEPS, 1), np.float32)), ["x", "y"], shuffle=False
    )
    losses = Losses()
    callbacks = [losses] if policy is None else [PolicyCallback(policy, say=lambda text: None), losses]
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    return losses.found | state_of(net)


STYLES: dict[str, Train] = {
    "value_and_grad under jit": gradient_under_jit,
    "a step under jit": step_under_jit,
    "TrainOneStepCell": train_one_step_cell,
    "Model.train": model_train,
}
NETS: dict[str, tuple[Callable[[], nn.Cell], Tensor]] = {
    "transformer": (transformer, TOKENS),
    "convolutions": (conv_net, IMAGES),
}
# The compiler's front end, which recomputes, is one for both levels: each kind of style has all policies at one level.
LEVELS = {"value_and_grad under jit": "O0", "a step under jit": "O1", "TrainOneStepCell": "O0", "Model.train": "O1"}
OTHER = {"O0": "O1", "O1": "O0"}
CASES = [(style, LEVELS[style], policy, net) for style in STYLES for policy in POLICIES for net in NETS]
CASES += [(style, OTHER[LEVELS[style]], "mixed", net) for style in STYLES for net in NETS]

_plain: dict[tuple[str, ...], Record] = {}


def plain(style: str, level: str, net: str) -> Record:
    """What a style gives with a plain net; compiled once."""
    key = style, level, net
    if key not in _plain:
        make, x = NETS[net]
        _plain[key] = STYLES[style](make(), x, None, level)
    return _plain[key]


@pytest.fixture(autouse=True)
def pynative_again() -> Any:
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize(
    ("style", "level", "policy", "net"),
    # one worker has all policies of a plain graph, so that this one is compiled once
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"{case[0]}, {case[1]}, {case[3]}")) for case in CASES],
)
def test_numbers_are_those_of_the_plain_graph_and_copies_are_those_wanted(
    style: str, level: str, policy: str, net: str
) -> None:
    make, x = NETS[net]
    record, copies = copies_while(lambda: STYLES[style](make(), x, POLICIES[policy], level))
    assert_same(record, plain(style, level, net))
    assert copies == wanted_copies(net, policy)
