"""Sessions, and the `run_backward` style: plain's bits, one replay per call; for other ways see the table."""

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager
from tests.exactness.programs.gradients import SENS, Inside, total
from tests.exactness.programs.program import X, Y
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Record, Stack, assert_same, flat, numbers, on, settled

KINDS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": RECOMPUTE},
    "swap": {"policy": SWAP},
    "swapped inputs": {"policy": RECOMPUTE, "swap_inputs": True},
}


def net_of(policy: Any = None, **options: Any) -> nn.Cell:
    """Three layers under a policy; the first one's input takes a gradient, too."""
    return Stack([on(Layer(seed=seed), policy, **options) for seed in (10, 20, 30)])


@pytest.mark.parametrize("order", [(1, 0), (0, 1), (0, 2, 1)], ids=["LIFO", "FIFO", "any order"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_micro_batch_of_a_session_is_replayed_once(kind: str, order: tuple[int, ...]) -> None:
    net, inputs = net_of(**KINDS[kind]), [numbers(3, 4, seed=40 + index) for index in range(len(order))]
    net.set_grad()
    pull = ops.GradOperation(get_all=True, sens_param=True)(net)
    for x in inputs:
        net(x)
    assert [layer.calls for layer in net.layers] == [len(order)] * 3
    for index in order:
        pull(inputs[index], SENS)
    replays = 0 if kind == "swap" else len(order)
    assert [layer.calls for layer in net.layers] == [len(order) + replays] * 3


class TestRunBackward:
    """As MindFormers does it: the flag is on for good, `Tensor.backward()` calls `run_backward`."""

    @pytest.fixture(autouse=True)
    def flag_on(self) -> Iterator[None]:
        _pynative_executor.set_grad_flag(True)
        yield
        _pynative_executor.set_grad_flag(False)

    def weights_of(self, net: nn.Cell) -> tuple:
        weights = tuple(net.trainable_params())
        for weight in weights:
            weight.requires_grad_()
        return weights

    def pull(self, net: nn.Cell, loss: Tensor, keep: bool = False, create: bool = False) -> Any:
        return run_backward(
            (loss,), (ops.ones_like(loss),), keep, create, self.weights_of(net), False, accumulate_grad=False
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_gradient_is_plains(self, kind: str) -> None:
        def run(net: nn.Cell) -> Record:
            return flat([self.pull(net, total(net, X)) for _ in range(2)], "steps")

        assert_same(run(net_of(**KINDS[kind])), run(net_of()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_kept_graph_goes_backward_twice(self, kind: str) -> None:
        def run(net: nn.Cell) -> Record:
            loss = total(net, X)
            return flat((self.pull(net, loss, keep=True), self.pull(net, loss)), "passes")

        assert_same(run(net_of(**KINDS[kind])), run(net_of()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_two_losses_share_one_forward(self, kind: str) -> None:
        def run(net: nn.Cell) -> Record:
            output = net(X)
            first, second = settled((output**2).sum()), (output * Y).sum()
            return flat((self.pull(net, first, keep=True), self.pull(net, second)), "losses")

        assert_same(run(net_of(**KINDS[kind])), run(net_of()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_micro_batches_go_backward_first_in_first_out(self, kind: str) -> None:
        def run(net: nn.Cell) -> Record:
            losses = [total(net, x) for x in (X, Y)]
            return flat([self.pull(net, loss) for loss in losses], "micro-batches")

        assert_same(run(net_of(**KINDS[kind])), run(net_of()))

    @pytest.mark.parametrize("kind", KINDS)
    def test_second_order(self, kind: str) -> None:
        def run(net: nn.Cell) -> Record:
            first = self.pull(net, total(net, X), keep=True, create=True)
            return flat(self.pull(net, sum((g**2).sum() for g in first)), "second order")

        assert_same(run(net_of(**KINDS[kind])), run(net_of()))

    def test_a_forward_without_backward_frees_what_it_swapped(self) -> None:
        net = net_of(SWAP)
        for _ in range(5):
            total(net, X)
            assert SwapManager().stats().live_bytes == 0
        assert SwapManager().stats().offloaded_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [None, RECOMPUTE, SWAP, SAVE], ids=lambda policy: getattr(policy, "name", "plain"))
def test_a_gradient_taken_inside_a_region_is_plains(kind: str, inner: Any) -> None:
    def run(cell: nn.Cell) -> Record:
        return flat(ms.value_and_grad(lambda x: total(cell, x), 0, cell.trainable_params())(X), "gradients")

    plain = Stack([Inside(Layer(seed=7)), Layer(seed=8)])
    net = Stack([on(Inside(on(Layer(seed=7), inner)), **KINDS[kind]), Layer(seed=8)])
    assert_same(run(net), run(plain))
