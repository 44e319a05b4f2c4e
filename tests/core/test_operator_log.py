"""`OperatorLog` and `LogReader`: what the forward ran, compared with a replay, and what a replay needn't run."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.utils import MsDispatchMode

from hyper_parallel import ReplayMismatchError, checkpoint, is_recomputing
from hyper_parallel.core.activation_memory.operator_log import (
    LogReader,
    OperatorLog,
    checksums_of,
    describe,
    plain_arguments,
    results_of,
)
from tests.helpers import RECOMPUTE, SAVE, Layer, numbers, on, seeded

F32 = ms.float32


# ---- entries


def test_plain_arguments_are_what_is_no_tensor() -> None:
    args = (numbers(2), 1, 2.5, True, "same", None, (3, [4, numbers(2)]), object())
    assert plain_arguments(args) == (1, 2.5, True, "same", None, (3, (4,)))


def test_results_are_shapes_and_dtypes_in_their_structure() -> None:
    assert results_of((numbers(2, 3), [Tensor(1), None])) == [((2, 3), F32), [((), ms.int64), None]]


def test_checksums_are_of_every_tensor_in_the_structure() -> None:
    one, other = numbers(2), numbers(2, seed=1)
    sums = checksums_of([one, (other, one), None])
    assert sums[0] == sums[1][1] != sums[1][0]
    assert sums[2] is None


def test_an_entry_is_described_with_arguments_and_results() -> None:
    assert describe(("TopK", (2,), [((3,), F32), None], None)) == "TopK(2,) -> (Float32 (3,), no tensor)"
    assert describe(("Tanh", (), ((2, 4), F32), None)) == "Tanh -> Float32 (2, 4)"
    assert describe(("Dropout", (), None, None)) == "Dropout"


def test_checksums_are_taken_only_if_they_are_asked_for() -> None:
    x = numbers(2)
    sums = []
    for values in (False, True):
        log = OperatorLog(values=values)
        log.write("Tanh", (x,), x)
        sums.append(log.entries[0][3])
    assert sums == [None, checksums_of(x)]


# ---- the comparison


def reader_of(*names: str, values: bool = False) -> LogReader:
    log = OperatorLog(values=values, all_needed=True)
    for name in names:
        log.write(name, (2,), numbers(3))
    return LogReader(log, "block")


def test_the_same_operators_pass() -> None:
    reader = reader_of("Tanh", "Exp")
    for name in ("Tanh", "Exp"):
        reader.begins(name)
        reader.ran(name, (2,), numbers(3))
    reader.finish()


def test_a_recorded_operator_is_compared_by_name_only() -> None:
    log = OperatorLog()
    log.write_once("Dropout")
    reader = LogReader(log, "block")
    reader.begins("Dropout")
    reader.finish()


DIFFERENCES: dict[str, tuple[tuple, Any]] = {
    "a number": ((3,), numbers(3)),
    "a shape": ((2,), numbers(4)),
    "a dtype": ((2,), numbers(3).astype(ms.float16)),
    "the number of results": ((2,), (numbers(3), numbers(3))),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_difference_raises_with_both_descriptions(kind: str) -> None:
    args, result = DIFFERENCES[kind]
    reader = reader_of("Tanh")
    reader.begins("Tanh")
    with pytest.raises(ReplayMismatchError) as caught:
        reader.ran("Tanh", args, result)
    found = describe(("Tanh", plain_arguments(args), results_of(result), None))
    for part in ("block: operator 1 of 1 is", found, "Tanh(2,) -> Float32 (3,) in the forward", "MUST_SAVE"):
        assert part in str(caught.value)


def test_an_operator_that_is_left_out_is_compared_by_its_arguments() -> None:
    reader = reader_of("Muls", "Muls")
    reader.begins("Muls")
    reader.left_out("Muls", (2,))
    reader.begins("Muls")
    with pytest.raises(ReplayMismatchError, match=r"operator 2 of 2 is Muls\(3,\)"):
        reader.left_out("Muls", (3,))


def test_nan_among_the_arguments_equals_itself() -> None:
    log = OperatorLog(all_needed=True)
    log.write("Muls", (float("nan"),), numbers(3))
    reader = LogReader(log, "block")
    reader.begins("Muls")
    reader.ran("Muls", (float("nan"),), numbers(3))


def test_other_values_raise_if_values_are_compared() -> None:
    reader = reader_of("Tanh", values=True)
    reader.begins("Tanh")
    with pytest.raises(ReplayMismatchError, match="with checksum"):
        reader.ran("Tanh", (2,), numbers(3, seed=1))


def test_the_line_of_the_replay_is_named() -> None:
    with pytest.raises(ReplayMismatchError, match=r"test_operator_log\.py:\d+"):
        reader_of("Tanh").begins("Exp")


# ---- operators that a replay needn't run


class Counting(MsDispatchMode):
    """Sees the operators that really run in replays."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __ms_dispatch__(self, func: Any, args: tuple, kwargs: Any = None) -> Any:
        if is_recomputing() and func.name != "StopGradient":  # our own aliases
            self.names.append(func.name)
        return func(*args)


