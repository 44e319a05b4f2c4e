"""Who writes into a tensor is heard, and what MindSpore's writers really do with the storage."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_ops import writes
from tests.helpers import numbers
from tests.ms_ops.recorder import Recorder


def parameter(trains: bool = True) -> Parameter:
    return Parameter(numbers(2, 4), name="p", requires_grad=trains)


def result() -> Tensor:
    return ops.tanh(numbers(2, 4))


# ---- writers


@pytest.mark.parametrize("make", [result, parameter])
@pytest.mark.parametrize("name", [name for name in writes._WRITING_METHODS if hasattr(Tensor, name)])
def test_a_writing_method_is_heard_before_it_writes(recorder: Recorder, name: str, make: Callable) -> None:
    tensor = make()
    recorder.written.clear()
    with pytest.raises((TypeError, ValueError, RuntimeError)):  # which leaves the tensor as it was
        getattr(tensor, name)(object(), object(), object(), object(), object())
    assert recorder.heard_of(tensor) == [f"Tensor.{name}"]


def test_every_method_named_like_a_writer_is_listed() -> None:
    """MindSpore's own names for what writes in place end with an underscore; these write no values."""
    harmless = {"delete_", "index_of_parent_", "parent_tensor_", "requires_grad_", "to_"}
    named = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")}
    assert named - harmless - set(writes._WRITING_METHODS) == set()


WRITERS: dict[str, Callable[[Any], Any]] = {
    "x[0] = v": lambda x: x.__setitem__(0, 7.0),
    "x[...] = v": lambda x: x.__setitem__(..., 7.0),
    "x[:1] = tensor": lambda x: x.__setitem__(slice(0, 1), ops.ones((1, 4), ms.float32)),
    "x[mask] = v": lambda x: x.__setitem__(x > 0, 7.0),
    "x[indices] = v": lambda x: x.__setitem__(Tensor([0]), 7.0),
    "copy_": lambda x: x.copy_(ops.ones_like(x)),
    "assign_value": lambda x: x.assign_value(ops.ones_like(x)),
    "set_": lambda x: x.set_(ops.ones_like(x)),
}
PARAMETER_WRITERS: dict[str, Callable[[Parameter], Any]] = {
    "set_data": lambda p: p.set_data(ops.ones_like(p)),
    "load_param_into_net": lambda p: ms.load_param_into_net(holding(p), {"p": Parameter(numbers(2, 4, seed=1))}),
    "ops.assign": lambda p: ops.assign(p, ops.ones_like(p)),
    "ops.assign_add": lambda p: ops.assign_add(p, ops.ones_like(p)),
    "ops.assign_sub": lambda p: ops.assign_sub(p, ops.ones_like(p)),
    "ops.scatter_add": lambda p: ops.scatter_add(p, Tensor([0]), ops.ones((1, 4), ms.float32)),
    "ops.scatter_nd_update": lambda p: ops.scatter_nd_update(p, Tensor([[0, 1]]), Tensor([9.0])),
    "ApplyGradientDescent": lambda p: ops.ApplyGradientDescent()(p, Tensor(0.1), ops.ones_like(p)),
    "ApplyMomentum": lambda p: ops.ApplyMomentum()(p, slot(), Tensor(0.1), ops.ones_like(p), Tensor(0.9)),
    "Adam": lambda p: ops.Adam()(p, slot(), slot(), 0.9, 0.9, 0.1, 0.9, 0.99, 1e-8, ops.ones_like(p)),
    "AdamWeightDecay": lambda p: ops.AdamWeightDecay()(p, slot(), slot(), 0.1, 0.9, 0.99, 1e-8, 0.0, ops.ones_like(p)),
}


def slot() -> Parameter:
    return Parameter(ops.ones((2, 4), ms.float32), name="slot")


class Holding(nn.Cell):
    """A cell with one parameter."""

    def __init__(self, value: Parameter) -> None:
        super().__init__()
        self.p = value

    def construct(self) -> Tensor:
        return (self.p * self.p).sum()


def holding(value: Parameter) -> nn.Cell:
    return Holding(value)


ALL_WRITERS = [(result, write) for write in WRITERS.values()] + [
    (parameter, write) for write in [*WRITERS.values(), *PARAMETER_WRITERS.values()]
]
names = [f"result: {name}" for name in WRITERS] + [f"parameter: {name}" for name in [*WRITERS, *PARAMETER_WRITERS]]


@pytest.mark.parametrize(("make", "write"), ALL_WRITERS, ids=names)
def test_a_write_that_changes_values_is_heard(recorder: Recorder, make: Callable, write: Callable) -> None:
    tensor = make()
    before = tensor.asnumpy().copy()
    recorder.written.clear()
    write(tensor)
    assert recorder.heard_of(tensor)
    assert not np.array_equal(tensor.asnumpy(), before)


