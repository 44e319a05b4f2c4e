"""`Written`: what a write reaches."""

from collections.abc import Callable

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, ops
from mindspore.common.initializer import initializer

from hyper_parallel.core.activation_memory.written import Written
from ms_ops.tensors import storage_of
from tests.helpers import numbers


def result() -> Tensor:
    return ops.tanh(numbers(2, 4))


def written(tensor: Tensor, rebinds: bool = False) -> Written:
    return Written(tensor, "copy_", rebinds)


@pytest.mark.parametrize("rebinds", [False, True])
@pytest.mark.parametrize("make", [result, lambda: Parameter(numbers(2, 4), name="p")])
def test_a_write_reaches_the_tensor_itself(make: Callable[[], Tensor], rebinds: bool) -> None:
    tensor = make()
    assert written(tensor, rebinds).reaches(tensor)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "part": lambda x: x[1:],
    "transposed": lambda x: x.T,
    "alias": ops.stop_gradient,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_write_reaches_views_and_aliases(kind: str) -> None:
    tensor = result()
    view = VIEWS[kind](tensor)
    assert written(tensor).reaches(view)
    assert written(view).reaches(tensor)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_write_that_gives_a_new_storage_reaches_no_views(kind: str) -> None:
    tensor = result()
    assert not written(tensor, rebinds=True).reaches(VIEWS[kind](tensor))


@pytest.mark.parametrize("make", [result, lambda: result().copy(), lambda: Parameter(result(), name="p")])
def test_a_write_does_not_reach_others(make: Callable[[], Tensor]) -> None:
    assert not written(result()).reaches(make())


def test_a_write_into_a_parameter_reaches_its_aliases() -> None:
    parameter = Parameter(numbers(2, 4), name="p")
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda tensor: seen.append(tensor) or ops.stop_gradient(tensor), lambda t: t):
            return x * parameter

    ms.grad(forward)(numbers(2, 4))
    of_the_parameter = [tensor for tensor in seen if tensor.param_info is not None]
    assert [written(parameter).reaches(tensor) for tensor in of_the_parameter] == [True]
    assert not isinstance(of_the_parameter[0], Parameter)


def test_a_write_into_a_parameter_reaches_no_other_parameter() -> None:
    one, other = (Parameter(numbers(2, 4), name="p") for _ in range(2))
    assert not written(one).reaches(other)
    assert not written(one).reaches(result())


def test_tensors_of_another_dtype_are_not_asked_for_their_storage() -> None:
    assert not written(result()).reaches(initializer("ones", [2], ms.float16))


def test_a_tensor_without_a_storage_reaches_no_other() -> None:
    one, other = (initializer("ones", [2], ms.float32) for _ in range(2))
    assert storage_of(one) == storage_of(other) == 0
    assert not written(one).reaches(other)


def test_a_write_reaches_the_storage_that_it_is_asked_about() -> None:
    tensor = result()
    assert written(tensor).reaches_storage(storage_of(tensor))
    assert not written(tensor).reaches_storage(storage_of(result()))
    assert not written(tensor).reaches_storage(0)
    assert not written(tensor, rebinds=True).reaches_storage(storage_of(tensor))


def test_a_write_into_a_parameter_is_not_known_by_its_storage() -> None:
    parameter = Parameter(numbers(2, 4), name="p")
    assert not written(parameter).reaches_storage(storage_of(parameter))


def test_what_is_written_shows_shape_and_dtype_and_a_parameter_its_name() -> None:
    assert str(written(result())) == "(shape (2, 4), dtype Float32)"
    parameter = Parameter(numbers(2, 4), name="p")
    assert str(written(parameter)) == "(parameter p, shape (2, 4), dtype Float32)"
