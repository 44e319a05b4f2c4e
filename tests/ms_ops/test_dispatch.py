"""Operators as they are dispatched: their names, and which of them a replay may not run again."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import CheckpointPolicy, activation_policy
from ms_ops.autograd import alias, saved_tensors_hooks
from ms_ops.dispatch import (
    MATRIX_PRODUCTS,
    NO_ANSWER,
    NORMALISATION_WITH_STATE,
    RANDOM_OPERATORS,
    Interception,
    Kind,
    answer_old_primitives,
    arguments,
    is_old_primitive,
    keep_probability,
    kind_of,
    moving_statistics,
    on_copies_of_state,
    parameters_read,
    why_not_repeated,
    with_arguments,
    written_parameter,
)
from ms_ops.tensors import storage_of


def numbers(*shape: int) -> Tensor:
    return Tensor(np.random.RandomState(0).randn(*shape).astype(np.float32))


def seen(run: Callable[[], Any]) -> list[tuple[str, tuple]]:
    """Names and arguments of the operators that `run` dispatches."""
    found: list[tuple[str, tuple]] = []

    def answer(name: str, call: Callable[..., Any], args: tuple) -> Any:
        found.append((name, args))
        return call(*args)

    with Interception(answer):
        run()
    return found


def names(run: Callable[[], Any]) -> set[str]:
    return {name for name, _ in seen(run)}


X = numbers(2, 4)
RANDOM: dict[str, Callable[[], Any]] = {
    "nn.Dropout": lambda: nn.Dropout(p=0.5).set_train()(X),
    "ops.dropout": lambda: ops.dropout(X, p=0.5),
    "ops.dropout2d": lambda: ops.dropout2d(numbers(2, 3, 4, 4), p=0.5),
    "ops.randn": lambda: ops.randn(2, 3),
    "ops.rand": lambda: ops.rand(2, 3),
    "ops.uniform": lambda: ops.uniform((2, 3), Tensor(0.0), Tensor(1.0)),
    "ops.bernoulli": lambda: ops.bernoulli(Tensor([0.5, 0.5])),
    "ops.multinomial": lambda: ops.multinomial(Tensor([0.5, 0.5]), 4, replacement=True),
    "ops.randperm": lambda: ops.randperm(5),
}


@pytest.mark.parametrize("way", RANDOM)
def test_a_random_operator_is_seen_by_a_name_that_is_listed(way: str) -> None:
    assert names(RANDOM[way]) & RANDOM_OPERATORS


def test_batch_norm_is_seen_by_a_name_that_is_listed() -> None:
    assert names(lambda: nn.BatchNorm2d(3).set_train()(numbers(2, 3, 4, 4))) & NORMALISATION_WITH_STATE


@pytest.mark.parametrize(
    "run",
    [lambda: ops.tanh(X), lambda: ops.matmul(X, numbers(4, 2)), lambda: nn.LayerNorm((4,))(X), lambda: nn.GELU()(X)],
)
def test_an_ordinary_operator_is_plain(run: Callable[[], Any]) -> None:
    found = names(run)
    assert found
    assert {kind_of(name) for name in found} == {Kind.PLAIN}


WRITES: dict[str, Callable[[Parameter], Any]] = {
    "assign": lambda p: ops.assign(p, numbers(2, 4)),
    "assign_add": lambda p: ops.assign_add(p, numbers(2, 4)),
    "assign_sub": lambda p: ops.assign_sub(p, numbers(2, 4)),
    "copy_": lambda p: p.copy_(numbers(2, 4)),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_into_a_parameter_is_seen_with_the_parameters_info(way: str) -> None:
    parameter = Parameter(numbers(2, 4), name="counter", requires_grad=False)
    found = [args for name, args in seen(lambda: WRITES[way](parameter)) if kind_of(name) is Kind.WRITE]
    assert [written_parameter(args) is parameter.param_info for args in found] == [True]


def test_a_write_into_a_temporary_writes_no_parameter() -> None:
    temporary = numbers(2, 4) * 1.0
    found = [args for name, args in seen(lambda: temporary.copy_(numbers(2, 4))) if kind_of(name) is Kind.WRITE]
    assert [written_parameter(args) for args in found] == [None]


def test_print_and_random_operators_run_once() -> None:
    assert kind_of("Print") is Kind.ONCE
    assert {kind_of(name) for name in RANDOM_OPERATORS} == {Kind.ONCE}


def test_stop_gradient_is_seen_by_the_name_that_is_passed_over() -> None:
    assert {kind_of(name) for name in names(lambda: ops.stop_gradient(X))} == {Kind.UNSEEN}


def test_old_primitives_come_with_their_arguments_in_a_tuple() -> None:
    (args,) = [args for name, args in seen(lambda: ops.TopK()(X, 2)) if name == "TopK"]
    assert len(args) == 3
    assert args[1] == "TopK"
    own = arguments(args)
    assert own[0] is X
    assert arguments(with_arguments(args, (1, 2))) == (1, 2)
    assert with_arguments(args, (1, 2))[:2] == args[:2]


def test_other_operators_come_with_their_arguments_as_they_are() -> None:
    args = (X, 2)
    assert arguments(args) is args
    assert with_arguments(args, (3,)) == (3,)


def test_an_old_primitive_is_known_by_its_arguments() -> None:
    assert is_old_primitive((object(), "TopK", (X, 2)))
    assert not is_old_primitive((X, 2))


def test_an_old_primitive_is_answered_before_it_is_dispatched() -> None:
    recorded, dispatched = ops.TopK()(X, 2), []

    def early(name: str, args: tuple) -> Any:
        return recorded if name == "TopK" and args[1] == 2 else NO_ANSWER

    def answer(name: str, call: Callable[..., Any], args: tuple) -> Any:
        dispatched.append(name)
        return call(*args)

    answer_old_primitives()
    with Interception(answer, early):
        assert ops.TopK()(X, 2) is recorded
        assert ops.TopK()(X, 1) is not recorded
    assert ops.TopK()(X, 2) is not recorded
    assert dispatched == ["TopK"]


def test_moving_statistics_are_copied_for_a_repeated_normalisation_and_weights_are_not() -> None:
    weight, mean = Parameter(numbers(3), name="w"), Parameter(numbers(3), name="m", requires_grad=False)
    for args in ((X, weight, weight, mean, mean, True), (object(), "BatchNorm", (X, weight, weight, mean, mean, True))):
        assert all(one is mean for one in moving_statistics(args))
        own = arguments(on_copies_of_state(args))
        assert own[0] is X
        assert own[1] is weight
        assert own[2] is weight
        assert own[5] is True
        for copy in own[3:5]:
            assert copy.data_ptr() != mean.data_ptr()
            assert np.array_equal(copy.asnumpy(), mean.asnumpy())


def test_batch_norm_has_its_moving_statistics_where_they_are_looked_for() -> None:
    cell = nn.BatchNorm2d(3).set_train()
    (args,) = [args for name, args in seen(lambda: cell(numbers(2, 3, 4, 4))) if kind_of(name) is Kind.STATE]
    found = moving_statistics(args)
    assert found[0].param_info is cell.moving_mean.param_info
    assert found[1].param_info is cell.moving_variance.param_info


def test_an_answer_from_a_record_is_what_the_caller_gets_and_is_differentiated() -> None:
    recorded = ops.tanh(X)

    def answer(name: str, call: Callable[..., Any], args: tuple) -> Any:
        return recorded if name == "Tanh" else call(*args)

    def forward(x: Tensor) -> Tensor:
        with Interception(answer):
            return ops.tanh(x).sum()

    got = ms.grad(forward)(X).asnumpy()
    assert np.array_equal(got, ms.grad(lambda x: ops.tanh(x).sum())(X).asnumpy())


def test_an_interception_that_is_entered_again_sees_each_operator_once() -> None:
    found: list[str] = []

    def answer(name: str, call: Callable[..., Any], args: tuple) -> Any:
        found.append(name)
        return call(*args)

    interception = Interception(answer)
    with interception, interception:
        ops.tanh(X)
    with interception:
        ops.exp(X)
    ops.sin(X)
    assert found == ["Tanh", "Exp"]


def test_an_interception_is_left_after_an_exception() -> None:
    found: list[str] = []
    interception = Interception(lambda name, call, args: found.append(name) or call(*args))
    with pytest.raises(LookupError), interception, interception:
        raise LookupError
    ops.tanh(X)
    assert found == []


def test_operators_inside_an_answer_are_not_seen() -> None:
    found: list[str] = []

    def answer(name: str, call: Callable[..., Any], args: tuple) -> Any:
        found.append(name)
        ops.exp(args[0])
        return call(*args)

    with Interception(answer):
        ops.tanh(X)
    assert found == ["Tanh"]


@pytest.mark.parametrize("way", WRITES)
def test_a_parameter_that_a_replayed_region_writes_is_written_once(way: str) -> None:
    class Counting(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Parameter(numbers(2, 4) + 1, name="counter", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            WRITES[way](self.counter)
            return ops.tanh(x) * self.counter

    plain, replayed = Counting(), activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(Counting())
    gradients = [ms.grad(cell)(X).asnumpy() for cell in (plain, replayed)]
    assert np.array_equal(*gradients)
    assert np.array_equal(plain.counter.asnumpy(), replayed.counter.asnumpy())


# ---- matrix products

PRODUCTS: dict[str, tuple[str, Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "ops.matmul": ("MatMulExt", ops.matmul, [(3, 3), (3, 3)]),
    "ops.matmul of batches": ("MatMulExt", ops.matmul, [(2, 3, 3), (2, 3, 3)]),
    "MatMul": ("MatMul", ops.MatMul(), [(3, 3), (3, 3)]),
    "MatMul, transposed": ("MatMul", ops.MatMul(transpose_a=True, transpose_b=True), [(3, 4), (2, 3)]),
    "mint.bmm": ("BatchMatMulExt", mint.bmm, [(2, 3, 3), (2, 3, 3)]),
    "ops.bmm": ("BatchMatMul", ops.bmm, [(2, 3, 3), (2, 3, 3)]),
    "ops.dense": ("Dense", ops.dense, [(3, 3), (3, 3)]),
    "ops.dense with bias": ("Dense", ops.dense, [(3, 3), (3, 3), (3,)]),
}


def test_every_matrix_product_that_is_listed_is_looked_at() -> None:
    assert {name for name, _, _ in PRODUCTS.values()} == MATRIX_PRODUCTS


@pytest.mark.parametrize("way", PRODUCTS)
def test_a_matrix_product_saves_its_factors_and_nothing_else(way: str) -> None:
    """Why a replay needn't run it again; when this fails, `MATRIX_PRODUCTS` lists too much."""
    name, product, shapes = PRODUCTS[way]
    saved: list[int] = []
    storages: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(storage_of(tensor))
        return alias(tensor, tracked=False)

    def forward(*inputs: Tensor) -> Tensor:
        factors = [x * 1.0 for x in inputs]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            assert name in names(lambda: product(*factors))
        storages.extend(storage_of(factor) for factor in factors)
        return factors[0]

    ms.grad(forward, tuple(range(len(shapes))))(*(numbers(*shape) for shape in shapes))
    assert saved
    assert set(saved) <= set(storages)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dropout", [lambda p: nn.Dropout(p=p).set_train(), lambda p: lambda x: ops.dropout(x, p)])
