"""Results of operators that are kept or swapped: read once, written by others, nested, derived, dropped."""

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    CheckpointPolicy,
    PolicyError,
    ReplayMismatchError,
    SwapManager,
    activation_policy,
    apply_policy,
    checkpoint,
    checkpoint_wrapper,
    is_recomputing,
)
from hyper_parallel.core.activation_memory import operator_choice, operator_policy
from hyper_parallel.core.activation_memory.replay import Invocation
from tests.exactness.operators import Two, X, numbers_of
from tests.exactness.programs.entries import Called
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Record,
    Stack,
    assert_same,
    flat,
    gradients,
    mean_square,
    numbers,
    on,
)


@pytest.fixture(autouse=True)
def swaps_everything() -> Iterator[None]:
    operator_choice._reported.clear()
    SwapManager().configure(min_bytes=0, tier="host")
    SwapManager().reset()
    yield
    SwapManager().configure()


def test_kept_results_are_read_and_the_rest_is_run_once(replayed: Counter[str]) -> None:
    net = activation_policy(ops={"Exp": SAVE, "Tanh": SWAP})(Two())
    assert_same(gradients(net, X), gradients(Two(), X))
    assert replayed == {"Exp read": 1, "MatMul": 1, "Tanh read": 1}


def test_swapped_results_go_to_host_and_come_back() -> None:
    gradients(Stack([activation_policy(ops={"Exp": SWAP})(Two()), on(Two(), RECOMPUTE)]), X)
    stats = SwapManager().stats()
    assert (stats.offloaded_bytes, stats.loaded_bytes, stats.live_bytes) == (X.nbytes, X.nbytes, 0)


def test_results_swapped_beside_swapped_inputs_travel_in_one_group() -> None:
    net = Stack([on(Two(), RECOMPUTE, swap_inputs=True, ops={"Exp": SWAP}), Two()])
    plain_net = Stack([Two(), Two()])
    x = ops.exp(X)
    assert_same(gradients(net, x), gradients(plain_net, x))
    assert SwapManager().stats().live_bytes == 0


class Writes(nn.Cell):
    """Writes into the result of an operator, inside the region."""

    def construct(self, x: Tensor) -> Tensor:
        y = ops.stop_gradient(ops.exp(x))
        y[0] = 3.0
        return ops.tanh(x * y) * y


@pytest.mark.parametrize("min_bytes", [0, "1MiB"], ids=["swapped", "too small to be swapped"])
@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_kept_result_that_the_region_writes_itself_is_exact(policy: CheckpointPolicy, min_bytes: Any) -> None:
    SwapManager().configure(min_bytes=min_bytes, tier="host")
    assert_same(gradients(activation_policy(ops={"Exp": policy})(Writes()), X), gradients(Writes(), X))


