"""`Watch` and `live`: what a replay will read, and who wrote into it since the forward."""

import gc
import inspect
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import ReplayMismatchError, checkpoint, is_recomputing
from hyper_parallel.core.activation_memory import changes, scopes
from hyper_parallel.core.activation_memory.changes import Watch, live
from hyper_parallel.core.activation_memory.scopes import Kept
from hyper_parallel.core.activation_memory.written import Written
from ms_ops.autograd import wait_for_operators
from ms_ops.tensors import view_of
from tests.helpers import RECOMPUTE, SAVE, Layer, Stack, numbers, on

X = numbers(2, 4)


def result(seed: int = 0) -> Tensor:
    return ops.tanh(numbers(2, 4, seed=seed))


def written(tensor: Tensor) -> Written:
    return Written(tensor, "Tensor.copy_", False)


# ---- a watch alone


def test_a_watched_tensor_is_found_with_what_it_is() -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    assert watch.finds(written(tensor.view(-1))) == "argument 0"
    assert watch.finds(written(result())) is None


def test_a_parameter_is_found_if_an_operator_has_read_it() -> None:
    watch, weight = Watch("block"), Parameter(numbers(2), name="w")
    watch.add("a weight", weight)
    assert watch.finds(written(weight)) is None
    watch.add_parameter(weight)
    assert watch.finds(written(weight)) == "a weight"


def test_a_watch_keeps_no_tensor_alive() -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    del tensor
    gc.collect()
    assert [ref() for _, ref in watch._tensors] == [None]
    assert watch.finds(written(result())) is None


def test_what_could_not_be_kept_hears_of_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an operator before it has failed")

    monkeypatch.setattr(scopes, "requires_grad", fails)
    before = dict(scopes.watched)
    with pytest.raises(RuntimeError) as caught:
        Kept(result())
    assert scopes.watched == before, "as long as the error lives, so does what couldn't be made"
    assert caught.value.__traceback__ is not None


def test_nothing_written_passes() -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    watch.verify()


def test_the_first_write_is_the_one_that_is_named() -> None:
    watch = Watch("block")
    watch.write("argument 0", Written(result(), "Tensor.copy_", False))
    watch.write("argument 1", Written(result(), "x[...] = v", True))
    with pytest.raises(ReplayMismatchError, match=r"^block: argument 0 .*by Tensor\.copy_"):
        watch.verify()


def exposed(watch: Watch, tensor: Tensor) -> np.ndarray:
    """An array over the tensor, which the watch hears of."""
    array = view_of(tensor)
    watch.expose(tensor)
    return array


@pytest.mark.parametrize("view", [lambda x: x, ops.stop_gradient], ids=["itself", "alias"])
def test_a_write_through_an_array_is_noticed(view: Callable[[Tensor], Tensor]) -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    array = exposed(watch, view(tensor))
    watch.verify()
    array[0] = 7.0
    with pytest.raises(ReplayMismatchError) as caught:
        watch.verify()
    for part in ("block: argument 0 (shape (2, 4), dtype Float32)", "through a numpy array", "write into a copy"):
        assert part in str(caught.value)


def test_an_array_that_is_given_out_again_is_compared_with_the_first_time() -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    exposed(watch, tensor)[0] = 7.0
    exposed(watch, tensor)
    with pytest.raises(ReplayMismatchError, match="through a numpy array"):
        watch.verify()


def test_an_array_over_a_weight_that_is_read_is_looked_at() -> None:
    watch, weight = Watch("block"), Parameter(result(), name="w")
    watch.add_parameter(weight)
    exposed(watch, weight)[0] = 7.0
    with pytest.raises(ReplayMismatchError, match=r"block: a weight \(parameter w, .* through a numpy array"):
        watch.verify()


def test_an_array_over_a_weight_that_is_not_read_is_not_looked_at() -> None:
    watch, weight = Watch("block"), Parameter(result(), name="w")
    exposed(watch, weight)[0] = 7.0
    watch.verify()


def test_an_array_over_a_weight_that_the_region_itself_changes_is_not_looked_at() -> None:
    watch, weight = Watch("block"), Parameter(result(), name="w")
    watch.add_parameter(weight)
    watch.updates(weight.param_info)
    exposed(watch, weight)[0] = 7.0
    watch.verify()


def test_an_array_over_other_bytes_is_not_looked_at() -> None:
    watch, tensor, other = Watch("block"), result(), result()
    watch.add("argument 0", tensor)
    exposed(watch, other)
    assert watch._checks == {}


