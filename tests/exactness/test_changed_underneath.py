"""What a replay reads was written since the forward: an error by the end of that backward, never a wrong number.

A program without a policy, written to in the same way, says what the write does: MindSpore itself may raise, and inside
a gradient `x[...] = v` gives the Python object a new storage, so that who holds the old one sees nothing of it.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import ReplayMismatchError
from tests.exactness.programs.entries import ENTRIES, put_by
from tests.exactness.programs.program import Put, X, Y
from tests.helpers import RECOMPUTE, SAVE, Layer, Record, assert_same, flat, numbers, on, settled

Write = Callable[[], Any]


def _fill(tensor: Tensor) -> Write:
    return lambda: tensor.__setitem__(..., 7.0)


def _row(tensor: Tensor) -> Write:
    return lambda: tensor.__setitem__(0, 7.0)


def _view(tensor: Tensor) -> Write:
    return lambda: tensor.view(-1).__setitem__(..., 7.0)


def _copy(tensor: Tensor) -> Write:
    return lambda: tensor.copy_(ops.full_like(tensor, 7.0))


def _array(tensor: Tensor) -> Write:
    array = tensor.asnumpy()
    return lambda: np.copyto(array, 7.0)


def _assign(parameter: Parameter) -> Write:
    return lambda: ops.assign(parameter, ops.full_like(parameter, 7.0))


def _add(parameter: Parameter) -> Write:
    return lambda: ops.assign_add(parameter, ops.full_like(parameter, 7.0))


def _data(parameter: Parameter) -> Write:
    return lambda: parameter.set_data(ops.full_like(parameter, 7.0))


def _optimizer(parameter: Parameter) -> Write:
    optimizer = nn.SGD([parameter], learning_rate=0.1)
    return lambda: optimizer((ops.ones_like(parameter),))


class Writer(NamedTuple):
    """Something that writes."""

    prepare: Callable[[Any], Write]
    before: bool = False
    """Prepared before the region runs."""
    parameters_only: bool = False


WRITERS: dict[str, Writer] = {
    "x[...] = v": Writer(_fill),
    "x[0] = v": Writer(_row),
    "a view": Writer(_view),
    "copy_": Writer(_copy),
    "an array taken before": Writer(_array, before=True),
    "an array taken after": Writer(_array),
    "ops.assign": Writer(_assign, parameters_only=True),
    "ops.assign_add": Writer(_add, parameters_only=True),
    "set_data": Writer(_data, parameters_only=True),
    "an optimizer's step": Writer(_optimizer, parameters_only=True),
}

OF_THE_FORWARD = ("an output of a kept cell", "an output of a random operator")
"""Exist only once the region has run; the region holds their storage, not the object that is written."""
PARAMETERS = ("a weight", "a frozen parameter")
TARGETS = (
    "an argument",
    "an item of an argument",
    "a closed-over tensor",
    "an attribute",
    *OF_THE_FORWARD,
    *PARAMETERS,
)


class Net(nn.Cell):
    """A region that reads every target, and a write after it."""

    def __init__(self, put: Put, target: str, writer: str) -> None:
        super().__init__()
        closed = numbers(3, 4, seed=7)

        class Region(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.weight = Parameter(numbers(3, 4, seed=3), name="weight")
                self.frozen = Parameter(numbers(3, 4, seed=4), name="frozen", requires_grad=False)
                self.kept = on(Layer(seed=5), SAVE)
                self.attribute = numbers(3, 4, seed=6)

            def construct(self, x: Tensor, more: dict[str, list[Tensor]]) -> tuple:
                kept = self.kept(x)
                drawn = ops.dropout(ops.tanh(x), 0.3)
                y = ops.tanh(x * self.weight) * ops.exp(more["inner"][0] * self.frozen)
                return ops.sin(y * closed) * self.attribute * kept * drawn, kept, drawn

        region = Region()
        self.region, self.writer, self.target = put(region), WRITERS[writer], target
        self.things: dict[str, Any] = {
            "a closed-over tensor": closed,
            "an attribute": region.attribute,
            "a weight": region.weight,
            "a frozen parameter": region.frozen,
        }
        self.write: Any = None
        self.writes_at_once = True

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        things = self.things
        things["an argument"], things["an item of an argument"] = x * 1, y * 1
        if self.writer.before:
            self.write = self.writer.prepare(things[self.target])
        z, *outputs = self.region(things["an argument"], {"inner": [things["an item of an argument"]]})
        things.update(zip(OF_THE_FORWARD, outputs, strict=True))
        result = z.sum() + outputs[0].sum() + outputs[1].sum()  # a sum saves nothing
        if not self.writer.before:
            self.write = self.writer.prepare(things[self.target])
        return self.written(result) if self.writes_at_once else result

    def written(self, result: Any) -> Any:
        settled(result)
        self.write()
        return result


def run(net: Net, when: str) -> Record:
    """Gradients of inputs and weights; the write happens while they are recorded, or after the forward has ended."""
    weights = ms.ParameterTuple(net.trainable_params())
    ms.set_seed(3)
    if when == "in the gradient":
        return flat(ms.grad(net, (0, 1), weights)(X, Y), "gradients")
    net.writes_at_once = False
    net.set_grad()
    net.written(net(X, Y))
    return flat(ops.GradOperation(get_all=True, get_by_list=True)(net, weights)(X, Y), "gradients")


def dry(net: Net, write: Callable[[], Any] = lambda: None) -> Net:
    """The net, with something else in place of its write."""
    net.written = lambda result: (write(), result)[1]
    return net


@functools.cache
def unwritten() -> Record:
    return run(dry(Net(lambda cell: cell, "a weight", "copy_")), "in the gradient")


@functools.cache
def is_seen(target: str, writer: str, when: str) -> bool:
    """Whether the write reaches what a replay would read, or MindSpore itself raises."""
    net, seen = Net(lambda cell: cell, target, writer), []

    def write() -> None:
        thing = net.things[target]
        held = ops.stop_gradient(thing) if target in OF_THE_FORWARD else thing
        before = held.asnumpy().copy()
        net.write()
        seen.append(not np.array_equal(before, held.asnumpy()))

    try:
        run(dry(net, write), when)
    except RuntimeError:
        return True
    return seen[0]


def result_of(net: Net, when: str) -> Record | None:
    """The gradients; None if the write is noticed."""
    try:
        return run(net, when)
    except ReplayMismatchError:
        return None
    except RuntimeError as error:
        if re.search("in-?place", str(error)):  # MindSpore's own
            return None
        raise


def is_same(found: Record, want: Record) -> bool:
    return all(found[name].tobytes() == value.tobytes() for name, value in want.items())


CASES = [
    (target, name)
    for target in TARGETS
    for name, writer in WRITERS.items()
    if target in PARAMETERS or not writer.parameters_only
    if not (writer.before and target in OF_THE_FORWARD)
    if not (target == "a frozen parameter" and name == "an optimizer's step")  # it takes trained ones only
]
each_case = pytest.mark.parametrize(("target", "writer"), CASES)


@pytest.mark.parametrize(
    ("entry", "mode", "when"),
    [
        *((entry, "recompute", "between forward and backward") for entry in ENTRIES),
        ("decorated instance", "recompute", "in the gradient"),
        ("decorated instance", "recompute in recompute", "between forward and backward"),
    ],
)
@each_case
def test_a_write_into_what_a_replay_reads_raises(target: str, writer: str, entry: str, mode: str, when: str) -> None:
    found = result_of(Net(put_by(entry, mode), target, writer), when)
    assert not (is_seen(target, writer, when) and found)
    if found is not None:
        assert_same(found, unwritten())


@each_case
def test_a_write_into_inputs_that_wait_on_host_raises_or_changes_nothing(target: str, writer: str) -> None:
    net = Net(put_by("decorated instance", "swapped inputs"), target, writer)
    found = result_of(net, "between forward and backward")
    if found is not None:
        assert_same(found, unwritten())


@pytest.mark.parametrize("mode", ["swap", "swap in recompute"])
@pytest.mark.parametrize(("target", "writer"), [case for case in CASES if "array" not in case[1]])
def test_a_write_where_nothing_is_replayed_is_noticed_or_no_worse_than_in_plain(
    target: str, writer: str, mode: str
) -> None:
    """What isn't moved (parameters, tensors from outside) MindSpore's own backward reads as it was written to.

    Nothing is promised about arrays here: nobody hears of such a write, and no replay begins that could look.
    """
    when = "between forward and backward"
    found = result_of(Net(put_by("decorated instance", mode), target, writer), when)
    if found is not None:
        plain = result_of(Net(lambda cell: cell, target, writer), when)
        assert any(want is not None and is_same(found, want) for want in (unwritten(), plain))


@each_case
def test_a_write_after_backward_raises_nothing(target: str, writer: str) -> None:
    net = dry(Net(put_by("decorated instance", "recompute"), target, writer))
    assert_same(run(net, "in the gradient"), unwritten())
    net.write()
    run(net, "in the gradient")


def beside(write: Callable[[dict[str, Any]], Any]) -> Record:
    """Gradients of a region after which something that its replay doesn't read is written."""
    net = Net(put_by("decorated instance", "recompute"), "a weight", "copy_")
    return run(dry(net, lambda: write(net.things)), "in the gradient")


