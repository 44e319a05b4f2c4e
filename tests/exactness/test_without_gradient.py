"""Where no gradient is taken, or none is asked for in the end, a policy costs nothing and leaves nothing."""

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager, activation_policy
from tests.helpers import (
    RECOMPUTE,
    SWAP,
    Layer,
    Record,
    Stack,
    assert_nothing_live,
    assert_same,
    flat,
    gradients,
    numbers,
    on,
    settled,
)

X = numbers(3, 4, seed=1)
KINDS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": RECOMPUTE},
    "swap": {"policy": SWAP},
    "swapped inputs": {"policy": RECOMPUTE, "swap_inputs": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def net_of(policy: Any = None, **options: Any) -> nn.Cell:
    return Stack([on(Layer(seed=seed), policy, **options) for seed in (1, 2, 3)])


@each_kind
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_forward_without_gradient_runs_once_and_moves_nothing(kind: str, training: bool) -> None:
    net = net_of(**KINDS[kind]).set_train(training)
    output = net(X)
    assert np.array_equal(output.asnumpy(), net_of()(X).asnumpy())
    assert [layer.calls for layer in net.layers] == [1, 1, 1]
    stats = SwapManager().stats()
    assert stats.offloaded_bytes == stats.cancelled_bytes == 0


@each_kind
def test_a_net_without_anything_to_differentiate_gives_plains_output(kind: str) -> None:
    def run(net: nn.Cell) -> Record:
        for parameter in net.get_parameters():
            parameter.requires_grad = False
        weight = ms.Parameter(numbers(3, 4, seed=5), name="weight")
        return flat(ms.value_and_grad(lambda x: (net(x) * weight).sum(), None, [weight])(X), "gradient")

    assert_same(run(net_of(**KINDS[kind])), run(net_of()))


@each_kind
def test_evaluation_between_steps_changes_nothing(kind: str) -> None:
    net, plain = net_of(**KINDS[kind]), net_of()
    for _ in range(2):
        net(X), net(X)
        assert_same(gradients(net, X, wait=True), gradients(plain, X))


@each_kind
def test_a_forward_that_is_never_differentiated_leaves_nothing(kind: str) -> None:
    """With the flag on for good, as MindFormers has it, the graph dies with the output."""
    net = net_of(**KINDS[kind])
    allocated = set()
    _pynative_executor.set_grad_flag(True)
    try:
        for _ in range(50):
            settled(net(X))
            assert_nothing_live()
            allocated.add(SwapManager().stats().allocated_bytes)
    finally:
        _pynative_executor.set_grad_flag(False)
    assert len(allocated) == 1 and sum(layer.calls for layer in net.layers) == 150


@each_kind
@pytest.mark.parametrize("way", ["vjp", "set_grad"])
def test_nothing_lives_longer_than_mindspores_own_graph(kind: str, way: str) -> None:
    """MindSpore keeps the graph of such a forward for a backward that may still come, until `clear_res()`."""
    net = net_of(**KINDS[kind])
    if way == "set_grad":
        net.set_grad()
    for _ in range(10):
        settled(ms.vjp(net, X)[0] if way == "vjp" else net(X))
    _pynative_executor.clear_res()
    assert_nothing_live()


@each_kind
def test_a_result_that_is_kept_does_not_keep_what_was_swapped(kind: str) -> None:
    net = net_of(**KINDS[kind])
    value, gradient = ms.value_and_grad(lambda x: settled((net(x) ** 2).sum()), 0)(X)
    assert_nothing_live()
    assert np.isfinite(value.asnumpy()) and gradient.shape == X.shape


@activation_policy(RECOMPUTE)
class Marked(Layer):
    """A layer whose class carries a policy."""


@pytest.fixture
def graph_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


CELLS = {
    "an instance under recompute": lambda: on(Layer(), RECOMPUTE),
    "an instance under swap": lambda: on(Layer(), SWAP),
    "a decorated class": Marked,
}


class Plain(nn.Cell):
    """A net that calls a layer, plainly, so that it can be compiled."""

    def __init__(self, layer: nn.Cell) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2


@pytest.mark.parametrize("cell", CELLS)
def test_graph_mode_refuses_a_policy_and_names_the_cell(cell: str, graph_mode: None) -> None:
    net = Plain(CELLS[cell]())
    with pytest.raises(RuntimeError, match=r"(Layer|Marked).* is under a PyNative policy"):
        net(X)


@pytest.mark.parametrize("cell", CELLS)
def test_jit_refuses_a_policy_and_names_the_cell(cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = Plain(CELLS[cell]())
    with pytest.raises(RuntimeError, match=r"(Layer|Marked).* is under a PyNative policy"):
        ms.jit(net.construct)(X)
