"""What a forward writes down is written once, by a step with a replay as by a forward alone; see also the table."""

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import PolicyError, ReplayMismatchError, is_recomputing, register_state_provider
from tests.exactness.programs.entries import ENTRIES, MODES, put_by
from tests.exactness.programs.program import X
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_same,
    gradients,
    numbers,
    on,
    seeded,
    state_of,
)


def _index(parameter: Parameter, value: Tensor) -> None:
    parameter[...] = value


WRITES: dict[str, Callable[[Parameter, Tensor], Any]] = {
    "ops.assign": ops.assign,
    "ops.assign_add": ops.assign_add,
    "copy_": lambda parameter, value: parameter.copy_(value),
    "set_data": lambda parameter, value: parameter.set_data(value),
    "x[...] = v": _index,
}


class Moves(nn.Cell):
    """Moves a statistic towards its input, and computes from what it was and from what it is."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.layer, self.write = Layer(), WRITES[write]
        self.statistic = Parameter(numbers(4, seed=3), name="statistic", requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(self.layer(x) + self.statistic)
        self.write(self.statistic, ops.stop_gradient(self.statistic * 0.5 + y.mean(0)))
        return ops.exp(y) * x + self.statistic


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_written_inside_is_written_once(write: str, mode: str) -> None:
    cell, plain = Moves(write), Moves(write)
    net = put_by("decorated instance", mode)(cell)
    for _ in range(2):
        assert_same(gradients(net, X), gradients(plain, X))
        assert_same(state_of(cell), state_of(plain))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("write", ["ops.assign", "set_data"])
def test_a_parameter_written_inside_is_written_once_whoever_put_the_policy(write: str, entry: str) -> None:
    cell, plain = Moves(write), Moves(write)
    net = put_by(entry, "recompute in recompute")(cell)
    assert_same(gradients(net, X), gradients(plain, X))
    assert_same(state_of(cell), state_of(plain))


@pytest.mark.parametrize("mode", MODES)
def test_two_calls_in_one_step_write_twice(mode: str) -> None:
    cell, plain = Moves("ops.assign"), Moves("ops.assign")
    net = put_by("decorated instance", mode)(cell)
    assert_same(gradients(Stack([net, net]), X), gradients(Stack([plain, plain]), X))
    assert_same(state_of(cell), state_of(plain))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_alone_writes_once(mode: str) -> None:
    def build() -> nn.Cell:
        return Stack([seeded(nn.BatchNorm1d(4)), Moves("ops.assign")]).set_train()

    cell, plain = build(), build()
    put_by("decorated instance", mode)(cell)(X)
    plain(X)
    assert_same(state_of(cell), state_of(plain))


def test_a_written_parameter_is_the_same_object_with_the_forwards_value() -> None:
    cell = on(Moves("set_data"), RECOMPUTE)
    statistic, values = cell.statistic, []

    def function(x: Tensor) -> Tensor:
        y = cell(x)
        values.append(statistic.asnumpy().copy())
        return (y**2).sum()

    ms.grad(function)(X)
    assert cell.statistic is statistic
    assert np.array_equal(statistic.asnumpy(), values[0])


def test_a_replay_that_fails_leaves_what_the_forward_wrote() -> None:
    class Fails(Moves):
        def construct(self, x: Tensor) -> Tensor:
            y = super().construct(x)
            if is_recomputing():
                raise LookupError("in replay")
            return y * x

    cell, plain = on(Fails("ops.assign"), RECOMPUTE), Moves("ops.assign")
    with pytest.raises(LookupError):
        gradients(cell, X)
    plain(X)
    assert_same(state_of(cell), state_of(plain))


class Keeps(nn.Cell):
    """Keeps its last result, and adds it to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = ops.zeros((3, 4), ms.float32)
        self.history: list[Tensor] = []

    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(x + self.hidden)
        self.hidden = ops.stop_gradient(y)
        self.history.append(self.hidden)
        return y * x


@pytest.mark.parametrize("mode", MODES)
def test_what_a_cell_keeps_is_what_the_forward_left(mode: str) -> None:
    cell, left = Keeps(), []
    net = put_by("decorated instance", mode)(cell)

    def function(x: Tensor) -> Tensor:
        y = net(x)
        left[:] = [cell.hidden, *cell.history]
        return (y**2).sum()

    for steps in (1, 2):
        ms.grad(function)(X)
        assert cell.hidden is left[0]
        assert len(cell.history) == steps
        assert all(now is then for now, then in zip(cell.history, left[1:], strict=True))


