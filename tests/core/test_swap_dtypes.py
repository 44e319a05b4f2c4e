"""Every dtype and shape through the engine and, where CPU kernels exist, through whole steps; checksums."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import HostMemoryError, SwapManager
from tests.core.swap_fakes import FakeTier, engine_with, group_of, on_host, tensor_of, value_of
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
DTYPES = (*FLOATS, ms.complex64, ms.complex128, ms.bool_, ms.int8, ms.uint8, ms.int16, ms.int32, ms.int64)


def raw(tensor: Tensor) -> bytes:
    return np.ascontiguousarray(tensor.asnumpy()).tobytes()


def example(dtype: Any, shape: tuple[int, ...]) -> Tensor:
    values = np.random.RandomState(0).rand(*shape) * 100
    if dtype in (ms.complex64, ms.complex128):
        return Tensor(np.asarray(values * (1 + 2j), ms.dtype_to_nptype(dtype)))
    return Tensor(np.asarray(values > 50 if dtype == ms.bool_ else values)).astype(dtype)


SHAPES: dict[str, Callable[[Any], Tensor]] = {
    "0-d": lambda dtype: example(dtype, ()),
    "one": lambda dtype: example(dtype, (1,)),
    "odd bytes": lambda dtype: example(dtype, (3, 7)),
    "transposed": lambda dtype: example(dtype, (4, 6)).T,
    "square, transposed": lambda dtype: example(dtype, (5, 5)).T,
    "a slice with an offset": lambda dtype: example(dtype, (6, 4))[2:5],
    "every second column": lambda dtype: example(dtype, (4, 6))[:, ::2],
    "broadcast": lambda dtype: ops.broadcast_to(example(dtype, (1, 4)), (3, 4)),
    "permuted": lambda dtype: example(dtype, (2, 3, 4)).permute(2, 0, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_comes_back_with_its_bytes_strides_and_offset(dtype: Any) -> None:
    tensors = [make(dtype) for make in SHAPES.values()]
    with engine_with(FakeTier(), verify=True) as engine:
        handles = group_of(engine, *tensors)
        on_host(handles)
        for name, tensor, handle in zip(SHAPES, tensors, handles, strict=True):
            back = handle.get()
            assert (back.shape, back.dtype, raw(back)) == (tensor.shape, tensor.dtype, raw(tensor)), name
            assert back.is_contiguous() == tensor.is_contiguous(), name
            if not tensor.is_contiguous():
                assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensors_of_one_dtype_travel_together(dtype: Any) -> None:
    tensors = [example(dtype, shape) for shape in [(), (3,), (5, 7), (2, 33)]]
    with engine_with(FakeTier(), fuse_below=2**20, verify=True) as engine:
        handles = group_of(engine, *tensors)
        assert len({id(handle.entry) for handle in handles}) == 1
        on_host(handles)
        assert [raw(handle.get()) for handle in reversed(handles)] == [raw(tensor) for tensor in reversed(tensors)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)], ids=str)
def test_a_tensor_without_elements_stays_as_it_is(dtype: Any, shape: tuple[int, ...]) -> None:
    with engine_with(FakeTier()) as engine:
        (kept,) = group_of(engine, Tensor(np.zeros(shape)).astype(dtype))
        assert (kept.get().shape, kept.get().dtype, engine.tier.used) == (shape, dtype, 0)


class InDtype(nn.Cell):
    """Arithmetic in a dtype: what it saves has that dtype, and a mask is bool."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype

    def construct(self, x: Tensor) -> Tensor:
        y = x.astype(self.dtype)
        z = (y * y + y * y.T).astype(ms.float32)
        return ops.tanh(ops.masked_fill(z, z > 1, 0.5))


class Indexes(nn.Cell):
    """Saves indices."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype

    def construct(self, x: Tensor) -> Tensor:
        order = ops.argsort(x.astype(ms.float32)).astype(self.dtype)
        return ops.gather_elements(ops.sin(x), 1, order)


class Complex(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.real(ops.fft(ops.sin(x))) * x


CELLS: dict[str, Callable[[], nn.Cell]] = {
    **{f"in {dtype}": lambda dtype=dtype: InDtype(dtype) for dtype in FLOATS},
    "int32 indices": lambda: Indexes(ms.int32),
    "int64 indices": lambda: Indexes(ms.int64),
    "complex64": Complex,
}


@pytest.mark.parametrize(
    "options", [{"policy": SWAP}, {"policy": RECOMPUTE, "swap_inputs": True}], ids=["swap", "inputs"]
)
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_in_every_dtype_gives_plains_numbers(cell: str, options: dict[str, Any], manager: SwapManager) -> None:
    manager.configure(min_bytes=0, verify=True)
    x = numbers(6, 6)
    make = CELLS[cell]
    got = gradients(Stack([Layer(6), on(make(), **options), on(Layer(6, seed=1), RECOMPUTE)]), x, wait=True)
    assert_same(got, gradients(Stack([Layer(6), make(), Layer(6, seed=1)]), x))
    assert manager.stats().offloaded_bytes > 0


@pytest.mark.parametrize("byte", [0, 1, 4095])
def test_verify_finds_one_byte_that_changed_on_host_and_names_the_tensor(byte: int) -> None:
    with engine_with(FakeTier(), verify=True) as engine:
        handles = group_of(engine, tensor_of(1), tensor_of(2), path="layers.5")
        on_host(handles)
        handles[0].entry.slot.place[byte] ^= 1
        texts = r"a saved tensor of layers\.5, shape \(1024,\), dtype float32.*: its bytes aren't those that left"
        with pytest.raises(HostMemoryError, match=texts):
            handles[0].get()
        assert value_of(handles[1]) == 2
        handles[0].entry.slot.place[byte] ^= 1
        assert value_of(handles[0]) == 1


def test_without_verify_nothing_is_summed() -> None:
    with engine_with(FakeTier()) as engine:
        (handle,) = group_of(engine, tensor_of(1))
        on_host([handle])
        assert handle.entry.checksum is None