def test_a_write_into_something_unrelated_raises_nothing() -> None:
    other, weight, layer = numbers(3, 4), Parameter(numbers(3, 4), name="other"), Layer()

    def write(things: dict[str, Any]) -> None:
        other[...] = 1.0
        np.copyto(other.asnumpy(), 2.0)
        weight.set_data(numbers(3, 4, seed=2))
        ops.assign(weight, numbers(3, 4, seed=3))
        nn.SGD(layer.trainable_params())(tuple(ops.ones_like(p) for p in layer.trainable_params()))
        (things["an argument"] * 1)[...] = 3.0

    assert_same(beside(write), unwritten())


def test_reading_what_the_replay_reads_raises_nothing() -> None:
    def read(things: dict[str, Any]) -> None:
        for thing in things.values():
            thing.asnumpy().sum(), thing.sum(), thing.view(-1)[:2], str(thing)

    assert_same(beside(read), unwritten())


def test_writing_back_what_was_there_through_an_array_raises_nothing() -> None:
    def write(things: dict[str, Any]) -> None:
        array = things["an argument"].asnumpy()
        array += 0

    assert_same(beside(write), unwritten())


def test_a_call_that_backward_never_reaches_may_be_written_to() -> None:
    layer = on(Layer(), RECOMPUTE)

    def function(x: Tensor) -> Tensor:
        h, other = x * 1, x * 2
        y = layer(h)
        layer(other)
        other.copy_(x)
        return (y**2).sum()

    want = ms.value_and_grad(lambda x: (Layer()(x * 1) ** 2).sum())(X)
    assert_same(flat(ms.value_and_grad(function)(X), "step"), flat(want, "step"))


