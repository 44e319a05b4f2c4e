"""Cells under policies inside one another: plain's numbers, and each runs exactly as often as the policies say."""

import itertools
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, SwapManager
from tests.exactness.programs.gradients import Inside
from tests.exactness.programs.program import Put, record_of, step
from tests.exactness.programs.randomness import DRAWS, Random
from tests.helpers import (
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_same,
    gradients,
    numbers,
    on,
)

X = numbers(3, 4, seed=1)


class Shell(nn.Cell):
    """A cell around another, with work of its own before and after."""

    def __init__(self, inner: nn.Cell, seed: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = Layer(seed=seed), inner, Layer(seed=seed + 5)
        self.calls = 0

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.after(self.inner(self.before(x)) * x)


def three_deep(outer: Any = None, middle: Any = None, inner: Any = None) -> nn.Cell:
    return on(Shell(on(Shell(on(Layer(seed=30), inner), seed=20), middle), seed=10), outer)


def runs(policies: tuple[CheckpointPolicy, ...]) -> int:
    """How often the innermost cell runs: once, and once per replayed region around it that no kept cell shields."""
    count = 1
    for policy in reversed(policies):
        if not policy.replays:
            break
        count += 1
    return count


DEPTH_THREE = [
    *itertools.product((SAVE, RECOMPUTE, SWAP), repeat=3),
    (PREFER_RECOMPUTE, PREFER_SAVE, RECOMPUTE),
    (RECOMPUTE, PREFER_RECOMPUTE, PREFER_SAVE),
    (PREFER_RECOMPUTE, SWAP, PREFER_RECOMPUTE),
]


@pytest.fixture(scope="module")
def plain() -> Any:
    return gradients(three_deep(), X)


@pytest.mark.parametrize("policies", DEPTH_THREE, ids=lambda policies: "-".join(policy.name for policy in policies))
def test_three_deep(policies: tuple[CheckpointPolicy, ...], plain: Any) -> None:
    net = three_deep(*policies)

    found = gradients(net, X, wait=SWAP in policies)

    assert_same(found, plain)
    assert net.calls == runs(policies[:1])
    assert net.inner.calls == runs(policies[:2])
    assert net.inner.inner.calls == runs(policies)
    if SWAP in policies:
        assert SwapManager().stats().offloaded_bytes > 0


@pytest.mark.parametrize("policy", [SAVE, PREFER_SAVE, SWAP], ids=lambda policy: policy.name)
def test_a_kept_cell_runs_once_however_many_regions_enclose_it(policy: CheckpointPolicy, plain: Any) -> None:
    net = three_deep(RECOMPUTE, RECOMPUTE, policy)

    assert_same(gradients(net, X), plain)
    assert net.inner.inner.calls == 1


@pytest.mark.parametrize("inner", [RECOMPUTE, SWAP], ids=lambda policy: policy.name)
def test_three_deep_around_a_cell_that_draws(inner: CheckpointPolicy) -> None:
    def run(policy: Any, inner: Any) -> Any:
        ms.set_seed(5)
        drawing = on(Random(DRAWS["ops.dropout"]), inner)
        net = on(Shell(on(Shell(drawing, seed=20), policy), seed=10), policy)
        return gradients(net, X, wait=True)

    assert_same(run(RECOMPUTE, inner), run(None, None))


def test_three_replays_around_a_swapped_cell_a_draw_and_a_gradient() -> None:
    nets: list[nn.Cell] = []

    def program(put: Put) -> Any:
        recompute = (lambda cell: on(cell, RECOMPUTE)) if put is not unchanged else put
        inner = Stack([put(Layer(seed=30)), Random(DRAWS["ops.dropout"]), Inside(Layer(seed=40))])
        net = recompute(Shell(recompute(Shell(recompute(inner), seed=20)), seed=10))
        nets.append(net)
        return step(lambda x, y: (net(x) * y).sum(), net)

    def unchanged(cell: nn.Cell) -> nn.Cell:
        return cell

    assert_same(record_of(program, lambda cell: on(cell, SWAP)), record_of(program, unchanged))
    net = nets[0]
    swapped, _, takes_a_gradient = net.inner.inner.layers
    assert [net.calls, net.inner.calls, swapped.calls] == [2, 3, 1]
    assert takes_a_gradient.layer.calls == 2 * 4, "twice in each of a forward and three replays"
    assert SwapManager().stats().offloaded_bytes > 0


def test_three_nested_replays_run_each_cell_once_more_per_enclosing_region(plain: Any) -> None:
    net = three_deep(RECOMPUTE, RECOMPUTE, RECOMPUTE)
    gradients(net, X)
    assert [net.calls, net.inner.calls, net.inner.inner.calls] == [2, 3, 4]


def test_inputs_swapped_at_every_level() -> None:
    net = three_deep(RECOMPUTE, RECOMPUTE, RECOMPUTE)
    for cell in (net, net.inner, net.inner.inner):
        on(cell, SWAP)

    # a layer before it: what the caller itself holds stays
    plain = gradients(Stack([Layer(seed=1), three_deep()]), X)
    assert_same(gradients(Stack([Layer(seed=1), net]), X, wait=True), plain)
    assert SwapManager().stats().offloaded_bytes == X.nbytes  # the inner inputs are replayed by the outer region


@pytest.mark.parametrize("kept", [SAVE, SWAP], ids=lambda policy: policy.name)
def test_siblings_inside_a_replayed_region(kept: CheckpointPolicy) -> None:
    def net(*policies: Any) -> nn.Cell:
        return Stack([on(Layer(seed=seed), policy) for seed, policy in enumerate(policies)])

    plain = gradients(net(None, None, None, None), X)
    stack = net(RECOMPUTE, kept, None, kept)
    assert_same(gradients(on(stack, RECOMPUTE), X, wait=True), plain)
    assert [layer.calls for layer in stack.layers] == [3, 1, 2, 1]


@pytest.mark.parametrize("inner", [SAVE, RECOMPUTE, SWAP], ids=lambda policy: policy.name)
@pytest.mark.parametrize("outer", [SAVE, RECOMPUTE, SWAP], ids=lambda policy: policy.name)
def test_a_nested_cell_called_twice_and_once_unused(outer: CheckpointPolicy, inner: CheckpointPolicy) -> None:
    class Twice(nn.Cell):
        def __init__(self, layer: nn.Cell) -> None:
            super().__init__()
            self.layer = layer

        def construct(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.layer(y * 3)
            return self.layer(y) * y

    assert_same(gradients(on(Twice(on(Layer(), inner)), outer), X, wait=True), gradients(Twice(Layer()), X))


@pytest.mark.parametrize("policy", [SAVE, SWAP], ids=lambda policy: policy.name)
def test_a_kept_cell_may_do_something_else_each_time(policy: CheckpointPolicy) -> None:
    class Drifts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def construct(self, x: Tensor) -> tuple:
            self.calls += 1
            return ops.tanh(x) * self.calls, None, {"calls": self.calls}

    class Uses(nn.Cell):
        def __init__(self, policy: Any) -> None:
            super().__init__()
            self.drifts, self.layer = on(Drifts(), policy), Layer()

        def construct(self, x: Tensor) -> Tensor:
            y, nothing, more = self.drifts(x)
            assert nothing is None
            return self.layer(y) * more["calls"]

    assert_same(gradients(on(Uses(policy), RECOMPUTE), X), gradients(Uses(None), X))


def test_a_function_inside_a_region_may_be_a_region() -> None:
    from hyper_parallel import checkpoint, swap

    class Functional(nn.Cell):
        def __init__(self, apply: Any) -> None:
            super().__init__()
            self.layer, self.apply_ = Layer(), apply

        def construct(self, x: Tensor) -> Tensor:
            return self.apply_(lambda z: self.layer(z) ** 2, x) * x

    plain = gradients(Functional(lambda function, x: function(x)), X)
    for apply in (checkpoint, swap):
        assert_same(gradients(on(Functional(apply), RECOMPUTE), X), plain)


def test_a_region_that_calls_itself() -> None:
    class Recursive(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor, depth: int = 0) -> Tensor:
            return self.layer(x) if depth == 3 else self(self.layer(x), depth + 1) * x

    plain = gradients(Recursive(), X)
    for policy in (RECOMPUTE, SWAP):
        assert_same(gradients(on(Recursive(), policy), X), plain)


def test_an_outer_region_replays_inner_swapped_results_in_second_order() -> None:
    def second(net: nn.Cell) -> Any:
        from tests.helpers import flat

        first = ms.grad(lambda x: (net(x) ** 2).sum())
        return flat(ms.grad(lambda x: (first(x) ** 2).sum())(X), "second order")

    def net(outer: Any, inner: Any) -> nn.Cell:
        return on(Stack([on(Layer(seed=1), inner), Layer(seed=2)]), outer)

    plain = second(net(None, None))
    for inner in (SAVE, SWAP, RECOMPUTE):
        assert_same(second(net(RECOMPUTE, inner)), plain)
