"""The precision that a cell with `to_float` sets while it runs is a forward's surroundings, too."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from ms_ops import autograd
from ms_ops.autograd import Ambient, guard_gradient_calls
from tests.helpers import numbers


class Calls(nn.Cell):
    """Calls back while it runs."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act
        self.found: Any = None

    def construct(self, x: Tensor) -> Tensor:
        self.found = self.act()
        return x


def product_dtype() -> Any:
    return ops.matmul(numbers(2, 2), numbers(2, 2)).dtype


def inside_half_precision(act: Callable[[], Any]) -> Any:
    """What `act` gives inside a cell that runs in float16."""
    cell = Calls(act).to_float(ms.float16)
    cell(numbers(2))
    return cell.found


def test_a_cell_in_half_precision_has_its_operators_run_in_it() -> None:
    assert inside_half_precision(product_dtype) == ms.float16
    assert product_dtype() == ms.float32


def test_the_precision_of_the_forward_is_restored_inside_and_gone_afterwards() -> None:
    ambient = inside_half_precision(Ambient)
    with ambient.restored():
        assert product_dtype() == ms.float16
    assert product_dtype() == ms.float32


def test_it_is_gone_after_an_exception() -> None:
    ambient = inside_half_precision(Ambient)
    with pytest.raises(LookupError), ambient.restored():
        raise LookupError
    assert product_dtype() == ms.float32


def test_the_innermost_cell_decides() -> None:
    inner = Calls(Ambient).to_float(ms.float32)
    inside_half_precision(lambda: inner(numbers(2)))
    with inner.found.restored():
        assert product_dtype() == ms.float32


def test_outside_of_such_a_cell_there_is_none() -> None:
    assert Ambient().cell_precision is None
    assert inside_half_precision(lambda: Ambient().cell_precision) is not None
    assert autograd._cell_precision.stack == []


def test_a_cell_that_fails_in_a_gradient_leaves_none() -> None:
    cell = Calls(lambda: 1 / 0).to_float(ms.float16)
    with pytest.raises(ZeroDivisionError):
        ms.grad(cell)(numbers(2))
    assert autograd._cell_precision.stack == []
    assert product_dtype() == ms.float32


def test_following_again_changes_nothing() -> None:
    before = type(autograd._pynative_executor).set_mixed_precision_type
    guard_gradient_calls()
    assert type(autograd._pynative_executor).set_mixed_precision_type is before