@pytest.mark.parametrize(("make", "write"), ALL_WRITERS, ids=names)
def test_a_write_is_heard_before_it_happens(monkeypatch: pytest.MonkeyPatch, make: Callable, write: Callable) -> None:
    tensor = make()
    before = tensor.asnumpy().copy()
    seen: list[bool] = []

    class Looks(Recorder):
        def writes(self, written: Tensor, how: str, rebinds: bool) -> None:
            if written is tensor and not seen:
                self.active = False  # looking is reading
                seen.append(np.array_equal(tensor.asnumpy(), before))
                self.active = True

    monkeypatch.setattr(writes, "_observer", Looks())
    write(tensor)
    assert seen == [True]


def test_item_assignment_names_itself(recorder: Recorder) -> None:
    tensor = result()
    tensor[0] = 1.0
    assert recorder.heard_of(tensor) == ["x[...] = v"]


def test_a_write_into_a_view_is_heard_with_the_view(recorder: Recorder) -> None:
    tensor = result()
    view = tensor.view(-1)
    view[0] = 7.0
    assert recorder.heard_of(view) == ["x[...] = v"]
    assert tensor.asnumpy()[0, 0] == 7.0


def test_an_old_primitive_that_writes_is_named(recorder: Recorder) -> None:
    written = parameter()
    ops.assign_add(written, numbers(2, 4))
    assert recorder.heard_of(written) == ["operator AssignAdd"]


def test_an_operator_that_only_reads_a_parameter_is_not_heard(recorder: Recorder) -> None:
    read = parameter()
    recorder.written.clear()
    ops.tanh(read), read + 1, ops.matmul(read, read.T), ops.MatMul(transpose_b=True)(read, read)
    assert recorder.written == []