class Counts(nn.Cell):
    """Scales by a Python number that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return ops.tanh(x * self.calls) * x


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_python_counter_that_changes_the_result_is_noticed(entry: str) -> None:
    """Counters count replays, too; where one is computed with, the operators differ."""
    with pytest.raises(ReplayMismatchError, match=r"Muls\(2,?\).*Muls\(1,?\).*register_state_provider"):
        gradients(put_by(entry, "recompute")(Counts()), X)


class Takes(nn.Cell):
    """Takes another value from Python into a tensor each time it runs; no operator tells."""

    def __init__(self, take: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.take, self.calls = take, 0

    def construct(self, x: Tensor) -> Tensor:
        self.calls += 1
        return ops.tanh(self.take(ops.exp(x), self.calls)) * 2


TAKES: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "x[i]": (lambda x, i: x[i] * x[0], r"index is of 2 in the replay .*of 1 in the forward"),
    "x[:, i:]": (lambda x, i: x[:, i : i + 2], r"index is of \(\('slice'.*\('slice', 2, 4.*\('slice', 1, 3"),
    "x[[i]]": (lambda x, i: x[[i]], r"index is of \(2,\) .*\(1,\)"),
    "x[..., i, None]": (lambda x, i: x[..., i, None], r"index is of \(Ellipsis, 2, None\)"),
    "Tensor(i)": (lambda x, i: x * Tensor(float(i)), r"Tensor is of 2.0 in the replay"),
    "Tensor([i])": (lambda x, i: x * Tensor([float(i)]), r"Tensor is of \(\(1,\), 'float64', \d+\)"),
    "Tensor(array)": (lambda x, i: x * Tensor(np.full(4, i, np.float32)), r"Tensor is of \(\(4,\), 'float32'"),
    "ms.tensor(i)": (lambda x, i: x * ms.tensor(i), r"Tensor is of 2 in the replay"),
    "Tensor.from_numpy": (lambda x, i: x * Tensor.from_numpy(np.full(4, i, np.float32)), r"Tensor is of \(\(4,\)"),
}


@pytest.mark.parametrize("way", TAKES)
@pytest.mark.parametrize("mode", ["recompute", "recompute in recompute"])
def test_a_value_that_no_operator_tells_of_is_noticed(mode: str, way: str) -> None:
    take, message = TAKES[way]
    with pytest.raises(ReplayMismatchError, match=message):
        gradients(put_by("decorated instance", mode)(Takes(take)), X)


def test_a_tensor_that_is_made_once_and_kept_is_no_difference() -> None:
    @functools.cache
    def scale(power: int) -> Tensor:
        return Tensor(np.full(4, 2.0**power, np.float32))

    class Scales(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(ops.exp(x) * scale(1) * scale(2)) * scale(1)

    assert_same(gradients(on(Scales(), RECOMPUTE), X), gradients(Scales(), X))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("mode", ["recompute", "swapped inputs", "recompute in recompute"])
def test_a_python_counter_that_is_reported_is_exact(mode: str, entry: str) -> None:
    cell, plain = Counts(), Counts()
    net = put_by(entry, mode)(cell)
    provider = register_state_provider("calls", lambda: cell.calls, lambda calls: setattr(cell, "calls", calls))
    try:
        for steps in (1, 2):
            assert_same(gradients(net, X), gradients(plain, X))
            assert cell.calls == plain.calls == steps
    finally:
        provider.remove()


@pytest.mark.parametrize("policy", [SAVE, SWAP], ids=lambda policy: policy.name)
def test_a_counter_of_a_cell_that_runs_once_counts_once(policy: Any) -> None:
    cell = on(Counts(), policy)
    gradients(on(Stack([Layer(), cell]), RECOMPUTE), X)
    assert cell.calls == 1


def test_a_collective_in_a_cell_that_is_kept_runs_once_per_step() -> None:
    calls: list[int] = []

    class Reduces(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            calls.append(1)  # stands for an all-reduce
            return x * 2

    def build(policy: Any) -> nn.Cell:
        return Stack([Layer(seed=1), on(Reduces(), policy), Layer(seed=2)])

    found = gradients(on(build(SAVE), RECOMPUTE), X)
    assert len(calls) == 1
    assert_same(found, gradients(build(None), X))


@pytest.mark.parametrize("policy", [RECOMPUTE, PREFER_RECOMPUTE], ids=lambda policy: policy.name)
def test_an_operator_with_an_effect_runs_once(policy: Any, capfd: pytest.CaptureFixture) -> None:
    class Prints(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.print = ops.Print()

        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(x)
            self.print("the sum is", y.sum())
            return y * x

    found = gradients(on(Prints(), policy), X)
    assert capfd.readouterr().out.count("the sum is") == 1
    assert_same(found, gradients(Prints(), X))


def appended_to(container: Any, policy: Any) -> nn.Cell:
    class Appends(nn.Cell):
        def construct(self, x: Tensor, cache: Any) -> Tensor:
            if isinstance(cache, dict):
                cache[len(cache)] = x
            else:
                cache.append(x)
            return ops.tanh(x) * x

    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = on(Appends(), policy)

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x, container) * x

    return on(Outer(), RECOMPUTE)


@pytest.mark.parametrize("policy", [SAVE, SWAP], ids=lambda policy: policy.name)
@pytest.mark.parametrize("container", [[], {}], ids=["list", "dict"])
def test_a_cell_that_runs_once_and_changes_its_argument_is_refused(container: Any, policy: Any) -> None:
    with pytest.raises(PolicyError, match="Appends runs once inside a region that is replayed, but changes a list or"):
        gradients(appended_to(container, policy), X)


def test_moving_statistics_of_frozen_batch_norm_stay() -> None:
    def build() -> nn.Cell:
        return Stack([seeded(nn.BatchNorm1d(4, use_batch_statistics=False)), Layer()]).set_train()

    cell, plain = on(build(), RECOMPUTE), build()
    before = state_of(cell)
    assert_same(gradients(cell, X), gradients(plain, X))
    assert_same(state_of(cell), before)
