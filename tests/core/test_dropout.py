"""Packed dropout: one bit for each element, and the same bits in loss and gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import checkpoint
from hyper_parallel.core.activation_memory import dropout
from hyper_parallel.core.activation_memory.dropout import PackedDropout, PackedMask
from hyper_parallel.core.activation_memory.tape import Tape
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.dispatch import Interception
from ms_ops.tensors import storage_of
from tests.helpers import numbers

DTYPES = {ms.float16: np.float16, ms.float32: np.float32, ms.float64: np.float64}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_p = pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])


@pytest.fixture(autouse=True)
def small_tensors_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_LEAST_BYTES", 0)
    monkeypatch.setattr(dropout, "_agrees", {})


class Call:
    """One call of Dropout, as it is dispatched: what it was called with and what it gave."""

    def __init__(self, x: Tensor, p: float) -> None:
        def answer(name: str, run: Callable[..., Any], args: tuple) -> Any:
            result = run(*args)
            if name == "Dropout":
                self.args, self.result = args, result
            return result

        with Interception(answer):
            nn.Dropout(p=p).set_train()(x)

    def packed(self) -> PackedDropout:
        return PackedDropout(self.args, self.result, PackedMask(self.result[1]))


def values(dtype: Any = ms.float32, *shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.RandomState(seed).randn(*(shape or (5, 7))).astype(DTYPES[dtype]))


def same_bits(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and one.asnumpy().tobytes() == other.asnumpy().tobytes()


# ---- the formula


@each_p
@each_dtype
def test_the_kernel_gives_what_is_computed_from_its_mask(dtype: Any, p: float) -> None:
    """What packing relies on; when this fails, MindSpore's kernel has changed and nothing is packed any more."""
    x = values(dtype, 40, 50)
    call = Call(x, p)
    assert same_bits(dropout._result(x, call.result[1], 1 - p), call.result[0])
    mask = call.result[1].asnumpy()
    assert set(np.unique(mask)) <= {0, 1}
    assert call.result[1].dtype == dtype


LARGEST = {ms.float16: 3e4, ms.float32: 3e38, ms.float64: 1.7e308}


@each_dtype
def test_the_kernel_gives_the_same_bits_for_special_values(dtype: Any) -> None:
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, LARGEST[dtype], -LARGEST[dtype]]
    x = Tensor(np.array(some * 16).astype(DTYPES[dtype]))
    call = Call(x, 0.5)
    assert same_bits(dropout._result(x, call.result[1], 0.5), call.result[0])


# ---- what is kept


@each_p
@each_dtype
def test_a_packed_call_gives_its_results_again(dtype: Any, p: float) -> None:
    x = values(dtype)
    call = Call(x, p)
    packed = call.packed()
    packed.pack()
    for got, want in zip(packed.results(x), call.result, strict=True):
        assert same_bits(got, want)


def test_a_packed_call_keeps_bits() -> None:
    call = Call(values(), 0.5)
    packed = call.packed()
    packed.pack()
    assert packed._mask._bits.nbytes == 5  # 35 elements
    assert (packed._given, packed._x, packed._mask._tensor) == (None, None, None)


@pytest.mark.parametrize("shape", [(1,), (8,), (9,), (2, 3, 5)])
def test_a_mask_of_any_size_comes_back(shape: tuple[int, ...]) -> None:
    mask = Tensor(np.random.RandomState(0).randint(0, 2, shape).astype(np.float32))
    packed = PackedMask(mask)
    packed.pack()
    assert same_bits(packed.get(), mask)


def test_a_mask_that_is_not_packed_yet_is_the_operators() -> None:
    mask = Call(values(), 0.5).result[1]
    assert storage_of(PackedMask(mask).get()) == storage_of(mask)


def test_packing_twice_is_the_same_as_once() -> None:
    x = values()
    call = Call(x, 0.5)
    packed = call.packed()
    for _ in range(2):
        packed.pack()
        packed._mask.pack()
    assert same_bits(packed.results(x)[0], call.result[0])


