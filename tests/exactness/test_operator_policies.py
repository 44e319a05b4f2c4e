"""Policies of operators: every policy on every operator of a net gives plain's bits, and does what it says."""

import functools
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
from hyper_parallel.core.activation_memory import operator_choice
from tests.exactness.operators import Two, X, numbers_of
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


def by_file(cell: nn.Cell, ops_: Any) -> nn.Cell:
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
    "policy file, a list": lambda cell, table: by_file(cell, ["MatMul"]),
}
MATMULS = {"MatMul": SAVE, "*": PREFER_RECOMPUTE}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_table_does_the_same_by_every_entry(entry: str, replayed: Counter[str]) -> None:
    net = ENTRIES[entry](made("transformer"), MATMULS)
    assert numbers_of(trained(net, "transformer")) == numbers_of(plain("transformer"))
    read = {name for name in replayed if name.endswith("read")}
    assert read == {"MatMul read", "BatchMatMul read", "Dropout read"} or read == {
        "MatMul read",
        "BatchMatMulExt read",
        "Dropout read",
    }
    assert not any("MatMul" in name for name in replayed.keys() - read)


@pytest.mark.parametrize(
    "given",
    [["MatMul"], ("MatMul",), {"MatMul"}, [ops.matmul], [ops.MatMul]],
    ids=["list", "tuple", "set", "function", "primitive"],
)
def test_a_list_names_what_is_kept(given: Any, replayed: Counter[str]) -> None:
    net = checkpoint_wrapper(made("transformer"), policy_fn=given)
    assert_same(trained(net, "transformer"), plain("transformer"))
    assert not any("MatMul" in name and not name.endswith("read") for name in replayed)
    assert replayed["MatMul read"] > 0


# ---- what a function is asked, and when


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


def test_an_operator_that_the_function_keeps_says_the_same_later() -> None:
    kept: list[Any] = []
    before: list[str] = []

    def asks(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        kept.append(op)
        before.append(f"{op!r}")
        return PREFER_RECOMPUTE

    ms.grad(activation_policy(policy_fn=asks)(Two()))(X)
    assert [f"{op!r}" for op in kept] == before
    assert kept[1].cell == "dense"


def test_an_answer_that_is_no_policy_is_refused_by_name() -> None:
    for answer in (True, "must_save", None, 0):
        said = rf"Two: policy_fn must answer .* Exp -> .* in Two in the forward it answered {answer!r} of"
        with pytest.raises(PolicyError, match=said):
            ms.grad(activation_policy(policy_fn=lambda ctx, op, *args, a=answer: a)(Two()))(X)
        ms.grad(Two())(X)


def test_another_answer_in_the_replay_is_refused_by_name() -> None:
    net = activation_policy(policy_fn=lambda ctx, op, *args: PREFER_RECOMPUTE if ctx.is_recompute else SAVE)(Two())
    said = r"Two: policy_fn answers PREFER_RECOMPUTE for Exp -> .* in Two in the replay, but answered MUST_SAVE"
    with pytest.raises(ReplayMismatchError, match=said):
        ms.grad(net)(X)


@pytest.mark.parametrize("in_replay", [False, True])
def test_an_error_of_the_function_is_raised_with_cell_and_operator_and_the_next_step_is_right(in_replay: bool) -> None:
    fails = [True]

    def asks(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
        if fails[0] and ctx.is_recompute is in_replay and op.name == "Tanh":
            raise LookupError("mine")
        return SAVE

    net = activation_policy(policy_fn=asks)(Two())
    said = (
        rf"Two: policy_fn raised LookupError: mine, .* Tanh -> .* in Two in the {'replay' if in_replay else 'forward'}"
    )
    with pytest.raises(PolicyError, match=said) as caught:
        gradients(net, X)
    assert isinstance(caught.value.__cause__, LookupError)
    fails[0] = False
    assert_same(gradients(net, X), gradients(Two(), X))


def test_a_random_operator_is_kept_and_reported_whatever_a_function_answers(replayed: Counter[str]) -> None:
    net = activation_policy(policy_fn=lambda ctx, op, *args: RECOMPUTE)(made("transformer"))
    with pytest.warns(PolicyOverruledWarning, match=r"MUST_RECOMPUTE for Dropout is overruled, since it is random"):
        assert_same(trained(net, "transformer"), plain("transformer"))
    assert replayed["Dropout read"] == 2