def test_the_keep_probability_of_a_dropout_is_read_off_its_arguments(dropout: Callable, p: float) -> None:
    (args,) = [args for name, args in seen(lambda: dropout(p)(X)) if name == "Dropout"]
    assert keep_probability(args) == 1 - p


# ---- parameters, prints, and what is said of an operator


def test_the_parameters_that_an_operator_reads_are_known() -> None:
    one, other = Parameter(numbers(2, 4), name="a"), Parameter(numbers(2, 4), name="b")
    read = [info for _, args in seen(lambda: ops.cat((one, X, other))) for info in parameters_read(args)]
    assert [a.param_info is b.param_info for a, b in zip(read, (one, other), strict=True)] == [True, True]
    assert [found is one for found in parameters_read((object(), "TopK", (one, 2)))] == [True]
    assert parameters_read((X, 2, None)) == []


def test_normalisation_without_statistics_has_none_to_copy() -> None:
    assert moving_statistics((X, X)) == []
    assert on_copies_of_state((X, X, X, None, None)) == (X, X, X, None, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Print", "prints"),
        ("Dropout", "is random"),
        ("BatchNorm", "updates moving statistics"),
        ("AssignAdd", "writes a parameter"),
        ("Tanh", ""),
        ("InplaceCopy", ""),
    ],
)
def test_why_an_operator_may_not_run_again_is_said(name: str, reason: str) -> None:
    assert why_not_repeated(name) == reason


@pytest.mark.parametrize("answers", [True, False])
def test_print_is_answered_before_it_shows(capfd: pytest.CaptureFixture[str], answers: bool) -> None:
    answer_old_primitives()
    with Interception(lambda name, call, args: call(*args), lambda name, args: None if answers else NO_ANSWER):
        ops.Print()("shown")
    assert ("shown" in capfd.readouterr().out) is not answers


def test_print_shows_where_nobody_intercepts(capfd: pytest.CaptureFixture[str]) -> None:
    ops.Print()("shown")
    assert "shown" in capfd.readouterr().out