def replayed(body: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> list[str]:
    """The operators that run in the replay of `body`, whose gradient must be plain's."""

    def gradient(function: Callable[[Tensor], Tensor]) -> np.ndarray:
        return ms.grad(lambda x: function(x) * 1.0)(x).asnumpy()

    with Counting() as seen:
        got = gradient(lambda x: checkpoint(body, x, **options))
    assert np.array_equal(got, gradient(body))
    return seen.names


X = numbers(2, 4)


def after_tanh(*more: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A body of tanh, whose result backward needs, times two, and more."""

    def body(x: Tensor) -> Tensor:
        y = ops.tanh(x) * 2.0
        for function in more:
            result = function(y)
            y = result if isinstance(result, Tensor) else y
        return y + 1.0

    return body


def test_operators_after_the_last_needed_one_do_not_run_again() -> None:
    assert replayed(after_tanh(), X) == ["Tanh"]


def test_operators_before_a_needed_one_run_again() -> None:
    assert replayed(after_tanh(ops.exp), X) == ["Tanh", "Muls", "Exp"]


def test_a_needed_input_of_the_last_operator_needs_what_made_it() -> None:
    assert replayed(lambda x: ops.sin(ops.tanh(x) * 2.0), X) == ["Tanh", "Muls", "Sin"]


def test_nothing_runs_again_if_backward_needs_nothing() -> None:
    assert replayed(lambda x: x * 2.0 + 1.0, X) == []


def test_all_operators_run_again_without_early_stop() -> None:
    assert replayed(after_tanh(), X, early_stop=False) == ["Tanh", "Muls", "AddExt"]


def test_all_operators_run_again_if_their_values_are_compared() -> None:
    assert replayed(after_tanh(), X, determinism_check="values") == ["Tanh", "Muls", "AddExt"]


PRODUCTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "ops.matmul": (lambda x: ops.matmul(ops.tanh(x), numbers(4, 3)), (2, 4)),
    "MatMul": (lambda x: ops.MatMul()(ops.tanh(x), numbers(4, 3)), (2, 4)),
    "ops.bmm": (lambda x: ops.bmm(ops.tanh(x), numbers(2, 4, 3)), (2, 2, 4)),
    "mint.bmm": (lambda x: mint.bmm(ops.tanh(x), numbers(2, 4, 3)), (2, 2, 4)),
    "ops.dense": (lambda x: ops.dense(ops.tanh(x), numbers(3, 4)), (2, 4)),
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_a_matrix_product_at_the_end_does_not_run_again(way: str) -> None:
    body, shape = PRODUCTS[way]
    assert replayed(body, numbers(*shape)) == ["Tanh"]


def test_a_matrix_product_in_the_middle_runs_again() -> None:
    assert replayed(lambda x: ops.exp(ops.matmul(ops.tanh(x), numbers(4, 3))), X) == ["Tanh", "MatMulExt", "Exp"]


def test_a_square_matrix_product_runs_again() -> None:
    """Its result has the shape of a factor: what was saved might be the result."""
    assert replayed(lambda x: ops.matmul(ops.tanh(x), numbers(4, 4)), numbers(4, 4)) == ["Tanh", "MatMulExt"]


READS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "item": (lambda y: y.sum().item(), ["SumExt"]),
    "bool": (lambda y: 1 if y.sum() > 0 else 2, ["SumExt", "Greater"]),
    "float": (lambda y: float(y.sum()), ["SumExt"]),
    "asnumpy": (lambda y: y.asnumpy().sum(), []),
    "tolist": (lambda y: y.tolist(), []),
    "str": (str, []),
    "np.array": (np.array, []),
}


@pytest.mark.parametrize("way", READS)
def test_what_a_value_read_on_host_depends_on_runs_again(way: str) -> None:
    read, operators = READS[way]
    assert replayed(after_tanh(read), X) == ["Tanh", "Muls", *operators]


def test_a_value_that_is_read_has_in_the_replay_what_it_had_in_the_forward() -> None:
    seen: list[float] = []
    replayed(after_tanh(lambda y: seen.append(y.sum().item())), X)
    assert len(seen) == 3  # forward, replay, plain
    assert len(set(seen)) == 1


def test_what_a_nested_region_depends_on_runs_again() -> None:
    found = replayed(after_tanh(lambda y: checkpoint(ops.sin, y)), X)
    assert found[:2] == ["Tanh", "Muls"]
    assert "AddExt" not in found


def test_what_a_kept_cell_depends_on_does_not_run_again() -> None:
    kept = on(Layer(), SAVE)
    assert replayed(after_tanh(kept), X) == ["Tanh"]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "x[...] = v": lambda y: ops.zeros_like(y).__setitem__(0, 1.0),
    "copy_": lambda y: (ops.zeros_like(y).copy_(ops.stop_gradient(y)), None)[1],
}


@pytest.mark.parametrize("way", WRITES)
def test_what_runs_before_a_write_runs_again(way: str) -> None:
    found = replayed(after_tanh(WRITES[way]), X)
    assert found[:2] == ["Tanh", "Muls"]
    assert "AddExt" not in found


def test_what_runs_before_a_normalisation_with_state_runs_again() -> None:
    cell = seeded(nn.BatchNorm1d(4)).set_train()
    found = replayed(lambda x: cell(ops.tanh(x) * 2.0) + 1.0, X)
    assert found[:2] == ["Tanh", "Muls"]
    assert "BatchNorm" in found
    assert "AddExt" not in found


def test_what_runs_before_an_old_primitive_that_saves_runs_again() -> None:
    assert "Muls" in replayed(lambda x: ops.TopK()(ops.tanh(x) * 2.0, 2)[0] + 1.0, X)


@pytest.mark.parametrize(
    "more",
    [
        lambda y: ops.split(y, 2, axis=1)[0],
        lambda y: (y.astype(ms.bfloat16) * 2.0).astype(F32),
        lambda y: y.sum() * 2.0,
    ],
    ids=["several results", "bfloat16", "a number"],
)
def test_what_has_no_stand_in_runs_on_what_stands_there(more: Callable[[Tensor], Tensor]) -> None:
    assert replayed(after_tanh(more), X)[0] == "Tanh"


def test_a_weight_gradient_of_a_net_is_plains_with_operators_left_out() -> None:
    def step(cell: nn.Cell) -> list[np.ndarray]:
        return [g.asnumpy() for g in ms.grad(lambda x: cell(x).sum(), None, cell.trainable_params())(X)]

    for got, want in zip(step(on(Layer(), RECOMPUTE)), step(Layer()), strict=True):
        assert np.array_equal(got, want)


# ---- what decides it, in the log itself


@pytest.fixture
def log() -> OperatorLog:
    found = OperatorLog()
    found.write("Tanh", (), numbers(2, 4))
    found.write("MatMul", (), numbers(2, 3))
    return found


def test_nothing_is_needed_at_first(log: OperatorLog) -> None:
    assert log.needed == 0


def test_a_saved_tensor_needs_all_so_far(log: OperatorLog) -> None:
    log.saved(numbers(2, 3))
    assert log.needed == 2


def test_a_saved_factor_of_a_matrix_product_needs_all_before_it(log: OperatorLog) -> None:
    log.saved(numbers(2, 4))
    assert log.needed == 1


def test_an_input_that_is_saved_before_any_operator_needs_none() -> None:
    log = OperatorLog()
    log.saved(numbers(2, 4))
    assert log.needed == 0


def test_what_is_needed_stays_needed(log: OperatorLog) -> None:
    log.need()
    log.saved(numbers(2, 4))
    assert log.needed == 2


@pytest.mark.parametrize("all_needed", [True, False])
def test_there_is_a_stand_in_only_for_what_is_not_needed(log: OperatorLog, all_needed: bool) -> None:
    log.saved(numbers(2, 4))
    log.all_needed = all_needed
    reader = LogReader(log, "block")
    assert reader.stand_in("Tanh") is None
    reader.begins("Tanh")
    found = reader.stand_in("MatMul")
    assert (found is None) is all_needed
    assert reader.stand_in("Exp") is None
    if found is not None:
        assert (found.shape, found.dtype) == ((2, 3), F32)
    reader.begins("MatMul")
    assert reader.stand_in("MatMul") is None