def test_a_tensor_without_elements_is_not_looked_at() -> None:
    watch, tensor = Watch("block"), Tensor(np.ones((0, 4), np.float32))
    watch.add("argument 0", tensor)
    exposed(watch, tensor)
    assert watch._checks == {}


def test_a_tensor_whose_array_was_given_out_before_is_looked_at() -> None:
    watch, tensor = Watch("block"), result()
    array = tensor.asnumpy()
    watch.add("argument 0", tensor)
    array[0] = 7.0
    with pytest.raises(ReplayMismatchError, match="through a numpy array"):
        watch.verify()


def test_a_tensor_that_is_gone_is_not_looked_at() -> None:
    watch, tensor = Watch("block"), result()
    watch.add("argument 0", tensor)
    array = exposed(watch, tensor)
    array[0] = 7.0
    del tensor
    gc.collect()
    watch.verify()


# ---- the messages


def message(write: Callable[..., Any], region: Callable[[Tensor], Tensor] | None = None) -> str:
    """What is raised if `write(argument)` runs between the forward of a region and its replay."""

    def block(h: Tensor) -> Tensor:
        return ops.tanh(h) * h

    def forward(x: Tensor) -> Tensor:
        h = x * 1.0
        y = region(h) if region is not None else checkpoint(block, h)
        write(h)
        return y

    with pytest.raises(ReplayMismatchError) as caught:
        ms.grad(forward)(X)
    return str(caught.value)


def test_a_message_names_region_what_shape_dtype_writer_line_and_remedy() -> None:
    def write(h: Tensor) -> None:
        h.copy_(ops.ones_like(h))

    line = inspect.getsourcelines(write)[1] + 1
    text = message(write)
    assert "block: argument 0 (shape (2, 4), dtype Float32) was written by Tensor.copy_ (at " in text
    assert f"{__file__}:{line}, write)" in text
    for part in (
        "between the region's forward and its replay",
        "write before the forward or after the backward",
        "write into a copy",
        "MUST_SAVE",
    ):
        assert part in text


def test_item_assignment_is_named() -> None:
    assert "argument 0 (shape (2, 4), dtype Float32) was written by x[...] = v (at " in message(
        lambda h: h.__setitem__(0, 1.0)
    )


def test_a_keyword_argument_is_named() -> None:
    text = message(lambda h: h.copy_(ops.ones_like(h)), lambda h: checkpoint(lambda *, scale: ops.tanh(scale), scale=h))
    assert "argument 'scale' (shape" in text


def test_an_attribute_is_named_with_its_cell() -> None:
    class Holds(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table = result()

        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x * self.table)

    net = Stack([Holds()])
    text = message(lambda h: net.layers[0].table.copy_(X), on(net, RECOMPUTE))
    assert "Stack: layers.0.table (shape (2, 4), dtype Float32) was written by Tensor.copy_" in text


def test_a_closed_over_tensor_is_named() -> None:
    table = result()
    text = message(lambda h: table.copy_(X), lambda h: checkpoint(lambda x: ops.tanh(x * table), h))
    assert ": table (shape (2, 4), dtype Float32) was written by Tensor.copy_" in text


WEIGHT_WRITERS: dict[str, tuple[str, Callable[[Parameter], Any]]] = {
    "set_data": ("Parameter.set_data", lambda p: p.set_data(ops.ones_like(p))),
    "ops.assign": ("operator Assign", lambda p: ops.assign(p, ops.ones_like(p))),
    "item assignment": ("x[...] = v", lambda p: p.__setitem__(0, 1.0)),
    "SGD": ("a step of SGD", lambda p: nn.SGD([p])((ops.ones_like(p),))),
}


@pytest.mark.parametrize("way", WEIGHT_WRITERS)
def test_a_weight_is_named_with_its_name_and_who_wrote_it(way: str) -> None:
    how, write = WEIGHT_WRITERS[way]
    layer = on(Layer(), RECOMPUTE)
    text = message(lambda h: write(layer.dense.weight), layer)
    assert f"Layer: a weight (parameter dense.weight, shape (4, 4), dtype Float32) was written by {how} (at" in text


def test_a_kept_result_is_named() -> None:
    kept = on(Layer(), SAVE)
    outputs: list[Tensor] = []

    def block(h: Tensor) -> Tensor:
        outputs.append(kept(h))
        return ops.tanh(outputs[0])

    text = message(lambda h: outputs[0].copy_(X), lambda h: checkpoint(block, h))
    assert "block: the kept result of cell Layer (shape (2, 4), dtype Float32) was written" in text


