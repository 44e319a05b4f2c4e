"""The user's own saved-tensor hooks around, inside, and on both sides of a region: plain's numbers, in a fixed order.

Documented order. The innermost pair of hooks decides, MindSpore asks no other one:
- hooks around a replayed or swapped region see nothing of what is saved inside it, and none of its inputs;
- hooks inside a region get what is saved inside them, in the forward and in every replay. What they have returned in
  the forward is what backward gives back to them.
"""

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.exactness.programs.entries import MODES, WAYS, put_by
from tests.exactness.programs.program import Put, X
from tests.helpers import Layer, Record, Stack, assert_same, flat, gradients, numbers, settled

EVERY_MODE = pytest.mark.parametrize("mode", MODES)


class Log:
    """Hooks that keep numpy copies, and note shapes."""

    def __init__(self) -> None:
        self.packed: list[tuple] = []
        self.unpacked: list[tuple] = []

    def hooks(self) -> Any:
        return ms.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> np.ndarray:
        self.packed.append(tensor.shape)
        return tensor.asnumpy().copy()

    def unpack(self, array: np.ndarray) -> Tensor:
        self.unpacked.append(array.shape)
        return Tensor(array)


class Hooked(nn.Cell):
    """A layer under hooks of the user's, between layers that have none."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.log = Layer(seed=1), Layer(seed=2), Layer(seed=3), log

    def construct(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.log.hooks():
            x = self.middle(x)
        return self.last(x)


def around(log: Log, put: Put, cell: Callable[[], nn.Cell] = Layer) -> Record:
    """Work before, a region, work after, all under hooks."""
    a, b, c = Layer(seed=8), cell(), Layer(seed=9)
    region = put(b)
    weights = Stack([a, b, c]).trainable_params()

    def function(x: Tensor) -> Tensor:
        with log.hooks():
            return settled((c(region(a(x))) ** 2).sum())

    return flat(ms.value_and_grad(function, 0, weights)(X), "step")


@pytest.mark.parametrize(("entry", "mode"), WAYS)
def test_hooks_around_a_region(entry: str, mode: str) -> None:
    assert_same(around(Log(), put_by(entry, mode)), around(Log(), lambda cell: cell))


@EVERY_MODE
def test_hooks_inside_a_region(mode: str) -> None:
    plain = gradients(Hooked(Log()), X)
    assert_same(gradients(put_by("decorated instance", mode)(Hooked(Log())), X, wait=True), plain)


@EVERY_MODE
def test_hooks_on_both_sides_of_a_region(mode: str) -> None:
    def run(put: Put) -> Record:
        inner = Log()
        return around(Log(), put, lambda: Hooked(inner))

    assert_same(run(put_by("decorated instance", mode)), run(lambda cell: cell))


@EVERY_MODE
def test_hooks_around_see_what_is_saved_outside_of_the_region_only(mode: str) -> None:
    log, without = Log(), Log()
    around(log, put_by("decorated instance", mode))
    around(without, lambda cell: cell, Hides)
    assert log.packed == without.packed
    assert sorted(log.unpacked) == sorted(log.packed)


class Hides(nn.Cell):
    """A layer that hides what it saves from hooks around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def construct(self, x: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.layer(x)


@EVERY_MODE
def test_hooks_inside_are_asked_once_for_each_tensor_and_run(mode: str) -> None:
    log, plain = Log(), Log()
    gradients(Hooked(plain), X)
    cell = Hooked(log)
    gradients(put_by("decorated instance", mode)(cell), X)
    assert plain.packed
    assert sorted(log.unpacked) == sorted(plain.unpacked)
    assert log.packed == plain.packed * cell.middle.calls


@EVERY_MODE
def test_hooks_that_drop_what_they_pack_and_compute_it_again(mode: str) -> None:
    """A checkpoint by hand: unpack runs operators, inside a region's backward."""

    class Halves(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            with ms.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
                return self.layer(x) * x

    assert_same(gradients(put_by("decorated instance", mode)(Halves()), X), gradients(Halves(), X))


@pytest.mark.parametrize("where", ["pack", "unpack"])
@pytest.mark.parametrize("side", ["around", "inside"])
@pytest.mark.parametrize("mode", ["recompute", "swap", "swapped inputs", "recompute in recompute"])
def test_a_hook_that_fails_raises_its_own_error_and_the_next_step_is_right(mode: str, side: str, where: str) -> None:
    class Fails(Log):
        failing = True

        def pack(self, tensor: Tensor) -> np.ndarray:
            if where == "pack" and self.failing:
                raise LookupError("of the user")
            return super().pack(tensor)

        def unpack(self, array: np.ndarray) -> Tensor:
            if where == "unpack" and self.failing:
                raise LookupError("of the user")
            return super().unpack(array)

    log = Fails()
    cell = put_by("decorated instance", mode)(Hooked(log if side == "inside" else Log()))

    def step() -> Record:
        def function(x: Tensor) -> Tensor:
            with log.hooks():
                y = ops.exp(x)
            return (cell(y) ** 2).sum()

        return flat(ms.value_and_grad(function)(X), "step")

    with pytest.raises(LookupError, match="of the user"):
        step()
    log.failing = False
    found = step()
    cell = Hooked(Log())
    assert_same(found, step())


class Light(nn.Cell):
    """One weight, few operators."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = ms.Parameter(numbers(4, seed=seed), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x * self.weight) + x


def layers_of(put: Put) -> nn.Cell:
    return Stack([put(Light(seed)) for seed in range(200)])


@functools.cache
def plain_of_two_hundred_layers() -> Record:
    return gradients(layers_of(lambda cell: cell), X)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_hundred_layers(mode: str) -> None:
    assert_same(gradients(layers_of(put_by("decorated instance", mode)), X), plain_of_two_hundred_layers())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_regions_twelve_deep_inside_one_another(mode: str) -> None:
    """A region replays what is inside of it: the innermost one runs once more for each region around it."""

    def net(put: Put) -> nn.Cell:
        cell: nn.Cell = Light(0)
        for seed in range(1, 12):
            cell = put(Stack([Light(seed), cell]))
        return cell

    assert_same(gradients(net(put_by("decorated instance", mode)), X), gradients(net(lambda cell: cell), X))
