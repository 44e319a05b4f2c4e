"""Tensors and arrays over the same bytes (CPU backend)."""

import gc
import weakref

import numpy as np
from mindspore import Tensor, ops

from ms_ops.autograd import wait_for_operators
from ms_ops.tensors import address_of, over, view_of


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
