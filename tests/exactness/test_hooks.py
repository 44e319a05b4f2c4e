"""Hooks of cells inside a region run again in its replay; the region's own stay outside of it and run once."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import checkpoint, is_recomputing, not_replayed
from tests.exactness.programs.entries import ENTRIES, MODES, WAYS, put_by
from tests.exactness.programs.program import X
from tests.helpers import PREFER_RECOMPUTE, RECOMPUTE, SAVE, SWAP, Layer, Stack, assert_same, gradients, on

REPLAYS = {"recompute": 1, "prefer recompute": 1, "swapped inputs": 1, "swap": 0}
"""How often a cell inside runs again."""


class Shell(nn.Cell):
    """A cell around another, with work of its own before and after."""

    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.before, self.inner, self.after = Layer(seed=1), inner, Layer(seed=6)

    def construct(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)) * x)


def hooked(counts: Counter) -> tuple[nn.Cell, nn.Cell]:
    """A cell with hooks of every kind, on itself and on a cell inside; and the cell inside."""

    def count(name: str, result: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def hook(cell: nn.Cell, *values: Any) -> Any:
            counts[name] += 1
            return result(*values) if result else None

        return hook

    region = Shell(Layer(seed=3))
    region.register_forward_pre_hook(count("own before", lambda args: (args[0] * 1.5,)))
    region.register_forward_hook(count("own after", lambda args, output: output * 0.5))
    region.register_backward_hook(count("own backward"))
    region.inner.register_forward_pre_hook(count("inner before", lambda args: (args[0] + 1,)))
    region.inner.register_forward_hook(count("inner after", lambda args, output: output * 3))
    region.inner.register_backward_hook(count("inner backward"))
    return region, region.inner


@pytest.mark.parametrize("mode", REPLAYS)
@pytest.mark.parametrize("entry", ["decorated instance", "decorated class", "policy file"])
def test_inner_hooks_run_again_and_the_regions_own_once(entry: str, mode: str) -> None:
    counts, plain_counts = Counter(), Counter()
    region = put_by(entry, mode)(hooked(counts)[0])

    assert_same(
        gradients(Stack([Layer(seed=9), region]), X), gradients(Stack([Layer(seed=9), hooked(plain_counts)[0]]), X)
    )
    again = 1 + REPLAYS[mode]
    assert set(plain_counts.values()) == {1}
    assert counts == {**plain_counts, "inner before": again, "inner after": again}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_checkpoint_of_a_cell_holds_the_cells_hooks_inside(mode: str) -> None:
    """The function is the cell's call: its hooks are part of what is called."""
    counts = Counter()
    found = gradients(put_by("function", mode)(hooked(counts)[0]), X)
    assert_same(found, gradients(hooked(Counter())[0], X))
    assert counts["own before"] == counts["own after"] == counts["inner before"] == 1 + REPLAYS[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("register", ["register_backward_hook", "register_backward_pre_hook"])
def test_a_backward_hook_on_the_first_cell_inside(register: str, mode: str) -> None:
    """It is put on the region's input itself."""

    def run(put: Callable[[nn.Cell], nn.Cell]) -> tuple[int, Any]:
        calls: list[int] = []
        layer = Layer(seed=3)
        getattr(layer, register)(lambda *_: calls.append(1))
        found = gradients(put(Stack([layer])), X)
        return len(calls), found

    (calls, found), (plain_calls, plain) = run(put_by("decorated instance", mode)), run(lambda cell: cell)
    assert_same(found, plain)
    assert calls == plain_calls == 1


@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_change_the_shape_of_inputs_and_results(mode: str) -> None:
    """As tensor parallelism does: gather the sequence before a cell, scatter it after."""
    gathered: list[tuple] = []

    def gather(cell: nn.Cell, args: tuple) -> tuple:
        whole = ops.concat((args[0], args[0] * 0.5), 0)
        gathered.append(whole.shape)
        return (whole,)

    def scatter(cell: nn.Cell, args: tuple, output: Tensor) -> Tensor:
        return output[:3] + output[3:]

    def build(put: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
        inner = Layer(seed=3)
        inner.register_forward_pre_hook(gather)
        inner.register_forward_hook(scatter)
        return put(Shell(inner))

    assert_same(gradients(build(put_by("decorated instance", mode)), X), gradients(build(lambda cell: cell), X))
    assert set(gathered) == {(6, 4)}


@pytest.mark.parametrize("mode", ["recompute", "swapped inputs", "recompute in recompute"])
def test_hooks_that_gather_a_weight_before_a_cell_and_release_it_after(mode: str) -> None:
    """As sharded data parallelism does: outside of the cell, the weight is nothing. A replay gathers it again.

    Not compared with a plain net that has the hooks: without hooks in backward, too, its gradient reads the nothing
    (and with them MindSpore 2.10 may crash on CPU).
    """
    layer = Layer(seed=3)
    weight, whole = layer.dense.weight, layer.dense.weight.asnumpy().copy()

    def gather(cell: nn.Cell, args: tuple) -> None:
        weight.set_data(Tensor(whole))

    def release(cell: nn.Cell, args: tuple, output: Tensor) -> None:
        weight.set_data(ops.zeros((4, 4), ms.float32))

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    release(layer, (), X)

    found = gradients(put_by("decorated instance", mode)(Shell(layer)), X)
    assert_same(found, gradients(Shell(Layer(seed=3)), X))
    assert not weight.asnumpy().any()


def test_a_hook_that_is_not_replayed_runs_once_and_the_replay_reads_what_it_gave() -> None:
    calls = Counter()

    def before(cell: nn.Cell, args: tuple) -> tuple:
        calls["before"] += 1
        return (args[0] * calls["before"],)

    def after(cell: nn.Cell, args: tuple, output: Tensor) -> Tensor:
        calls["after"] += 1
        return output + calls["after"]

    def build(policy: Any, wrap: Callable[[Any], Any]) -> nn.Cell:
        calls.clear()
        inner = Layer(seed=3)
        inner.register_forward_pre_hook(wrap(before))
        inner.register_forward_hook(wrap(after))
        return on(Shell(inner), policy)

    plain = gradients(build(None, lambda hook: hook), X)
    for policy in (RECOMPUTE, PREFER_RECOMPUTE, SWAP, SAVE):
        assert_same(gradients(build(policy, not_replayed), X), plain)
        assert calls == {"before": 1, "after": 1}


def test_a_hook_that_is_not_replayed_may_give_nothing() -> None:
    seen: list[bool] = []
    inner = Layer(seed=3)
    inner.register_forward_hook(not_replayed(lambda cell, args, output: seen.append(is_recomputing())))
    assert_same(gradients(on(Shell(inner), RECOMPUTE), X), gradients(Shell(Layer(seed=3)), X))
    assert seen == [False]


def test_a_hook_that_is_not_replayed_is_a_plain_one_without_a_region() -> None:
    seen: list[int] = []
    inner = Layer(seed=3)
    handle = inner.register_forward_hook(not_replayed(lambda cell, args, output: seen.append(1)))
    gradients(Shell(inner), X)
    Shell(inner)(X)
    handle.remove()
    Shell(inner)(X)
    assert seen == [1, 1]


@pytest.mark.parametrize("bad", [None, 3])
def test_not_replayed_takes_a_function(bad: Any) -> None:
    with pytest.raises(TypeError, match="not_replayed takes a function"):
        not_replayed(bad)


@pytest.mark.parametrize(("entry", "mode"), WAYS)
def test_a_hook_on_a_parameter_fires_as_often_as_in_plain(entry: str, mode: str) -> None:
    def run(put: Callable[[nn.Cell], nn.Cell]) -> tuple[int, Any]:
        calls: list[np.ndarray] = []
        layer = Layer(seed=1)
        layer.dense.weight.register_hook(lambda gradient: calls.append(gradient.asnumpy().copy()) or gradient * 2)
        net = put(layer)
        found = gradients(Stack([net, Layer(seed=2), net]), X)
        return len(calls), found

    (calls, found), (plain_calls, plain) = run(put_by(entry, mode)), run(lambda cell: cell)
    assert_same(found, plain)
    assert calls == plain_calls > 0


def test_a_hook_on_a_tensor_inside_fires_once_with_the_gradient() -> None:
    def run(policy: Any) -> tuple[list[np.ndarray], Any]:
        seen: list[np.ndarray] = []

        class Hooks(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.layer = Layer()

            def construct(self, x: Tensor) -> Tensor:
                y = self.layer(x)
                y.register_hook(lambda gradient: seen.append(gradient.asnumpy().copy()))
                return ops.exp(y) * x

        found = gradients(on(Hooks(), policy), X)
        return seen, found

    (seen, found), (plain_seen, plain) = run(RECOMPUTE), run(None)
    assert_same(found, plain)
    assert len(seen) == len(plain_seen) == 1
    assert np.array_equal(seen[0], plain_seen[0])


class Asks(nn.Cell):
    """Notes whether it is replayed."""

    def __init__(self, label: str, seen: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.label, self.seen, self.layer = label, seen, Layer()

    def construct(self, x: Tensor) -> Tensor:
        self.seen.append((self.label, is_recomputing()))
        return self.layer(x)


def test_is_recomputing_is_true_in_replays_only() -> None:
    seen: list[tuple[str, bool]] = []
    net = Stack(
        [
            on(Asks("recompute", seen), RECOMPUTE),
            on(Asks("swap", seen), SWAP),
            Asks("plain", seen),
            on(Stack([on(Asks("saved", seen), SAVE), Asks("inside", seen)]), RECOMPUTE),
        ]
    )
    gradients(net, X)
    forward = [("recompute", False), ("swap", False), ("plain", False), ("saved", False), ("inside", False)]
    assert seen == [*forward, ("inside", True), ("recompute", True)]
    assert not is_recomputing()


@pytest.mark.parametrize("entry", ENTRIES)
def test_is_recomputing_is_true_whoever_put_the_policy(entry: str) -> None:
    seen: list[tuple[str, bool]] = []
    gradients(put_by(entry, "recompute")(Asks("cell", seen)), X)
    assert seen == [("cell", False), ("cell", True)]


def test_is_recomputing_in_hooks() -> None:
    seen: list[tuple[str, bool]] = []

    def asks(label: str) -> Callable[..., None]:
        return lambda *_: seen.append((label, is_recomputing()))

    region = Shell(Layer(seed=3))
    region.register_forward_pre_hook(asks("own"))
    region.inner.register_forward_pre_hook(asks("inner"))
    region.inner.register_backward_hook(asks("inner backward"))
    gradients(on(region, RECOMPUTE), X)
    assert seen == [("own", False), ("inner", False), ("inner", True), ("inner backward", False)]


def test_is_recomputing_belongs_to_the_thread_that_replays() -> None:
    seen: list[bool] = []

    def body(x: Tensor) -> Tensor:
        if is_recomputing():
            thread = threading.Thread(target=lambda: seen.append(is_recomputing()))
            thread.start()
            thread.join()
        return ops.tanh(x)

    ms.grad(lambda x: checkpoint(body, x))(X)
    assert seen == [False]
