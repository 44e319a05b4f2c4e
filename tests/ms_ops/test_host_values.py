"""`hear_of_values`: indices and new tensors are heard while operators are intercepted, and only the user's own."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_ops import host_values
from ms_ops.dispatch import Interception
from ms_ops.host_values import hear_of_values
from tests.helpers import numbers

HELD: list[tuple[Any, str, Any]] = []


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, str, Any]]]:
    """What is heard, by wrappers that are installed for this test alone."""
    for name in ("__getitem__", "__init__", "from_numpy"):
        plain = inspect.unwrap(getattr(Tensor, name))
        monkeypatch.setattr(Tensor, name, staticmethod(plain) if name == "from_numpy" else plain)
    HELD.clear()
    hear_of_values(lambda site, what, value: HELD.append((site, what, value)))
    yield HELD
    for name in ("__getitem__", "__init__"):
        assert hasattr(getattr(Tensor, name), "__wrapped__")


def intercepted(code: Callable[[], Any]) -> list[tuple[str, Any]]:
    """What is heard while `code` runs under an interception."""
    with Interception(lambda name, run, args: run(*args)):
        code()
    return [(what, value) for _, what, value in HELD]


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (1, 1),
        (-1, -1),
        (slice(1, None, 2), ("slice", 1, None, 2)),
        ((Ellipsis, None, 0), (Ellipsis, None, 0)),
        ([0, 1], (0, 1)),
        (True, True),
    ],
)
def test_an_index_is_heard_as_it_is(index: Any, value: Any) -> None:
    x = numbers(2, 3)
    assert intercepted(lambda: x[index]) == [("index", value)]


def test_a_tensor_as_an_index_is_left_to_the_operator_that_takes_it() -> None:
    x, index = numbers(2, 3), Tensor([1])
    assert intercepted(lambda: x[index]) == [("index", Tensor)]


@pytest.mark.parametrize("make", [Tensor, ms.tensor])
@pytest.mark.parametrize("number", [2.5, 3, True, np.float32(2.5)])
def test_a_tensor_of_a_number_is_heard_with_it(make: Any, number: Any) -> None:
    assert intercepted(lambda: make(number)) == [("Tensor", number)]


@pytest.mark.parametrize("make", [Tensor, ms.tensor, lambda array: Tensor.from_numpy(array)])
def test_a_tensor_of_an_array_is_heard_with_its_checksum(make: Any) -> None:
    one, other = (intercepted(lambda value=value: make(np.full(3, value, np.float32)))[-1] for value in (1, 2))
    assert one[0] == other[0] == "Tensor"
    assert one[1][:2] == other[1][:2] == ((3,), "float32")
    assert one[1] != other[1]


@pytest.mark.parametrize(
    "data",
    [np.zeros(1 << 14), np.array(["a"], object), [numbers(2)], [0.0] * (1 << 14)],
    ids=["large", "objects", "tensors", "long"],
)
def test_what_is_large_or_no_number_is_not_compared(data: Any) -> None:
    assert host_values._value(data) is None


def test_nothing_is_heard_outside_of_an_interception() -> None:
    numbers(2)[0], Tensor(3)
    assert HELD == []


def test_what_mindspore_makes_and_indexes_itself_is_not_heard() -> None:
    dense, x = nn.Dense(3, 2), numbers(2, 3)
    assert intercepted(lambda: (dense(x), ops.norm(x), ops.meshgrid(x[0], x[1]))) == [("index", 0), ("index", 1)]


def test_the_same_instruction_is_the_same_site() -> None:
    x = numbers(3)
    intercepted(lambda: [x[index] for index in (0, 1)] + [x[2]])
    first, second, other = (site for site, _, _ in HELD)
    assert first == second != other