class WritesItsProduct(nn.Cell):
    """Changes the result of a matrix product after an operator whose gradient needs the product."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.write = ms.Parameter(numbers(4, 4, seed=3), name="weight"), write

    def construct(self, x: Tensor) -> Tensor:
        y = ops.matmul(x, self.weight)
        before = ops.tanh(y)
        self.write(y)
        return ops.exp(y) * before


# ops.assign is for parameters: MindSpore itself refuses a result
PRODUCT_WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "y[...] = relu(y)": lambda y: y.__setitem__(..., ops.relu(y)),
    "copy_": lambda y: y.copy_(ops.relu(y)),
}


@pytest.mark.parametrize("when", ["inside", "by the caller"])
@pytest.mark.parametrize("writer", PRODUCT_WRITERS)
def test_a_kept_product_that_is_written_later_gives_plains_bits_or_an_error(writer: str, when: str) -> None:
    write = PRODUCT_WRITERS[writer]

    def run(put: Callable[[nn.Cell], nn.Cell]) -> Record | str:
        kept: list[Tensor] = []
        cell = WritesItsProduct(write if when == "inside" else kept.append)
        region = put(cell)

        def forward(x: Tensor) -> Tensor:
            y = region(x)
            if kept:
                write(kept[0])
            return mean_square(y)

        try:
            return flat(ms.value_and_grad(forward, 0, [cell.weight])(X), "gradients")
        except (ReplayMismatchError, RuntimeError, TypeError, ValueError) as error:
            return str(error)

    found, plain = run(activation_policy(ops={"MatMul": SAVE})), run(lambda cell: cell)
    if not isinstance(found, str):
        assert not isinstance(plain, str), "plain raises, and this doesn't"
        assert_same(found, plain)
    elif not isinstance(plain, str):
        assert "was written by" in found


class Leaks(nn.Cell):
    """Hands out the result of an operator, whose storage others may then write."""

    def construct(self, x: Tensor) -> Tensor:
        self.result = ops.exp(x)
        return ops.tanh(self.result) * 2


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "by Tensor.copy_": lambda tensor: tensor.copy_(numbers(3, 4, seed=1)),
    "through a numpy array": lambda tensor: tensor.asnumpy().fill(0),
}


@pytest.mark.parametrize(
    ("policy", "how", "allowed"),
    [
        (SAVE, "by Tensor.copy_", False),
        (SAVE, "by Tensor.copy_", True),
        (SWAP, "by Tensor.copy_", True),
        (SAVE, "through a numpy array", False),
        (SAVE, "through a numpy array", True),
    ],
)
def test_a_kept_result_that_is_written_from_outside_raises_unless_it_is_allowed(
    policy: CheckpointPolicy, how: str, allowed: bool
) -> None:
    net = Leaks()
    region = activation_policy(ops={"Exp": policy}, allow_cache_entry_mutation=allowed)(net)

    def forward(x: Tensor) -> Tensor:
        y = region(x)
        WRITES[how](net.result)
        net.result = None
        return y

    if allowed:
        ms.grad(forward)(X)
    else:
        with pytest.raises(ReplayMismatchError, match=f"the kept result of operator Exp .* was written {how}"):
            ms.grad(forward)(X)


def test_a_replay_that_runs_fewer_kept_operators_is_refused_with_both_counts() -> None:
    class Fewer(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x if is_recomputing() else ops.exp(x))

    with pytest.raises(ReplayMismatchError, match=r"operator 1 of 2 is Tanh in the replay.*but Exp in the forward"):
        ms.grad(activation_policy(ops={"Exp": SAVE})(Fewer()))(X)


# ---- nesting and derivatives


@pytest.mark.parametrize("outer", [RECOMPUTE, SWAP, SAVE])
def test_a_region_with_a_table_inside_another_is_exact(outer: CheckpointPolicy, replayed: Counter[str]) -> None:
    def net(inner: Any, around: Any) -> nn.Cell:
        two = Two()
        return Stack([around(Stack([Two(), inner(two), inner(two)])), Two()])

    put = activation_policy(ops={"MatMul": SAVE, "Exp": SWAP})
    assert_same(gradients(net(put, activation_policy(outer)), X), gradients(net(lambda c: c, lambda c: c), X))


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_table_around_a_region_is_about_its_own_operators_only(
    policy: CheckpointPolicy, replayed: Counter[str]
) -> None:
    net = on(Stack([Two(), on(Two(), RECOMPUTE)]), RECOMPUTE, ops={"MatMul": policy})
    assert_same(gradients(net, X), gradients(Stack([Two(), Two()]), X))
    assert (replayed["MatMul read"], replayed["MatMul"] > 0) == (1, True)


def test_second_derivatives_go_through_kept_results() -> None:
    def second(net: nn.Cell) -> np.ndarray:
        return ms.grad(lambda x: (ms.grad(lambda z: (net(z) ** 2).sum())(x) ** 2).sum())(X).asnumpy()

    kept = second(activation_policy(ops={"MatMul": SAVE, "Exp": SWAP})(Two()))
    assert np.array_equal(kept, second(Two()))


def test_micro_batches_in_any_order_read_their_own_results() -> None:
    net, twin = activation_policy(ops={"MatMul": SAVE, "Tanh": SWAP})(Two()), Two()

    def session(cell: nn.Cell) -> list[np.ndarray]:
        cell.set_grad()
        inputs = [numbers(3, 4, seed=seed) for seed in (1, 2, 3)]
        pull = ops.GradOperation(get_all=True, sens_param=True)(cell)
        outputs = [cell(x) for x in inputs]
        return [pull(inputs[index], outputs[index])[0].asnumpy() for index in (1, 0, 2)]

    for got, want in zip(session(net), session(twin), strict=True):
        assert np.array_equal(got, want)


def invocations() -> int:
    gc.collect()
    return sum(type(thing) is Invocation for thing in gc.get_objects())


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_graph_that_is_dropped_without_a_backward_leaves_nothing(policy: CheckpointPolicy) -> None:
    net = Stack([activation_policy(ops={"*": policy})(Two()), on(Two(), RECOMPUTE)])
    before = invocations()
    ms.grad(lambda x: (ops.stop_gradient(net(x)) * x).sum())(X).asnumpy()
    assert invocations() <= before
    assert SwapManager().stats().live_bytes == 0


# ---- collectives as a kind


@pytest.fixture
def exp_is_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has nobody to communicate with: Exp stands in."""
    monkeypatch.setattr(operator_policy, "COLLECTIVES", frozenset({"Exp"}))


KEEPERS: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "decorator": activation_policy(keep_collectives=True),
    "with a table": activation_policy(ops={"MatMul": SWAP}, keep_collectives=True),
    "with a function": activation_policy(policy_fn=lambda ctx, op, *args: PREFER_RECOMPUTE, keep_collectives=True),
    "wrapper": lambda cell: checkpoint_wrapper(cell, keep_collectives=True),
    "function": lambda cell: Called(functools.partial(checkpoint, keep_collectives=True), cell),
    "file": lambda cell: _by_file(cell, {"policy": "must_recompute", "keep_collectives": True}),
}


def _by_file(cell: nn.Cell, rule: dict[str, Any]) -> nn.Cell:
    net = nn.SequentialCell(cell)
    apply_policy(net, {"version": 1, "rules": [{"cells": "0", **rule}]})
    return net


@pytest.mark.parametrize("way", KEEPERS)
@pytest.mark.usefixtures("exp_is_a_collective")
def test_a_replay_reads_what_collectives_gave(way: str, replayed: Counter[str]) -> None:
    assert numbers_of(gradients(KEEPERS[way](Two()), X)) == numbers_of(gradients(Two(), X))
    assert (replayed["Exp read"], replayed["Exp"]) == (1, 0)


def test_collectives_are_those_of_the_catalogue() -> None:
    policy = operator_policy.KeepsCollectives(None)
    answers = [policy.decide(operator_policy.FORWARD, name, None, (), ()) for name in ("AllReduce", "AllGather", "Exp")]
    assert answers == [SAVE, SAVE, PREFER_RECOMPUTE]


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_collectives_are_kept_for_a_replay_only(policy: CheckpointPolicy) -> None:
    with pytest.raises(PolicyError, match=rf"keep_collectives=True is for a replayed region, .* {policy.name}"):
        activation_policy(policy, keep_collectives=True)
    with pytest.raises(TypeError, match="keep_collectives must be a bool, but got 1"):
        activation_policy(RECOMPUTE, keep_collectives=1)  # type: ignore[arg-type]
