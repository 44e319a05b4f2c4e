"""Who reads a tensor's values on host is heard, and so is who gets an array over its bytes."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from ms_ops import writes
from ms_ops.tensors import over, view_of
from tests.helpers import numbers
from tests.ms_ops.recorder import Recorder


def result() -> Tensor:
    return ops.tanh(numbers(2, 4))


def scalar() -> Tensor:
    return ops.tanh(Tensor(np.float32(1.5)))


def whole_number() -> Tensor:
    return Tensor(np.int64(2)) + 1


READERS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "item": (scalar, lambda x: x.item()),
    "tolist": (result, lambda x: x.tolist()),
    "bool": (scalar, bool),
    "if": (scalar, lambda x: 1 if x else 2),
    "not": (scalar, lambda x: not x),
    "int": (scalar, int),
    "float": (scalar, float),
    "index": (whole_number, range),
    "str": (result, str),
    "repr": (result, repr),
    "format": (scalar, lambda x: f"{x}"),
    "in": (result, lambda x: 0.5 in x),
    "max": (lambda: result()[0], max),
    "asnumpy": (result, lambda x: x.asnumpy()),
    "numpy": (result, lambda x: x.numpy()),
    "np.array": (result, np.array),
    "np.asarray": (result, np.asarray),
    "a function of numpy": (result, lambda x: np.add(x, 1)),
}


@pytest.mark.parametrize("way", READERS)
def test_a_value_that_is_read_on_host_is_heard(recorder: Recorder, way: str) -> None:
    make, read = READERS[way]
    tensor = make()
    recorder.read = 0
    read(tensor)
    assert recorder.read


@pytest.mark.parametrize("name", writes._READING_METHODS)
def test_every_reading_method_is_heard(recorder: Recorder, name: str) -> None:
    tensor = whole_number()
    getattr(tensor, name)()
    assert recorder.read


@pytest.mark.parametrize(
    "look", [lambda x: x.shape, lambda x: x.dtype, len, lambda x: x.ndim, hash, lambda x: x[0], lambda x: x == x]
)
def test_what_needs_no_value_is_not_heard(recorder: Recorder, look: Callable[[Tensor], Any]) -> None:
    tensor = result()
    look(tensor)
    assert (recorder.read, recorder.written, recorder.exposed) == (0, [], [])


# ---- arrays over a tensor's bytes


@pytest.mark.parametrize("way", ["asnumpy", "numpy", "np.asarray"])
def test_an_array_that_is_given_out_is_heard(recorder: Recorder, way: str) -> None:
    tensor = result()
    array = READERS[way][1](tensor)
    assert [(one is tensor, other.ctypes.data) for one, other in recorder.exposed] == [(True, array.ctypes.data)]
    array[...] = 7.0
    assert (tensor.asnumpy() == 7.0).all()


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x[1:], lambda x: x.T], ids=["view", "part", "T"])
def test_the_array_of_a_view_is_a_copy(view: Callable[[Tensor], Tensor]) -> None:
    """When this fails, MindSpore gives out more bytes than before."""
    tensor = result()
    before = tensor.asnumpy().copy()
    view(tensor).asnumpy()[...] = 7.0
    assert np.array_equal(tensor.asnumpy(), before)


@pytest.mark.parametrize("make", [Tensor.from_numpy, ms.from_numpy])
def test_a_tensor_over_an_array_is_heard(recorder: Recorder, make: Callable[[np.ndarray], Tensor]) -> None:
    array = np.ones(4, np.float32)
    tensor = make(array)
    assert [(one is tensor, other is array) for one, other in recorder.exposed] == [(True, True)]
    array[...] = 7.0
    assert (tensor.asnumpy() == 7.0).all()


def test_a_tensor_is_exposed_as_long_as_its_array_lives() -> None:
    tensor = result()
    assert not writes.is_exposed(tensor)
    array = tensor.asnumpy()
    assert writes.is_exposed(tensor)
    del array
    gc.collect()
    assert not writes.is_exposed(tensor)


def test_a_view_of_the_array_keeps_it_exposed() -> None:
    tensor = result()
    row = tensor.asnumpy()[0]
    assert row.base is not None
    assert writes.is_exposed(tensor)


def test_a_tensor_over_an_array_stays_exposed_since_it_holds_the_array() -> None:
    tensor = ms.from_numpy(np.ones(4, np.float32))
    gc.collect()
    assert writes.is_exposed(tensor)


def test_arrays_that_the_library_itself_takes_are_not_heard(recorder: Recorder) -> None:
    tensor = result()
    array, other = view_of(tensor), over(np.ones(4, np.float32))
    assert array.size == 8
    assert not (writes.is_exposed(tensor) or writes.is_exposed(other))
    assert (recorder.exposed, recorder.read) == ([], 0)


def test_an_array_that_can_not_be_written_exposes_nothing(recorder: Recorder) -> None:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    with contextlib.suppress(TypeError, ValueError):  # MindSpore takes it, or refuses
        assert not writes.is_exposed(ms.from_numpy(array))
    assert recorder.exposed == []


def test_a_tensor_that_gave_no_array_is_not_exposed() -> None:
    tensor = result()
    tensor.sum()
    assert not writes.is_exposed(tensor)


def test_nothing_is_remembered_of_a_tensor_that_is_gone() -> None:
    tensor = result()
    tensor.asnumpy()
    key = id(tensor)
    assert key in writes._arrays
    del tensor
    gc.collect()
    assert key not in writes._arrays


def test_no_read_is_called_while_the_observer_is_inactive(silent: Recorder) -> None:
    for make, read in READERS.values():
        read(make())
    ms.from_numpy(np.ones(4, np.float32))
    assert (silent.exposed, silent.read) == ([], 0)


def test_an_array_given_out_before_anybody_listens_is_known_later(silent: Recorder) -> None:
    tensor = result()
    array = tensor.asnumpy()
    assert array.flags.writeable
    assert writes.is_exposed(tensor)
