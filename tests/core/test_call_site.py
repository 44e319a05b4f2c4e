"""`call_site`: where in the user's code something happens."""

import inspect
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import ReplayMismatchError, activation_policy, checkpoint, is_recomputing
from hyper_parallel.core.activation_memory.call_site import call_site
from tests.helpers import RECOMPUTE, numbers


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_the_line_and_function_that_call_are_named() -> None:
    assert call_site() == f" (at {__file__}:{line()}, test_the_line_and_function_that_call_are_named)"


def called_from(module: str) -> str:
    """The call site of a line in a module of that name, called from here."""
    scope: dict[str, Any] = {"__name__": module, "call_site": call_site}
    exec(compile("def inner():\n    return call_site()", f"<{module}>", "exec"), scope)
    return scope["inner"]()


@pytest.mark.parametrize("module", ["hyper_parallel.core.x", "ms_ops.y", "mindspore.nn.z", "mindspore", "ms_ops"])
def test_lines_of_the_library_and_of_mindspore_are_passed_over(module: str) -> None:
    assert "test_call_site.py" in called_from(module)
    assert "called_from" in called_from(module)


@pytest.mark.parametrize("module", ["mindspore_extras", "hyper_parallel.demo.model", "mine"])
def test_other_lines_are_not_passed_over(module: str) -> None:
    assert called_from(module) == f" (at <{module}>:2, inner)"


class Inner(nn.Cell):
    """Its construct asks where it is."""

    def construct(self, cells: Any) -> str:
        return self.helper(cells)

    def helper(self, cells: Any) -> str:
        return call_site(cells)


def test_the_innermost_cell_that_runs_is_named_by_its_class() -> None:
    assert Inner()(()).endswith(", helper, in Inner)")


def test_the_innermost_cell_that_runs_is_named_by_its_path_where_that_is_known() -> None:
    cell = Inner()
    assert cell([("layers.0", nn.Cell()), ("layers.1", cell)]).endswith(", helper, in layers.1)")


def test_a_construct_that_is_no_cells_is_not_named() -> None:
    class Builder:
        def construct(self) -> str:
            return call_site()

    assert Builder().construct().endswith(", construct)")


def test_a_mismatch_names_the_line_and_the_path_of_the_cell() -> None:
    class Flaky(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(x) if is_recomputing() else ops.tanh(x)

    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.CellList([Flaky()])

        def construct(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    with pytest.raises(ReplayMismatchError, match=r"test_call_site\.py:\d+, construct, in layers\.0\)"):
        ms.grad(activation_policy(RECOMPUTE)(Outer()))(numbers(2))


def test_a_mismatch_in_a_function_names_its_line() -> None:
    def body(x: Tensor) -> Tensor:
        return ops.exp(x) if is_recomputing() else ops.tanh(x)

    with pytest.raises(ReplayMismatchError, match=rf"test_call_site\.py:{inspect.getsourcelines(body)[1] + 1}, body"):
        ms.grad(lambda x: checkpoint(body, x))(numbers(2))
