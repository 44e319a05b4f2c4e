"""Cells that draw numbers: a replay draws nothing anew, and every generator is where the forward left it.

MindSpore's nn.Dropout, dropout2d and bernoulli on CPU draw other numbers in every run and can't be seeded: there the
gradient is compared with the forward's own output instead of with another run.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tests.exactness.programs.program import Program, Put, X, named, step
from tests.helpers import Layer


class Random(nn.Cell):
    """A cell that draws numbers with one function, between operators that are replayed."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = Layer(), draw

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.draw(self.layer(x))) * x


def from_numpy(values: Any) -> Tensor:
    return Tensor(np.asarray(values, np.float32))


LOW, HIGH = Tensor(-1.0, ms.float32), Tensor(2.0, ms.float32)

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "ops.dropout": lambda x: ops.dropout(x, 0.4),
    "ops.dropout with a seed": lambda x: ops.dropout(x, 0.4, seed=3),
    "noise that is multiplied": lambda x: x * ops.randn(3, 4),
    "noise that backward doesn't need": lambda x: x + ops.randn(3, 4),
    "ops.rand": lambda x: x * ops.rand(3, 4),
    "ops.standard_normal": lambda x: x * ops.standard_normal((3, 4), seed=2),
    "ops.normal": lambda x: x * ops.normal((3, 4), LOW, HIGH),
    "ops.uniform": lambda x: x * ops.uniform((3, 4), LOW, HIGH),
    "random choice of rows": lambda x: x[ops.randint(0, 3, (3,))],
    "ops.randperm": lambda x: x[ops.randperm(3)],
    "multinomial": lambda x: x[ops.multinomial(ops.exp(x[:, 0]), 3, replacement=True)],
    "two draws": lambda x: ops.dropout(x * ops.randn(3, 4), 0.2),
    "a leaky slope that is drawn": lambda x: ops.rrelu(x, 0.1, 0.6),
    "numpy's global generator": lambda x: x * from_numpy(np.random.randn(3, 4)),
    "numpy's global generator, the second normal": lambda x: x * float(np.random.normal()),
    "Python's random": lambda x: x * random.random(),
    "Python's random choice of a branch": lambda x: ops.exp(x) if random.random() < 0.5 else ops.sin(x) * x,
}


def _draws(put: Put, kind: str) -> Any:
    """Followed by a plain cell that draws, and by a second step: neither may see that the first was replayed."""
    a, b = put(Random(DRAWS[kind])), Random(DRAWS["ops.dropout"])
    return step(lambda x, y: (b(a(x)) * y).sum(), a, b, times=2)


def a_cell_that_draws_called_twice(put: Put) -> Any:
    a = put(Random(DRAWS["ops.dropout"]))
    return step(lambda x, y: (a(x) * a(y)).sum() + a(a(x)).mean(), a)


ONES = ops.ones((6, 4), ms.float32)


class Drops(nn.Cell):
    """The square of what is left over."""

    def __init__(self, drop: Callable[[Tensor], Tensor], training: bool = True) -> None:
        super().__init__()
        self.drop = drop
        self.set_train(training)

    def construct(self, x: Tensor) -> Tensor:
        y = self.drop(x)
        return y * y


def _gradient_has_the_forwards_mask(forward: Callable[[Tensor], Tensor], scale: float) -> list[bool]:
    """Two steps of y = x mask / keep, squared, with x = 1: the gradient is 2 y / keep."""
    found = []
    for _ in range(2):
        outputs: list[np.ndarray] = []

        def noted(x: Tensor, outputs: list[np.ndarray] = outputs) -> Tensor:
            result = forward(x)
            outputs.append(result.asnumpy().copy())
            return result.sum()

        gradient = ms.grad(noted)(ONES).asnumpy()
        mask = outputs[0] != 0
        assert mask.any() and len(outputs) == 1
        found.append(np.array_equal(gradient, mask * np.float32(scale)))
    assert all(found)
    return found


def nn_dropout(put: Put) -> Any:
    return _gradient_has_the_forwards_mask(put(Drops(nn.Dropout(p=0.5))), 8)


def nn_dropout_with_a_global_seed(put: Put) -> Any:
    ms.set_seed(3)
    return _gradient_has_the_forwards_mask(put(Drops(nn.Dropout(p=0.5))), 8)


def nn_dropout_of_an_input_that_another_layer_computed(put: Put) -> Any:
    """MindSpore waits forever if a dispatch callback answers for nn.Dropout here."""
    a = put(Drops(nn.Dropout(p=0.5)))
    return _gradient_has_the_forwards_mask(lambda x: a(x * 2), 32)


def an_nn_dropout_called_twice(put: Put) -> Any:
    a = put(Drops(nn.Dropout(p=0.5)))
    return _gradient_has_the_forwards_mask(lambda x: a(x) + a(x * 0), 8)


def nn_dropout_in_evaluation(put: Put) -> Any:
    return _gradient_has_the_forwards_mask(put(Drops(nn.Dropout(p=0.5))).set_train(False), 2)


def dropout2d(put: Put) -> Any:
    return _gradient_has_the_forwards_mask(
        put(Drops(lambda x: ops.dropout2d(x.reshape(6, 4, 1, 1), 0.5).reshape(6, 4))), 8
    )


def bernoulli(put: Put) -> Any:
    return _gradient_has_the_forwards_mask(put(Drops(lambda x: x * ops.bernoulli(ops.ones_like(x), 0.5))), 2)


def a_dropped_tensor_that_comes_through_a_closure(put: Put) -> Any:
    """No argument of the region could be changed."""
    holder: list[Tensor] = []

    class Closes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.dropout(holder[0], 0.5) ** 2 * x

    a = put(Closes())

    def function(x: Tensor) -> Tensor:
        holder[:] = [x * 2]
        return a(x).sum()

    values = set(np.unique(ms.grad(function)(ONES).asnumpy()))
    holder.clear()
    assert values == {0.0, 48.0}
    return sorted(values)


def the_default_generator_moved_after_the_region(put: Put) -> Any:
    a = put(Layer())

    def function(x: Tensor, y: Tensor) -> Tensor:
        z = a(x)
        ms.manual_seed(2)
        return (z * y).sum()

    return step(function, a)


def the_default_generator_read_inside(put: Put) -> Any:
    class Looks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x) * x * float(ms.get_rng_state().asnumpy().astype(np.float32).sum())

    a = put(Looks())

    def function(x: Tensor) -> Tensor:
        z = a(x)
        ms.manual_seed(2)
        return z.sum()

    ms.manual_seed(1)
    return ms.value_and_grad(function)(X)


def generators_of_python_moved_after_the_region(put: Put) -> Any:
    a = put(Random(lambda x: x * from_numpy(np.random.rand(3, 4)) * random.random()))

    def function(x: Tensor, y: Tensor) -> Tensor:
        z = a(x)
        np.random.seed(1)
        random.seed(1)
        return (z * y).sum()

    return step(function, a)


PROGRAMS: dict[str, Program] = {
    **named(globals()),
    **{f"draws: {kind}": partial(_draws, kind=kind) for kind in DRAWS},
}