OPTIMIZERS: dict[str, Callable[[Any], nn.Cell]] = {
    "Adam": lambda weights: nn.Adam(weights),
    "SGD": lambda weights: nn.SGD(weights),
    "Momentum": lambda weights: nn.Momentum(weights, 0.1, 0.9),
    "AdamWeightDecay": lambda weights: nn.AdamWeightDecay(weights),
    "RMSProp": lambda weights: nn.RMSProp(weights),
    "experimental SGD": lambda weights: ms.experimental.optim.SGD(weights, lr=0.1),
    "experimental AdamW": lambda weights: ms.experimental.optim.AdamW(weights, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_an_optimizer_writes_its_parameters(recorder: Recorder, kind: str) -> None:
    weights = [parameter(), Parameter(numbers(3), name="q")]
    optimizer = OPTIMIZERS[kind](weights)
    held = list(optimizer.parameters)
    before = [weight.asnumpy().copy() for weight in weights]
    recorder.written.clear()
    optimizer((numbers(2, 4), numbers(3)))
    step = f"a step of {type(optimizer).__name__}"
    assert all(step in recorder.heard_of(weight) for weight in held)
    assert all(not np.array_equal(weight.asnumpy(), old) for weight, old in zip(weights, before, strict=True))


def test_training_one_step_by_a_cell_is_heard(recorder: Recorder) -> None:
    weight = parameter()
    step = nn.TrainOneStepCell(holding(weight), nn.SGD([weight]))
    recorder.written.clear()
    step()
    assert "a step of SGD" in recorder.heard_of(weight)


# ---- what MindSpore's writers do with the storage


def alias_is_written(write: Callable[[Any], Any], tensor: Tensor) -> bool:
    """Whether a write reaches the bytes that the tensor had before."""
    alias = ops.stop_gradient(tensor)
    before = alias.asnumpy().copy()
    write(tensor)
    return not np.array_equal(alias.asnumpy(), before)


def inside_a_gradient(function: Callable[[Tensor], Any]) -> Any:
    """What `function` gives for a tracked tensor, inside a gradient."""
    found: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        found.append(function(x * 1.0))
        return x * 2.0

    ms.grad(forward)(numbers(2, 4))
    return found[0]


PARTS = {name: WRITERS[name] for name in ("x[0] = v", "x[:1] = tensor")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("make", [result, parameter, lambda: numbers(2, 4)], ids=["result", "parameter", "new"])
def test_outside_of_a_gradient_item_assignment_writes_in_place(make: Callable[[], Tensor], part: str) -> None:
    assert alias_is_written(PARTS[part], make())


@pytest.mark.parametrize("way", [name for name in WRITERS if name.startswith("x[")])
def test_inside_a_gradient_item_assignment_gives_a_tracked_tensor_a_new_storage(recorder: Recorder, way: str) -> None:
    """When this fails, `_item_assignment_rebinds` says too much."""
    assert not inside_a_gradient(lambda x: alias_is_written(WRITERS[way], x))
    _, how, rebinds = recorder.written[0]
    assert (how, rebinds) == ("x[...] = v", True)


def test_inside_a_gradient_the_python_object_has_what_item_assignment_wrote() -> None:
    def write(x: Tensor) -> float:
        x[0] = 7.0
        return float(x[0, 0])

    assert inside_a_gradient(write) == 7.0


@pytest.mark.parametrize("trains", [True, False])
def test_inside_a_gradient_one_row_of_a_parameter_is_written_in_place(trains: bool) -> None:
    written = parameter(trains)
    assert inside_a_gradient(lambda x: alias_is_written(WRITERS["x[0] = v"], written))


def test_item_assignment_is_heard_as_in_place_outside_of_a_gradient(recorder: Recorder) -> None:
    tensor = result()
    tensor[0] = 1.0
    assert [rebinds for _, _, rebinds in recorder.written] == [False]


def test_copy_writes_in_place_inside_a_gradient_and_outside() -> None:
    assert alias_is_written(WRITERS["copy_"], result())
    assert inside_a_gradient(lambda x: alias_is_written(WRITERS["copy_"], x))


@pytest.mark.parametrize("way", ["ops.assign", "ops.assign_add", "ops.scatter_add"])
def test_assigning_operators_write_a_parameter_in_place(way: str) -> None:
    assert alias_is_written(PARAMETER_WRITERS[way], parameter())
    assert inside_a_gradient(lambda x: alias_is_written(PARAMETER_WRITERS[way], parameter(False)))


def test_set_data_gives_the_parameter_a_new_storage(recorder: Recorder) -> None:
    written = parameter()
    assert not alias_is_written(PARAMETER_WRITERS["set_data"], written)
    assert ("Parameter.set_data", True) in [(how, rebinds) for _, how, rebinds in recorder.written]


@pytest.mark.parametrize("name", ["add_", "mul_", "sub_", "exp_"])
def test_arithmetic_methods_do_not_write_on_this_backend(name: str) -> None:
    """MindSpore's CPU kernels give a new tensor and leave `self` as it was; they are listed for those that write."""
    tensor = result()
    getattr(tensor, name)(*([] if name == "exp_" else [numbers(2, 4)]))
    assert np.array_equal(tensor.asnumpy(), result().asnumpy())


def test_the_version_counter_does_not_tell_of_item_assignment() -> None:
    """Why writers are wrapped; when this fails, the counter may do."""
    tensor = result()
    before = tensor._version
    tensor[0] = 7.0
    tensor.asnumpy()
    assert tensor._version == before


# ---- when nobody listens


def test_no_write_is_called_while_the_observer_is_inactive(silent: Recorder) -> None:
    for make, write in ALL_WRITERS:
        write(make())
    weight = parameter()
    nn.SGD([weight])((numbers(2, 4),))
    assert silent.written == []


def test_observing_again_wraps_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped() -> list[Any]:
        return [Tensor.__setitem__, Tensor.copy_, Parameter.set_data, Tensor.item, Tensor.asnumpy, ms.from_numpy]

    before, present, mine = wrapped(), writes._observer, Recorder()
    writes.observe(mine)
    try:
        assert wrapped() == before
        tensor = result()
        tensor[0] = 1.0
        assert mine.heard_of(tensor) == ["x[...] = v"]
    finally:
        writes.observe(present)


# ---- compiled functions


@ms.jit
def fills_a_row(x: Tensor) -> Tensor:
    y = x * 1.0
    y[0] = 7.0
    return y


def test_item_assignment_in_a_compiled_function_still_works() -> None:
    want = numbers(2, 4).asnumpy().copy()
    want[0] = 7.0
    assert np.array_equal(fills_a_row(numbers(2, 4)).asnumpy(), want)


def test_item_assignment_in_a_compiled_function_is_not_heard(recorder: Recorder) -> None:
    x = numbers(2, 4)
    fills_a_row(x)
    assert recorder.written == []


def test_a_compiled_function_that_assigns_to_a_parameter_still_works() -> None:
    class Counts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.count = Parameter(Tensor(0.0, ms.float32), name="count", requires_grad=False)

        @ms.jit
        def construct(self, x: Tensor) -> Tensor:
            ops.assign_add(self.count, Tensor(1.0, ms.float32))
            return x * self.count

    cell = Counts()
    cell(numbers(2))
    assert cell.count.asnumpy() == 1.0
