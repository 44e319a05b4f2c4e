"""`checkpoint_exclude_wrapper`: what is excluded from a replayed region runs once, and the replay reads its output."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import PolicyError, checkpoint_exclude_wrapper, checkpoint_wrapper, is_recomputing
from hyper_parallel.core.activation_memory.tape import Tape
from tests.helpers import RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on, seeded

X = numbers(2, 4)


class Counts(Layer):
    """Counts its runs, in forward and replay."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.runs: list[str] = []

    def construct(self, x: Tensor) -> Tensor:
        self.runs.append("replay" if is_recomputing() else "forward")
        return super().construct(x)


def test_the_same_cell_comes_back() -> None:
    cell = Layer()
    assert checkpoint_exclude_wrapper(cell) is cell
    assert cell.unwrap_cell is cell


@pytest.mark.parametrize("save_output", [True, False])
@pytest.mark.parametrize("place", range(3))
def test_an_excluded_cell_runs_once_and_gradients_are_plains(place: int, save_output: bool) -> None:
    def net(wrap: Callable[[nn.Cell], Any], outer: Any) -> tuple[Counts, nn.Cell]:
        cells = [Counts(seed=seed) for seed in range(3)]
        wrap(cells[place])
        return cells[place], on(Stack(cells), outer)

    counted, excluded = net(lambda cell: checkpoint_exclude_wrapper(cell, save_output=save_output), RECOMPUTE)
    _, plain = net(lambda cell: cell, None)
    for _ in range(2):
        assert_same(gradients(excluded, X), gradients(plain, X))
    assert counted.runs == ["forward", "forward"]


@pytest.mark.parametrize("outer", [RECOMPUTE, SWAP])
def test_called_twice_in_nested_regions_it_reads_each_output(outer: Any) -> None:
    def net(wrap: Callable[[nn.Cell], Any], inner: Any, around: Any) -> nn.Cell:
        shared = Layer(seed=5)
        wrap(shared)
        return on(Stack([on(Stack([Layer(seed=1), shared, Layer(seed=2)]), inner), shared, Layer(seed=3)]), around)

    got = gradients(net(checkpoint_exclude_wrapper, RECOMPUTE, outer), X)
    assert_same(got, gradients(net(lambda cell: cell, None, None), X))


@pytest.mark.parametrize("kind", ["function", "Primitive", "bound method"])
def test_what_is_no_cell_is_excluded_too(kind: str) -> None:
    dense = seeded(nn.Dense(4, 4))
    runs: list[bool] = []

    def function(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return dense(x)

    target = {"function": function, "Primitive": ops.Tanh(), "bound method": dense.construct}[kind]
    excluded = checkpoint_exclude_wrapper(target)

    class Uses(nn.Cell):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.dense = dense
            object.__setattr__(self, "call", call)

        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(self.call(ops.sin(x))) * x

    got = gradients(on(Uses(excluded), RECOMPUTE), X)
    assert runs in ([], [False])
    assert_same(got, gradients(Uses(target), X))
    assert excluded.unwrap_cell is target


def kept(monkeypatch: pytest.MonkeyPatch, save_output: bool, last: bool) -> list[bool]:
    """Whether the tape of a region holds zeros instead of the output of its excluded cell."""
    tapes: list[Tape] = []
    pack = Tape.pack
    monkeypatch.setattr(Tape, "pack", lambda tape, **options: (pack(tape, **options), tapes.append(tape)))
    excluded = checkpoint_exclude_wrapper(Layer(), save_output=save_output)
    cells = [Layer(seed=1), excluded] if last else [excluded, Layer(seed=1)]
    ms.grad(on(Stack(cells), RECOMPUTE))(X)
    return [not np.any(saved.tensor.asnumpy()) for _, saved in tapes[0]._saved]


def test_an_output_that_no_replay_needs_is_dropped_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, save_output=False, last=True) == [True]


@pytest.mark.parametrize(("save_output", "last"), [(True, True), (True, False), (False, False)])
def test_an_output_that_is_needed_or_asked_for_is_kept(
    save_output: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(monkeypatch, save_output, last) == [False]


def test_an_integer_output_is_kept_as_it_is() -> None:
    class Picks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.argmax(x, -1)

    class Uses(nn.Cell):
        def __init__(self, picks: nn.Cell) -> None:
            super().__init__()
            self.picks = picks

        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x) * self.picks(x).sum().astype(ms.float32)

    got = gradients(on(Uses(checkpoint_exclude_wrapper(Picks(), save_output=False)), RECOMPUTE), X)
    assert_same(got, gradients(Uses(Picks()), X))


def test_an_excluded_cell_stays_excluded_when_a_pattern_names_it_too() -> None:
    cell = checkpoint_wrapper(checkpoint_exclude_wrapper(Counts()))
    gradients(on(Stack([Layer(), cell]), RECOMPUTE), X)
    assert cell.runs == ["forward"]
    with pytest.raises(PolicyError, match="contradicts"):
        on(cell, RECOMPUTE)


def test_it_contradicts_another_policy_on_the_same_cell() -> None:
    with pytest.raises(PolicyError, match="contradicts"):
        checkpoint_exclude_wrapper(on(Layer(), RECOMPUTE))


@pytest.mark.parametrize("module", [3, None, "mlp", nn.Cell])
def test_what_can_not_be_called_is_refused(module: Any) -> None:
    with pytest.raises(TypeError, match="checkpoint_exclude_wrapper takes a Cell, function, bound method or Primitive"):
        checkpoint_exclude_wrapper(module)


def test_save_output_is_a_bool() -> None:
    with pytest.raises(TypeError, match="save_output must be a bool, but got 'no'"):
        checkpoint_exclude_wrapper(Layer(), save_output="no")  # type: ignore[arg-type]
