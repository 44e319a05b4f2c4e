"""Tensors and arrays over the same bytes (CPU backend)."""

import gc
import resource
import weakref
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops
from mindspore.common.initializer import initializer

from ms_ops.autograd import requires_grad, wait_for_operators
from ms_ops.tensors import (
    address_of,
    checksum,
    copy_of,
    is_on_host,
    nbytes_of,
    over,
    rebind,
    storage_of,
    untouched,
    view_of,
)
from tests.helpers import numbers
from tests.ms_ops.recorder import Recorder


def test_a_view_shares_the_bytes_of_the_tensor() -> None:
    tensor = ops.tanh(Tensor(np.ones((4, 4), np.float32)))
    assert address_of(view_of(tensor)) == tensor.data_ptr() == address_of(view_of(tensor))


def test_a_view_keeps_the_bytes_when_the_tensor_is_gone() -> None:
    tensor = ops.tanh(Tensor(np.ones((64, 64), np.float32)))
    view = view_of(tensor)
    del tensor
    gc.collect()
    others = [ops.exp(Tensor(np.ones((64, 64), np.float32))) for _ in range(4)]
    wait_for_operators()
    assert len(others) == 4
    assert (view == np.tanh(np.float32(1))).all()


def test_a_tensor_over_an_array_copies_nothing_and_keeps_it_alive() -> None:
    array = np.arange(1000, dtype=np.float32)
    reference = weakref.ref(array)
    tensor = over(array)
    assert tensor.data_ptr() == address_of(array)
    del array
    gc.collect()
    assert reference() is not None
    result = tensor * 2
    del tensor
    assert np.array_equal(result.asnumpy(), np.arange(1000, dtype=np.float32) * 2)


def test_the_array_dies_with_the_last_tensor_over_it() -> None:
    array = np.arange(1000, dtype=np.float32)
    reference = weakref.ref(array)
    tensor = over(array)
    del array, tensor
    wait_for_operators()
    gc.collect()
    assert reference() is None


def test_a_strided_tensor_gives_its_values_in_order() -> None:
    tensor = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert np.array_equal(view_of(tensor.T), np.arange(12, dtype=np.float32).reshape(3, 4).T)
    assert np.array_equal(view_of(tensor[:, 1:3]), np.arange(12).reshape(3, 4)[:, 1:3])


def test_the_bytes_of_a_tensor_are_those_that_mindspore_tells() -> None:
    for shape, kind in [((3, 5), np.float32), ((), np.int8), ((0, 2), np.float64), ((7,), np.complex64)]:
        tensor = Tensor(np.zeros(shape, kind))
        assert nbytes_of(tensor) == tensor.nbytes == np.zeros(shape, kind).nbytes
    assert nbytes_of(Tensor(np.zeros((4, 6), np.float32))[:, 1:3]) == 4 * 2 * 4


# ---- storages


def test_views_and_aliases_have_the_storage_of_their_tensor() -> None:
    tensor = ops.tanh(numbers(4, 4))
    others = [tensor.view(-1), tensor[1:], tensor.T, ops.stop_gradient(tensor)]
    assert [storage_of(other) for other in others] == [storage_of(tensor)] * 4


def test_results_and_copies_have_storages_of_their_own() -> None:
    tensor = ops.tanh(numbers(4, 4))
    others = [tensor, copy_of(tensor), tensor + 0, tensor.copy()]
    assert len({storage_of(other) for other in others}) == 4


def test_a_tensor_that_is_not_initialised_yet_has_no_storage() -> None:
    tensor = initializer("ones", [2], ms.float32)
    assert storage_of(tensor) == 0
    assert storage_of(tensor.init_data()) != 0


# ---- checksums

DTYPES = (ms.float16, ms.float32, ms.float64, ms.bfloat16, ms.int8, ms.uint8, ms.int32, ms.int64, ms.bool_)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def of_dtype(dtype: Any, *values: float) -> Tensor:
    return Tensor(np.array(values, np.float32)).astype(dtype)


@each_dtype
def test_a_checksum_tells_values_of_every_dtype_apart(dtype: Any) -> None:
    assert checksum(of_dtype(dtype, 0, 1, 0)) != checksum(of_dtype(dtype, 1, 1, 0))
    assert checksum(of_dtype(dtype, 0, 1, 0)) == checksum(of_dtype(dtype, 0, 1, 0))


