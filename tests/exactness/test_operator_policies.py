"""Policies of operators: every policy on every operator of a net gives plain's bits, and does what it says."""

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
    PolicyOverruledWarning,
    ReplayMismatchError,
    SwapManager,
    activation_policy,
    apply_policy,
    checkpoint,
    checkpoint_wrapper,
    is_recomputing,
)
from hyper_parallel.core.activation_memory import operator_choice, operator_policy
from hyper_parallel.core.activation_memory.operator_log import LogReader
from hyper_parallel.core.activation_memory.replay import Invocation
from hyper_parallel.core.activation_memory.replay_scopes import Replaying
from tests.exactness.programs.entries import Called
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Block,
    ConvLayer,
    Record,
    Stack,
    assert_same,
    gradients,
    numbers,
    on,
    seeded,
    state_of,
)

PREFER_SAVE = CheckpointPolicy.PREFER_SAVE
MASK = Tensor(np.triu(np.ones((6, 6), bool), 1))


class Attends(nn.Cell):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.block(x, MASK) + ops.dropout(x, 0.25)


class Convolves(nn.Cell):
    """Two convolutions with BatchNorm, and a choice of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stack([ConvLayer(2, nn.MaxPool2d(3, 1, "same")), ConvLayer(2, nn.AvgPool2d(3, 1, "same"))])

    def construct(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        values, _ = ops.topk(y.reshape(y.shape[0], -1), 4)
        return y * values.sum()


NETS: dict[str, tuple[Callable[[], nn.Cell], Tensor]] = {
    "transformer": (Attends, numbers(6, 8)),
    "convolution": (Convolves, numbers(2, 2, 5, 5)),
}


def made(name: str) -> nn.Cell:
    ms.set_seed(3)
    return seeded(NETS[name][0]().set_train())


def trained(net: nn.Cell, name: str) -> Record:
    """Two steps, and what they leave."""
    ms.set_seed(5)
    found: Record = {}
    for step in range(2):
        found.update({f"step {step}, {what}": value for what, value in gradients(net, NETS[name][1]).items()})
    return {**found, **state_of(net)}


@functools.cache
def plain(name: str) -> Record:
    return trained(made(name), name)


@functools.cache
def dispatched(name: str) -> tuple[str, ...]:
    """The operators that a net runs, by asking for each."""
    seen: dict[str, None] = {}

    def asks(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        seen[op.dispatch_name] = None
        return PREFER_RECOMPUTE

    trained(activation_policy(policy_fn=asks)(made(name)), name)
    return tuple(seen)


@pytest.fixture(autouse=True)
def swaps_everything() -> Iterator[None]:
    operator_choice._reported.clear()
    SwapManager().configure(min_bytes=0, tier="host")
    SwapManager().reset()
    yield
    SwapManager().configure()


class Ran(Counter[str]):
    """What replays ran again, and what they read."""


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Ran:
    counts = Ran()
    ran, recorded = LogReader.ran, Replaying._recorded

    def count_ran(reader: Any, name: str, *rest: Any) -> None:
        counts[name] += 1
        ran(reader, name, *rest)

    def count_read(scope: Any, name: str, args: tuple) -> Any:
        counts[f"{name} read"] += 1
        return recorded(scope, name, args)

    monkeypatch.setattr(LogReader, "ran", count_ran)
    monkeypatch.setattr(Replaying, "_recorded", count_read)
    return counts


# ---- every policy on every operator


@pytest.mark.parametrize("policy", CheckpointPolicy, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.filterwarnings("ignore::hyper_parallel.PolicyOverruledWarning")
def test_every_policy_on_every_operator_is_exact(name: str, policy: CheckpointPolicy) -> None:
    assert len(dispatched(name)) > 9
    for operator in dispatched(name):
        answer = {operator: policy}
        net = activation_policy(policy_fn=lambda ctx, op, *args, a=answer: a.get(op.dispatch_name, PREFER_RECOMPUTE))(
            made(name)
        )
        assert_same(trained(net, name), plain(name))


@pytest.mark.parametrize("policy", CheckpointPolicy, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", NETS)
def test_one_policy_for_all_operators_is_exact(name: str, policy: CheckpointPolicy) -> None:
    net = activation_policy(ops={"*": policy})(made(name))
    assert_same(trained(net, name), plain(name))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.filterwarnings("ignore::hyper_parallel.PolicyOverruledWarning")
def test_every_second_operator_kept_or_swapped_is_exact(name: str) -> None:
    for shift in range(3):
        calls = Counter[bool]()

        def alternates(ctx: Any, op: Any, *args: Any, calls: Any = calls, shift: int = shift) -> CheckpointPolicy:
            calls[ctx.is_recompute] += 1
            return (SAVE, PREFER_RECOMPUTE, SWAP)[(calls[ctx.is_recompute] + shift) % 3]

        net = activation_policy(policy_fn=alternates)(made(name))
        assert_same(trained(net, name), plain(name))
        assert calls[True] == calls[False]


# ---- through every entry


def by_class(cell: nn.Cell, ops_: dict[str, CheckpointPolicy]) -> nn.Cell:
    base: Any = type(cell)
    cell.__class__ = activation_policy(ops=ops_)(type("Decorated", (base,), {"construct": base.construct}))
    return cell


def by_file(cell: nn.Cell, ops_: dict[str, CheckpointPolicy]) -> nn.Cell:
    net = nn.SequentialCell(cell)
    apply_policy(net, {"version": 1, "rules": [{"cells": "0", "ops": ops_}]})
    return net


ENTRIES: dict[str, Callable[[nn.Cell, dict[str, CheckpointPolicy]], nn.Cell]] = {
    "decorated class": by_class,
    "decorated instance": lambda cell, table: activation_policy(ops=table)(cell),
    "with a cell policy": lambda cell, table: activation_policy(PREFER_RECOMPUTE, ops=table)(cell),
    "wrapper, ops": lambda cell, table: checkpoint_wrapper(cell, ops=table),
    "wrapper, policy_fn": lambda cell, table: checkpoint_wrapper(cell, policy_fn=table),
    "function, ops": lambda cell, table: Called(functools.partial(checkpoint, ops=table), cell),
    "function, policy_fn": lambda cell, table: Called(functools.partial(checkpoint, policy_fn=table), cell),
    "policy file": by_file,
}
MATMULS = {"MatMul": SAVE, "*": PREFER_RECOMPUTE}


def numbers_of(record: Record) -> list[bytes]:
    """Without the names, in which a policy file's net has one more level."""
    return [value.tobytes() for value in record.values()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_table_does_the_same_by_every_entry(entry: str, replayed: Ran) -> None:
    net = ENTRIES[entry](made("transformer"), MATMULS)
    assert numbers_of(trained(net, "transformer")) == numbers_of(plain("transformer"))
    read = {name for name in replayed if name.endswith("read")}
    assert read == {"MatMul read", "BatchMatMul read", "Dropout read"} or read == {
        "MatMul read",
        "BatchMatMulExt read",
        "Dropout read",
    }
    assert not any("MatMul" in name for name in replayed.keys() - read)


@pytest.mark.parametrize("given", [["MatMul"], ("MatMul",), {"MatMul"}, [ops.matmul], [ops.MatMul]], ids=str)
def test_a_list_names_what_is_kept(given: Any, replayed: Ran) -> None:
    net = checkpoint_wrapper(made("transformer"), policy_fn=given)
    assert_same(trained(net, "transformer"), plain("transformer"))
    assert not any("MatMul" in name and not name.endswith("read") for name in replayed)
    assert replayed["MatMul read"] > 0


# ---- what a function is asked, and when


class Two(nn.Cell):
    """tanh, then a matrix product, then tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4, has_bias=False)
        seeded(self)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dense(ops.exp(x))) * 2


X = numbers(3, 4)


def test_a_function_is_asked_once_for_each_call_and_phase_after_and_before_it_runs() -> None:
    asked: list[tuple[bool, str, str]] = []

    def asks(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        assert ctx.is_recompute is is_recomputing()
        asked.append((ctx.is_recompute, op.name, op.dispatch_name))
        return PREFER_RECOMPUTE

    ms.grad(activation_policy(policy_fn=asks)(Two()))(X)
    names = [("Exp", "Exp"), ("MatMul", "MatMul"), ("Tanh", "Tanh"), ("Mul", "Muls")]
    assert asked == [(phase, *name) for phase in (False, True) for name in names]


def test_an_operator_knows_its_cell_outputs_and_arguments_in_both_phases() -> None:
    seen: list[Any] = []

    def asks(ctx: Any, op: Any, x: Tensor, *args: Any) -> CheckpointPolicy:
        seen.append((op.name, op.cell, op.outputs, x.shape))
        assert repr(op) == f"{op.dispatch_name} -> Float32 (3, 4) in {op.cell}"
        return PREFER_RECOMPUTE

    ms.grad(activation_policy(policy_fn=asks)(Two()))(X)
    assert seen[:4] == seen[4:]
    assert seen[1] == ("MatMul", "dense", [((3, 4), ms.float32)], (3, 4))
    assert seen[0][1] == "Two"


def test_an_answer_that_is_no_policy_is_refused_by_name() -> None:
    for answer in (True, "must_save", None, 0):
        with pytest.raises(PolicyError, match=rf"must answer a CheckpointPolicy, but answered {answer!r} .*Exp ->"):
            ms.grad(activation_policy(policy_fn=lambda ctx, op, *args, a=answer: a)(Two()))(X)
        ms.grad(Two())(X)


def test_another_answer_in_the_replay_is_refused_by_name() -> None:
    net = activation_policy(policy_fn=lambda ctx, op, *args: PREFER_RECOMPUTE if ctx.is_recompute else SAVE)(Two())
    with pytest.raises(ReplayMismatchError, match="PREFER_RECOMPUTE for Exp in the replay, but answered MUST_SAVE"):
        ms.grad(net)(X)


@pytest.mark.parametrize("in_replay", [False, True])
def test_an_error_of_the_function_comes_through_and_the_next_step_is_right(in_replay: bool) -> None:
    fails = [True]

    def asks(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        if fails[0] and ctx.is_recompute is in_replay and op.name == "Tanh":
            raise LookupError("mine")
        return SAVE

    net = activation_policy(policy_fn=asks)(Two())
    with pytest.raises(LookupError, match="mine"):
        gradients(net, X)
    fails[0] = False
    assert_same(gradients(net, X), gradients(Two(), X))


def test_a_random_operator_is_kept_and_reported_whatever_a_function_answers(replayed: Ran) -> None:
    net = activation_policy(policy_fn=lambda ctx, op, *args: RECOMPUTE)(made("transformer"))
    with pytest.warns(PolicyOverruledWarning, match=r"MUST_RECOMPUTE for Dropout is overruled, since it is random"):
        assert_same(trained(net, "transformer"), plain("transformer"))
    assert replayed["Dropout read"] == 2


# ---- what is kept, swapped, written


def test_kept_results_are_read_and_the_rest_is_run_once(replayed: Ran) -> None:
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


class Leaks(nn.Cell):
    """Hands out the result of an operator, whose storage others may then write."""

    def construct(self, x: Tensor) -> Tensor:
        self.result = ops.exp(x)
        return ops.tanh(self.result) * 2


@pytest.mark.parametrize("allowed", [False, True])
def test_a_kept_result_that_is_written_from_outside_raises_unless_it_is_allowed(allowed: bool) -> None:
    net = Leaks()
    region = activation_policy(ops={"Exp": SAVE}, allow_cache_entry_mutation=allowed)(net)

    def forward(x: Tensor) -> Tensor:
        y = region(x)
        net.result.copy_(ops.zeros_like(x))
        return y

    if allowed:
        ms.grad(forward)(X)
    else:
        with pytest.raises(
            ReplayMismatchError, match=r"the kept result of operator Exp .* was written by Tensor.copy_"
        ):
            ms.grad(forward)(X)


def test_a_replay_that_runs_fewer_kept_operators_is_refused_with_both_counts() -> None:
    class Fewer(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x if is_recomputing() else ops.exp(x))

    with pytest.raises(ReplayMismatchError, match=r"operator 1 of 2 is Tanh in the replay.*but Exp in the forward"):
        ms.grad(activation_policy(ops={"Exp": SAVE})(Fewer()))(X)


# ---- nesting and derivatives


@pytest.mark.parametrize("outer", [RECOMPUTE, SWAP, SAVE])
def test_a_region_with_a_table_inside_another_is_exact(outer: CheckpointPolicy, replayed: Ran) -> None:
    def net(inner: Any, around: Any) -> nn.Cell:
        two = Two()
        return Stack([around(Stack([Two(), inner(two), inner(two)])), Two()])

    put = activation_policy(ops={"MatMul": SAVE, "Exp": SWAP})
    assert_same(gradients(net(put, activation_policy(outer)), X), gradients(net(lambda c: c, lambda c: c), X))


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_a_table_around_a_region_is_about_its_own_operators_only(policy: CheckpointPolicy, replayed: Ran) -> None:
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
def test_a_replay_reads_what_collectives_gave(way: str, replayed: Ran) -> None:
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
