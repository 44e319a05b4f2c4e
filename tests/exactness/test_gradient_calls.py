"""Every way to take a gradient gives plain's bits through every kind of region."""

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor

from hyper_parallel import SwapManager
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Record, Stack, assert_same, flat, numbers, on, settled

KINDS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": RECOMPUTE},
    "swap": {"policy": SWAP},
    "swapped inputs": {"policy": RECOMPUTE, "swap_inputs": True},
}
X, Y, SENS = numbers(3, 4, seed=1), numbers(3, 4, seed=2), numbers(3, 4, seed=3)


def net_of(policy: Any = None, **options: Any) -> nn.Cell:
    """Three layers under a policy; the first one's input takes a gradient, too."""
    return Stack([on(Layer(seed=seed), policy, **options) for seed in (10, 20, 30)])


def total(net: nn.Cell, x: Tensor) -> Tensor:
    return settled((net(x) ** 2).sum())


def by_value_and_grad(net: nn.Cell) -> Any:
    return ms.value_and_grad(lambda x: total(net, x), 0, net.trainable_params())(X)


def by_value_and_grad_of_the_cell(net: nn.Cell) -> Any:
    return ms.value_and_grad(net, 0, net.trainable_params())(X)


def by_value_and_grad_with_aux(net: nn.Cell) -> Any:
    return ms.value_and_grad(lambda x: (total(net, x), x * 2), 0, net.trainable_params(), has_aux=True)(X)


def by_grad(net: nn.Cell) -> Any:
    return ms.grad(lambda x: total(net, x))(X)


def by_grad_of_some_weights(net: nn.Cell) -> Any:
    return ms.grad(lambda x: total(net, x), None, [net.layers[1].dense.weight])(X)


def by_grad_of_the_second_input(net: nn.Cell) -> Any:
    return ms.grad(lambda x, y: total(net, x * y), 1)(X, Y)


def by_grad_operation(net: nn.Cell) -> Any:
    return ops.GradOperation()(net)(X)


def by_grad_operation_get_all(net: nn.Cell) -> Any:
    return ops.GradOperation(get_all=True)(net)(X)


def by_grad_operation_by_list(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ops.GradOperation(get_all=True, get_by_list=True)(net, weights)(X)


def by_grad_operation_with_sens(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ops.GradOperation(get_by_list=True, sens_param=True)(net, weights)(X, SENS)


def by_vjp(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X)
    return output, pull(SENS)


def by_vjp_with_weights(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X, weights=ms.ParameterTuple(net.trainable_params()))
    return output, pull(SENS)


def by_vjp_pulled_twice(net: nn.Cell) -> Any:
    output, pull = ms.vjp(net, X)
    return output, pull(SENS), pull(Y)


def by_set_grad(net: nn.Cell) -> Any:
    net.set_grad()
    output = net(X)
    return output, ops.GradOperation(get_all=True, sens_param=True)(net)(X, SENS)


def by_the_second_derivative(net: nn.Cell) -> Any:
    return ms.grad(lambda x: (ms.grad(lambda z: (net(z) ** 2).sum())(x) ** 2).sum())(X)


def by_mixed_second_derivatives(net: nn.Cell) -> Any:
    weights = ms.ParameterTuple(net.trainable_params())
    return ms.grad(lambda x: (ms.grad(lambda z: (net(z) ** 2).sum())(x) * Y).sum(), 0, weights)(X)


def by_the_third_derivative(net: nn.Cell) -> Any:
    first = ms.grad(lambda x: (net(x) ** 2).sum())
    second = ms.grad(lambda x: (first(x) ** 2).sum())
    return ms.grad(lambda x: (second(x) * Y).sum())(X)


WAYS = [value for name, value in list(globals().items()) if name.startswith("by_")]


def record_of(way: Callable[[nn.Cell], Any], net: nn.Cell) -> Record:
    return flat(way(net), way.__name__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_gradient_is_plains(way: Callable[[nn.Cell], Any], kind: str) -> None:
    assert_same(record_of(way, net_of(**KINDS[kind])), record_of(way, net_of()))


@pytest.mark.parametrize("order", [(1, 0), (0, 1), (0, 2, 1)], ids=["LIFO", "FIFO", "any order"])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_go_backward_in_any_order(kind: str, order: tuple[int, ...]) -> None:
    inputs = [numbers(3, 4, seed=40 + index) for index in range(len(order))]

    def run(net: nn.Cell) -> Record:
        net.set_grad()
        weights = ms.ParameterTuple(net.trainable_params())
        pull = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net, weights)
        outputs = [net(x) for x in inputs]
        calls = [layer.calls for layer in net.layers]
        found = flat(outputs, "outputs")
        for index in order:
            found.update(flat(pull(inputs[index], SENS), f"micro-batch {index}"))
        replays = [layer.calls - before for layer, before in zip(net.layers, calls, strict=True)]
        assert set(replays) == {len(order) if "recompute" in kind or "inputs" in kind else 0} or net is plain
        return found

    plain = net_of()
    assert_same(run(net_of(**KINDS[kind])), run(plain))


def test_one_forward_of_two_serves_both_gradients_of_a_session() -> None:
    def run(net: nn.Cell) -> Record:
        net.set_grad()
        pull = ops.GradOperation(get_all=True, sens_param=True)(net)
        first, second = net(X), net(Y)
        found = flat((first, second), "outputs")
        found.update(flat((pull(Y, SENS), pull(X, SENS)), "gradients"))
        net(X)
        found.update(flat(pull(X, Y), "next step"))
        return found

    assert_same(run(net_of(RECOMPUTE)), run(net_of()))


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
    class Inside(nn.Cell):
        def __init__(self, policy: Any) -> None:
            super().__init__()
            self.layer = on(Layer(seed=7), policy)

        def construct(self, x: Tensor) -> Tensor:
            return x * ms.grad(lambda z: (self.layer(z) ** 2).sum())(x) + self.layer(x)

    def run(cell: nn.Cell) -> Record:
        return flat(ms.value_and_grad(lambda x: total(cell, x), 0, cell.trainable_params())(X), "gradients")

    plain = Stack([Inside(None), Layer(seed=8)])
    net = Stack([on(Inside(inner), **KINDS[kind]), Layer(seed=8)])
    assert_same(run(net), run(plain))