def test_a_checksum_tells_swapped_rows_apart() -> None:
    values = numbers(2, 4).asnumpy()
    assert checksum(Tensor(values)) != checksum(Tensor(values[::-1].copy()))


def test_a_checksum_is_of_the_bits() -> None:
    assert checksum(Tensor(np.float32(0.0))) != checksum(Tensor(np.float32(-0.0)))


def test_a_strided_tensor_has_the_checksum_of_its_values_in_order() -> None:
    tensor = numbers(3, 4)
    assert checksum(tensor.T) == checksum(Tensor(tensor.asnumpy().T.copy()))


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_a_number_and_an_empty_tensor_have_checksums(shape: tuple) -> None:
    assert checksum(Tensor(np.ones(shape, np.float32))) == checksum(Tensor(np.ones(shape, np.float32)))


# ---- copies


@each_dtype
def test_a_copy_has_the_same_bytes_in_a_storage_of_its_own(dtype: Any) -> None:
    tensor = of_dtype(dtype, 0, 1, 2)
    copy = copy_of(tensor)
    assert (copy.dtype, copy.shape) == (dtype, (3,))
    assert copy.asnumpy().tobytes() == tensor.asnumpy().tobytes()
    assert storage_of(copy) != storage_of(tensor)


def test_later_writes_do_not_reach_a_copy() -> None:
    tensor = ops.tanh(numbers(2, 4))
    copy = copy_of(tensor)
    tensor.copy_(ops.ones_like(tensor))
    assert np.array_equal(copy.asnumpy(), ops.tanh(numbers(2, 4)).asnumpy())


def test_a_copy_of_a_result_has_no_history() -> None:
    seen: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        seen.extend(requires_grad(tensor) for tensor in (y, copy_of(y)))
        return y

    ms.grad(forward)(numbers(2))
    assert seen == [True, False]


def test_a_copy_of_a_parameter_is_no_parameter() -> None:
    parameter = Parameter(numbers(2), name="p")
    copy = copy_of(parameter)
    assert not isinstance(copy, Parameter)
    assert copy.param_info is None


# ---- rebinding a parameter


def test_a_parameter_that_is_rebound_has_the_new_bytes_and_the_old_ones_stay() -> None:
    parameter = Parameter(ops.tanh(numbers(2)), name="p")
    old, new = ops.stop_gradient(parameter), numbers(2, seed=1)
    rebind(parameter, new)
    assert np.array_equal(parameter.asnumpy(), new.asnumpy())
    assert np.array_equal(old.asnumpy(), ops.tanh(numbers(2)).asnumpy())


def test_a_parameter_that_is_rebound_and_back_is_what_it_was() -> None:
    parameter = Parameter(ops.tanh(numbers(2)), name="p")
    address, present = address_of(view_of(parameter)), ops.stop_gradient(parameter)
    rebind(parameter, numbers(2, seed=1))
    rebind(parameter, present)
    assert address_of(view_of(parameter)) == address
    assert (parameter.name, parameter.requires_grad) == ("p", True)


def test_rebinding_is_not_heard_as_a_write(recorder: Recorder) -> None:
    parameter = Parameter(numbers(2), name="p")
    recorder.written.clear()
    rebind(parameter, numbers(2, seed=1))
    assert "Parameter.set_data" not in recorder.heard_of(parameter)


# ---- tensors that nobody reads


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64], ids=str)
def test_an_untouched_tensor_has_shape_and_dtype(dtype: Any) -> None:
    tensor = untouched((2, 3), dtype)
    assert tensor is not None
    assert (tensor.shape, tensor.dtype) == ((2, 3), dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((2,), ms.bfloat16), ((2,), ms.int32), ((), ms.float32)])
def test_there_is_no_untouched_tensor_that_may_become_a_shape_nor_a_number(shape: tuple, dtype: Any) -> None:
    assert untouched(shape, dtype) is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_an_untouched_tensor_takes_no_memory() -> None:
    before = resident_bytes()
    held = [untouched((1 << 26,), ms.float32) for _ in range(2)]  # 256 MiB each
    assert len(held) == 2
    assert resident_bytes() - before < 1 << 26


def test_tensors_of_this_backend_are_on_host() -> None:
    assert is_on_host()
