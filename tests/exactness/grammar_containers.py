"""Layers of random nets that hold others: what becomes of them, and every way to call a cell."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from tests.exactness.grammar_leaves import EVERY, IDS, REPEATABLE, SIZE, TWICE_DIFFERENTIABLE
from tests.helpers import numbers

Call = Callable[..., Any]
"""How a cell is called: as itself, or through `checkpoint()` or `swap()`."""


def straight(call: Call, x: Tensor) -> Tensor:
    return call(x)


class Around(nn.Cell):
    """A cell around one other, or two."""

    def __init__(self, *inside: nn.Cell) -> None:
        super().__init__()
        self.inside = nn.CellList([*inside])

    def inner(self, x: Tensor) -> Tensor:
        return self.inside[0](x)

    def other(self, x: Tensor) -> Tensor:
        return self.inside[-1](x)


class Residual(Around):
    def construct(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gate(Around):
    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x) * ops.sigmoid(self.other(x))


class Branches(Around):
    def construct(self, x: Tensor) -> Tensor:
        return ops.concat((self.inner(x)[:, :1], self.other(x)[:, 1:]), 1)


class Twice(Around):
    """Tied weights: one cell, two calls."""

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)) * x


class Unused(Around):
    """One call whose output nobody reads, before one that counts."""

    def construct(self, x: Tensor) -> Tensor:
        self.inner(x * 3)
        return self.inner(x)


class Dropped(Around):
    """No output of the inner cell is read."""

    def construct(self, x: Tensor) -> Tensor:
        self.inner(x)
        return ops.tanh(x)


class Stopped(Around):
    def construct(self, x: Tensor) -> Tensor:
        return x * ops.stop_gradient(self.inner(x))


class Tied(Around):
    """Two layers share one weight; a cell stands between them."""

    def __init__(self, *inside: nn.Cell) -> None:
        super().__init__(*inside)
        self.first, self.second = nn.Dense(SIZE, SIZE), nn.Dense(SIZE, SIZE)
        self.second.weight = self.first.weight

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x)))


class OnWeight(Around):
    """No tensor comes in; a cell inside gets a Parameter."""

    def __init__(self, *inside: nn.Cell) -> None:
        super().__init__(*inside)
        self.weight = Parameter(numbers(SIZE, SIZE), name="weight")

    def construct(self) -> Tensor:
        return self.inner(self.weight) * self.weight


class ThreeInputs(Around):
    def construct(self, x: Tensor, other: Tensor, ids: Tensor) -> Tensor:
        return self.inner(x[ids]) * ops.tanh(other)


class Keywords(Around):
    def construct(self, x: Tensor, *, other: Tensor, times: int, how: str, nothing: Any = None) -> Tensor:
        assert nothing is None
        return getattr(ops, how)(self.inner(x) * times) + other


class Mapping(Around):
    """A dict comes in, nested containers go out."""

    def construct(self, state: dict) -> dict:
        y = self.inner(state["x"]) * state["more"][1]
        return {"y": y, "more": (None, "text", [y * state["x"], 3]), "ids": IDS}


class Appends(Around):
    """A list argument grows."""

    def construct(self, x: Tensor, history: list[Tensor]) -> Tensor:
        y = self.inner(history[-1])
        history.append(ops.tanh(y))
        return y * x


class GivesBack(Around):
    """One output is the input."""

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.inner(x)


class Scalar(Around):
    """A result without dimensions."""

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x).mean()


class TakesGradient(Around):
    def construct(self, x: Tensor) -> Tensor:
        return x * ms.grad(lambda z: (self.inner(z) ** 2).sum())(x)


class UserHooks(Around):
    """Saved-tensor hooks of the user's own."""

    def construct(self, x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: t.asnumpy().copy(), Tensor):
            return ops.tanh(self.inner(x)) * x


def half(*inside: nn.Cell) -> nn.Cell:
    return nn.SequentialCell(*inside).to_float(ms.float16)


def with_three_inputs(call: Call, x: Tensor) -> Tensor:
    return call(x, x * 0.5, IDS)


def with_keywords(call: Call, x: Tensor) -> Tensor:
    return call(x, other=x * 0.5, times=2, how="tanh", nothing=None)


def with_mapping(call: Call, x: Tensor) -> Tensor:
    found = call({"x": x, "more": [None, x + 1]})
    return found["y"] + found["more"][2][0][found["ids"]]


def with_a_list(call: Call, x: Tensor) -> Tensor:
    history = [x]
    y = call(x, history)
    return call(y, history) + history[-1] * len(history)


@dataclass(frozen=True)
class Container:
    """A layer with layers inside."""

    make: Callable[..., nn.Cell]
    most: int = 1
    """How many layers it takes; one at least."""
    use: Callable[[Call, Tensor], Tensor] = straight
    """How it is called, and what becomes of what it gives."""
    takes: Collection[str] = EVERY
    """Which leaves may be in it, at any depth."""


CONTAINERS: dict[str, Container] = {
    "sequence": Container(nn.SequentialCell, 3),
    "residual": Container(Residual),
    "gate": Container(Gate, 2, takes=REPEATABLE),
    "branches": Container(Branches, 2, takes=REPEATABLE),
    "called twice": Container(Twice, takes=REPEATABLE),
    "output unused": Container(Unused, takes=REPEATABLE),
    "never read": Container(Dropped),
    "output stopped": Container(Stopped),
    "tied weights": Container(Tied),
    "no input": Container(OnWeight, use=lambda call, x: x * call()),
    "three inputs": Container(ThreeInputs, use=with_three_inputs),
    "keywords": Container(Keywords, use=with_keywords),
    "dict in, dict out": Container(Mapping, use=with_mapping),
    "appends to a list": Container(Appends, use=with_a_list, takes=REPEATABLE),
    "gives its input back": Container(GivesBack, use=lambda call, x: ops.mul(*call(x))),
    "scalar": Container(Scalar, use=lambda call, x: x * call(x)),
    "user's hooks": Container(UserHooks),
    "half precision": Container(half, 2, use=lambda call, x: call(x).astype(ms.float32)),
    "gradient inside": Container(TakesGradient, takes=TWICE_DIFFERENTIABLE),
}


class Caller(nn.Cell):
    """Calls a cell in a given way."""

    def __init__(self, cell: nn.Cell, use: Callable[[Call, Tensor], Tensor], through: Callable[[Call], Call]) -> None:
        super().__init__()
        self.cell, self.use, self.through = cell, use, through

    def construct(self, x: Tensor) -> Tensor:
        return self.use(self.through(self.cell), x)