def test_a_call_that_is_not_packed_yet_gives_what_the_operator_gave() -> None:
    call = Call(values(), 0.5)
    output, mask = call.packed().results(values(seed=1))
    assert storage_of(output) == storage_of(call.result[0])
    assert storage_of(mask) == storage_of(call.result[1])


# ---- when the formula doesn't agree


def test_a_call_whose_result_can_not_be_computed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_result", lambda x, mask, keep: x * mask * 3.0)
    x = values()
    call = Call(x, 0.5)
    packed = call.packed()
    packed.pack()
    assert packed._mask._bits is None
    assert storage_of(packed.results(x)[0]) == storage_of(call.result[0])


def test_a_mask_that_is_not_zeros_and_ones_is_kept() -> None:
    x = values()
    call = Call(x, 0.5)
    call.result = call.result[0], call.result[1] * 2.0
    packed = call.packed()
    packed.pack()
    assert packed._mask._bits is None


def test_it_is_checked_once_for_each_probability_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, p in ((ms.float32, 0.5), (ms.float32, 0.5), (ms.float16, 0.5), (ms.float32, 0.25)):
        Call(values(dtype), p).packed().pack()
    assert dropout._agrees == {(0.5, ms.float32): True, (0.5, ms.float16): True, (0.75, ms.float32): True}
    monkeypatch.setattr(dropout, "_result", None)  # asked no more
    Call(values(), 0.5).packed().pack()


@pytest.mark.parametrize("agrees", [True, False])
def test_what_was_found_before_decides(monkeypatch: pytest.MonkeyPatch, agrees: bool) -> None:
    monkeypatch.setattr(dropout, "_agrees", {(0.5, ms.float32): agrees})
    call = Call(values(), 0.5)
    packed = call.packed()
    assert packed._x is None  # the input is held for the check only
    packed.pack()
    assert (packed._mask._bits is not None) is agrees
    assert PackedDropout.suits("Dropout", call.args) is agrees


# ---- which calls are packed


def test_a_dropout_on_host_of_a_float_tensor_is_packed() -> None:
    for dtype in DTYPES:
        assert PackedDropout.suits("Dropout", Call(values(dtype), 0.5).args)


def test_other_random_operators_are_not_packed() -> None:
    assert not PackedDropout.suits("Dropout2D", Call(values(), 0.5).args)


def test_a_tensor_below_the_least_size_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_LEAST_BYTES", 36 * 4)
    assert not PackedDropout.suits("Dropout", Call(values(), 0.5).args)
    monkeypatch.setattr(dropout, "_LEAST_BYTES", 35 * 4)
    assert PackedDropout.suits("Dropout", Call(values(), 0.5).args)


def test_a_tensor_on_another_device_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Call(values(), 0.5).args
    monkeypatch.setattr(dropout, "is_on_host", lambda: False)
    assert not PackedDropout.suits("Dropout", args)


def test_a_tensor_of_another_dtype_is_not_packed() -> None:
    args = Call(values(), 0.5).args
    other = (args[0], args[1], (args[2][0].astype(ms.bfloat16), *args[2][1:]))
    assert not PackedDropout.suits("Dropout", other)


# ---- a write into a result


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_that_is_about_to_be_written_is_packed_before(which: int) -> None:
    x = values()
    call = Call(x, 0.5)
    want = [tensor.copy() for tensor in call.result]
    packed = call.packed()
    packed.rescue(Written(call.result[which], "copy_", False))
    call.result[which].copy_(ops.ones_like(x) * 7)
    for got, wanted in zip(packed.results(x), want, strict=True):
        assert same_bits(got, wanted)


def test_a_write_into_something_else_packs_nothing() -> None:
    packed = Call(values(), 0.5).packed()
    packed.rescue(Written(values() * 1.0, "copy_", False))
    assert packed._mask._bits is None