def test_the_message_names_the_cell_what_was_written_how_and_where() -> None:
    class Block(Layer):
        pass

    block = on(Block(), RECOMPUTE)

    def function(x: Tensor) -> Tensor:
        y = block(x * 1)
        block.dense.bias.set_data(ops.ones(4, ms.float32))
        return y.sum()

    with pytest.raises(ReplayMismatchError) as caught:
        ms.grad(function)(X)
    message = str(caught.value)
    assert message.startswith("Block: ")
    for part in ("dense.bias", "set_data", __file__, "MUST_SAVE"):
        assert part in message


def test_the_step_after_one_that_was_written_to_is_right() -> None:
    net = Net(put_by("decorated instance", "recompute"), "an argument", "copy_")
    for _ in range(2):
        assert result_of(net, "in the gradient") is None
    assert_same(run(dry(net), "in the gradient"), unwritten())


def test_a_weight_that_moves_between_two_backwards_of_a_session_is_noticed() -> None:
    """An optimizer's step after the first micro-batch's backward, while the second one waits."""

    def session(net: nn.Cell, moves: bool) -> Record:
        net.set_grad()
        weights = ms.ParameterTuple(net.trainable_params())
        pull = ops.GradOperation(get_by_list=True)(net, weights)
        optimizer = nn.SGD(weights, learning_rate=0.1)
        net(X), net(Y)
        first = pull(X)
        if moves:
            optimizer(first)
        return flat((first, pull(Y)), "gradients")

    def net() -> nn.Cell:
        return on(Layer(), RECOMPUTE)

    assert_same(session(net(), moves=False), session(Layer(), moves=False))
    with pytest.raises(ReplayMismatchError, match="SGD"):
        session(net(), moves=True)


class Writes(nn.Cell):
    """Writes into a tensor that autograd has saved."""

    def construct(self, x: Tensor) -> Tensor:
        y = ops.exp(x)
        z = y * y
        y[0] = 0.0
        return z


@pytest.mark.parametrize("mode", ["recompute", "swap", "swapped inputs", "recompute in recompute"])
def test_a_write_into_a_saved_temporary_is_right_or_raises_or_is_plains(mode: str) -> None:
    """MindSpore's own gradient is silently wrong here (it reads the zero): a replay must not be, a swap may be."""
    right = ms.grad(lambda x: (ops.exp(x) * ops.exp(x)).sum())(X).asnumpy()
    cell = put_by("decorated instance", mode)(Writes())
    try:
        found = ms.grad(lambda x: cell(x).sum())(X).asnumpy()
    except (ReplayMismatchError, RuntimeError):
        return
    plain = ms.grad(lambda x: Writes()(x).sum())(X).asnumpy()
    assert np.array_equal(found, right) or (mode == "swap" and np.array_equal(found, plain))