def test_a_kept_saved_tensor_is_named_with_writer_and_line() -> None:
    tensor = result()
    kept = Kept(tensor)
    tensor.copy_(X)
    with pytest.raises(ReplayMismatchError) as caught:
        kept.get()
    text = str(caught.value)
    assert "a tensor that backward needs (shape (2, 4), dtype Float32) was written by Tensor.copy_ (at " in text
    assert "test_changes.py:" in text
    assert "write into a copy" in text


def test_a_kept_parameter_may_be_written() -> None:
    weight = Parameter(numbers(2), name="w")
    kept = Kept(weight)
    weight.set_data(numbers(2, seed=1))
    assert kept.get() is weight


# ---- the invocations that wait


def gradient(function: Callable[[Tensor], Tensor]) -> np.ndarray:
    return ms.grad(function)(X).asnumpy()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits that belongs to another test."""
    monkeypatch.setattr(live, "_invocations", {})
    monkeypatch.setattr(changes, "watched", {})


def test_nobody_listens_while_nothing_waits(alone: None) -> None:
    assert not live.active


@pytest.mark.parametrize("kept", [True, False])
def test_somebody_listens_while_an_invocation_or_a_kept_tensor_waits(
    alone: None, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    class Waits:
        """Stands for either."""

    waits = Waits()
    if kept:
        monkeypatch.setattr(changes, "watched", {1: waits})
    else:
        live.add(waits)
    assert live.active


def test_an_invocation_waits_from_its_forward_to_its_replay(alone: None) -> None:
    waiting: list[int] = []

    def forward(x: Tensor) -> Tensor:
        y = checkpoint(ops.tanh, checkpoint(ops.tanh, x * 1.0))
        waiting.append(len(live.invocations()))
        return y

    gradient(forward)
    assert waiting == [2]
    assert live.invocations() == []


def test_an_invocation_that_is_dropped_waits_no_more(alone: None) -> None:
    def forward(x: Tensor) -> Tensor:
        checkpoint(ops.tanh, x * 1.0)
        return x * 2.0

    gradient(forward)
    wait_for_operators()
    gc.collect()
    assert live.invocations() == []


def test_a_write_into_one_calls_input_does_not_concern_another_call() -> None:
    def forward(x: Tensor) -> Tensor:
        one, other = x * 1.0, x * 2.0
        y = checkpoint(ops.tanh, one)
        checkpoint(ops.tanh, other)
        other.copy_(X)
        return y

    assert np.array_equal(gradient(forward), gradient(lambda x: ops.tanh(x * 1.0)))


def test_a_write_before_the_forward_concerns_nobody() -> None:
    table = result()

    def forward(x: Tensor) -> Tensor:
        table.copy_(X)
        return checkpoint(lambda x: ops.tanh(x * table), x)

    assert np.array_equal(gradient(forward), gradient(lambda x: ops.tanh(x * X)))


def test_a_write_by_the_region_itself_is_repeated() -> None:
    def block(x: Tensor) -> Tensor:
        y = ops.tanh(x)
        y[0] = 7.0
        return ops.exp(y) * x

    assert np.array_equal(gradient(lambda x: checkpoint(block, x)), gradient(block))


def test_a_parameter_that_the_region_writes_may_be_written_after_it() -> None:
    class Counts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.count = Parameter(Tensor(2.0, ms.float32), name="count", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(x * self.count)
            ops.assign_add(self.count, Tensor(1.0, ms.float32))
            return y * self.count

    def written_after(cell: nn.Cell) -> np.ndarray:
        def forward(x: Tensor) -> Tensor:
            y = cell(x)
            ops.assign(cell.count, Tensor(9.0, ms.float32))
            return y

        found = gradient(forward)
        assert cell.count.asnumpy() == 9.0
        return found

    assert np.array_equal(written_after(on(Counts(), RECOMPUTE)), written_after(Counts()))


def test_a_write_that_only_the_replay_does_raises() -> None:
    class Writes(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.count = Parameter(Tensor(2.0, ms.float32), name="count", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            if is_recomputing():
                self.count.set_data(Tensor(3.0, ms.float32))
            return ops.tanh(x)

    cell = on(Writes(), RECOMPUTE)
    with pytest.raises(ReplayMismatchError, match=r"the replay writes \(parameter count.*which the forward did not"):
        gradient(cell)
    assert cell.count.asnumpy() == 2.0