def test_a_packed_call_needs_no_rescue() -> None:
    x = values()
    call = Call(x, 0.5)
    packed = call.packed()
    packed.pack()
    packed.rescue(Written(call.result[0], "copy_", False))
    assert same_bits(packed.results(x)[0], call.result[0])


# ---- in a region


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """The tapes of the regions that have run, packed."""
    found: list[Tape] = []
    pack = Tape.pack
    monkeypatch.setattr(Tape, "pack", lambda tape, **options: (pack(tape, **options), found.append(tape)))
    yield found
    found.clear()


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> list[np.ndarray]:
    """Value and gradient, of a seeded dropout."""
    ms.set_seed(1)
    value, grad = ms.value_and_grad(function)(x)
    return [value.asnumpy().copy(), grad.asnumpy().copy()]


def block(p: float, before: Callable[[Tensor], Tensor] = ops.tanh) -> Callable[[Tensor], Tensor]:
    drop = nn.Dropout(p=p).set_train()
    return lambda x: ops.exp(drop(before(x)) * 0.5)


@pytest.mark.parametrize("p", [0.1, 0.5])
@each_dtype
def test_gradients_through_a_packed_dropout_are_plains(tapes: list[Tape], dtype: Any, p: float) -> None:
    x = values(dtype)
    got = gradient(lambda x: checkpoint(block(p), x).sum(), x)
    want = gradient(lambda x: block(p)(x).sum(), x)
    assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))
    ((_, entry),) = tapes[0].entries
    assert entry._mask._bits.nbytes == 5


def test_gradients_are_plains_where_the_formula_does_not_agree(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout, "_agrees", {(0.5, ms.float32): False})
    x = values()
    got = gradient(lambda x: checkpoint(block(0.5), x).sum(), x)
    want = gradient(lambda x: block(0.5)(x).sum(), x)
    assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))
    assert not isinstance(tapes[0].entries[0][1], PackedDropout)


def test_small_tensors_are_kept_as_they_are(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pack = Tape.pack
    monkeypatch.setattr(Tape, "pack", lambda tape, **options: (pack(tape, **options), tapes.append(tape)))
    gradient(lambda x: checkpoint(block(0.5), x).sum(), values())
    assert not isinstance(tapes[0].entries[0][1], PackedDropout)


def test_gradients_through_two_packed_dropouts_in_nested_regions_are_plains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_agrees", {(0.5, ms.float32): True, (0.7, ms.float32): True})

    def nested(wrap: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            one, other = block(0.5), block(0.3, ops.sin)  # made anew: seeded when they are made
            return wrap(lambda x: other(wrap(one, x)), x).sum()

        return function

    x = values()
    got, want = gradient(nested(checkpoint), x), gradient(nested(lambda function, x: function(x)), x)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_write_inside_a_region_after_a_dropout_is_exact() -> None:
    def body(x: Tensor) -> Tensor:
        y = nn.Dropout(p=0.5).set_train()(ops.tanh(x))
        z = ops.zeros_like(x)
        z[0] = 7.0
        return ops.exp(y + z) * x

    x = values()
    got = gradient(lambda x: checkpoint(body, x).sum(), x)
    want = gradient(lambda x: body(x).sum(), x)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_autograd_holds_the_packed_mask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old primitive isn't run again: what it saved waits for backward as it is, here as bits."""
    masks: list[tuple[int, bool]] = []
    get = PackedMask.get

    def seen(mask: PackedMask) -> Tensor:
        masks.append((id(mask), mask._tensor is None))
        return get(mask)

    monkeypatch.setattr(dropout, "_agrees", {(0.5, ms.float32): True})
    monkeypatch.setattr(PackedMask, "get", seen)
    gradient(lambda x: checkpoint(block(0.5), x).sum(), values())
    assert len({one for one, _ in masks}) == 1
    assert {packed for _, packed in masks} == {True}
    assert len(masks) >= 2  # the replay and the gradient of dropout


def test_without_a_gradient_nothing_is_packed(tapes: list[Tape]) -> None:
    checkpoint(block(0.5), numbers(5, 7))
    assert tapes == []
