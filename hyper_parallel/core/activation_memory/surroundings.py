"""What lives outside of a region that is swapped, and is left alone: parameters, tables, masks, gathered weights.

A storage that other code owns must not be moved: that would free nothing, and whoever owns it may free it.
"""

import functools
from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_memory.python_state import methods_of, names_in
from hyper_parallel.core.activation_memory.state_holders import CELLS_OWN
from hyper_parallel.core.activation_memory.trees import leaves
from ms_ops.autograd import mixed_precision_is_on
from ms_ops.cells import all_cells, has_own_precision, own_parameters
from ms_ops.tensors import storage_of


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> str:
    """What a value of this class may be: classes are compared once, since that is slow for MindSpore's."""
    if issubclass(cls, Parameter):
        return "parameter"
    if issubclass(cls, Tensor):
        return "tensor"
    return "container" if cls in (tuple, list, dict) else ""


class Surroundings:
    """The tensors that cells hold when a region begins.

    Args:
        owner: The cell or function whose code runs.
    """

    def __init__(self, owner: Any) -> None:
        self._parameters: list[Parameter] = []
        self._tensors: list[Tensor] = []
        self.casts_frozen_weights = False
        """Whether weights without a gradient may be cast inside, by mixed precision: their history doesn't say so."""
        has_precision = False
        for held in _held_by(owner):
            if not isinstance(held, nn.Cell):
                self._take(held)
                continue
            for cell in all_cells(held):
                has_precision = has_precision or has_own_precision(cell)
                self._parameters += own_parameters(cell)
                attributes = vars(cell)
                for name in attributes.keys() - CELLS_OWN:
                    self._take(attributes[name])
                for function in methods_of(type(cell)):  # type: ignore[arg-type]
                    for value in _read_by(function):
                        self._take(value)
        if has_precision or mixed_precision_is_on():
            self.casts_frozen_weights = any(not weight.requires_grad for weight in self._parameters)

    def _take(self, value: Any) -> None:
        kind = _kind(type(value))  # type: ignore[arg-type]
        if kind == "tensor":
            self._tensors.append(value)
        elif kind == "parameter":
            self._parameters.append(value)
        elif kind == "container" and value:
            self._tensors += [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]

    def storages(self) -> dict[int, str]:
        """Where the storages begin, and what a tensor in each of them counts as; waits for the queue."""
        found = {storage_of(tensor): "held_bytes" for tensor in self._tensors}
        found.update((storage_of(parameter), "parameter_bytes") for parameter in self._parameters)
        found.pop(0, None)
        return found


def _held_by(owner: Any) -> Iterator[Any]:
    if isinstance(owner, nn.Cell):
        yield owner
        return
    function = getattr(owner, "__func__", owner)
    this = getattr(owner, "__self__", None)
    if isinstance(this, nn.Cell):
        yield this
    if hasattr(function, "__code__"):
        yield from _read_by(function)


def _read_by(function: Any) -> Iterator[Any]:
    """What a function closes over or reads from its module."""
    for closed in function.__closure__ or ():
        try:
            yield closed.cell_contents
        except ValueError:  # not assigned yet
            continue
    module = function.__globals__
    for name in names_in(function.__code__):
        if name in module:
            yield module[name]
