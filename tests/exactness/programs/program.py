"""What a program of the table is: code that takes gradients, with a place for a policy on each of its cells."""

import random
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from tests.helpers import Record, assert_nothing_live, numbers, settled

Put = Callable[[nn.Cell], nn.Cell]
"""Puts a policy on a cell, some way; gives the cell that is called instead: itself, or one around it."""

Program = Callable[[Put], Any]
"""Gives all that must be the same under every policy: nested containers of tensors, arrays and plain values."""

X, Y = numbers(3, 4, seed=1), numbers(3, 4, seed=2)


class Around(nn.Cell):
    """Hands everything on."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.cell(*args, **kwargs)


def step(function: Callable[..., Tensor], *cells: nn.Cell, inputs: tuple = (X, Y), times: int = 1) -> Any:
    """Loss and gradients of all inputs and of every trainable parameter, `times` over, and the buffers after that.

    Some faults corrupt the step after. What is swapped reaches the host before backward begins.
    """
    parameters = list({id(p): p for cell in cells for p in cell.get_parameters()}.values())
    for index, parameter in enumerate(parameters):
        parameter.name = f"parameter {index}"  # MindSpore refuses two of one name
    weights = [p for p in parameters if p.requires_grad]
    positions = tuple(range(len(inputs))) or None
    take = ms.value_and_grad(lambda *args: settled(function(*args)), positions, weights or None)
    taken = [take(*inputs) for _ in range(times)]
    return taken, [p for p in parameters if not p.requires_grad]


def named(namespace: dict[str, Any]) -> dict[str, Program]:
    """The functions of a module that take a `put`: its programs, by name."""
    return {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_") and getattr(value, "__annotations__", {}).get("put") is Put
    }


def record_of(program: Program, put: Put) -> Record:
    """What a program gives under a policy, and the state of every generator afterwards."""
    ms.set_seed(5)
    ms.manual_seed(6)
    np.random.seed(7)
    random.seed(8)
    record = _leaves(program(put), "result")
    record["the default generator"] = ms.get_rng_state().asnumpy().copy()
    _, keys, *rest = np.random.get_state()
    record["numpy's generator"] = np.array([*keys, *rest])
    record["Python's generator"] = np.array(random.getstate()[1])
    assert_nothing_live()
    return record


def _leaves(tree: Any, name: str) -> Record:
    if isinstance(tree, dict):
        return {key: leaf for k, item in tree.items() for key, leaf in _leaves(item, f"{name}[{k!r}]").items()}
    if isinstance(tree, (tuple, list)):
        return {key: leaf for i, item in enumerate(tree) for key, leaf in _leaves(item, f"{name}[{i}]").items()}
    if tree is None:
        return {}
    return {name: tree.asnumpy().copy() if isinstance(tree, Tensor) else np.array(tree)}
