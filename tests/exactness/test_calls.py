"""State belongs to a call, never to a cell: whatever is called how often and used or not, the numbers are plain's."""

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import SwapManager, checkpoint, checkpoint_wrapper, swap, swap_wrapper
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_same,
    flat,
    gradients,
    numbers,
    on,
    settled,
)

Put = Callable[[nn.Cell], nn.Cell]
KINDS: dict[str, Put] = {
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
}
MORE_KINDS: dict[str, Put] = {
    "save": lambda cell: on(cell, SAVE),
    "prefer recompute": lambda cell: on(cell, PREFER_RECOMPUTE),
    "swap, then recompute": lambda cell: on(on(cell, SWAP), RECOMPUTE),
    "recompute, then swap": lambda cell: on(on(cell, RECOMPUTE), SWAP),
}
X, Y = numbers(3, 4, seed=1), numbers(3, 4, seed=2)


def by_all(function: Callable[..., Tensor], *cells: nn.Cell) -> Any:
    """Value and gradients of both inputs and of every trainable parameter."""
    weights = list({id(weight): weight for cell in cells for weight in cell.trainable_params()}.values())
    for index, weight in enumerate(weights):
        weight.name = f"weight {index}"  # MindSpore refuses two of one name
    return ms.value_and_grad(lambda x, y: settled(function(x, y)), (0, 1), weights or None)(X, Y)


def two_forwards_before_two_backwards(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return by_all(lambda x, y: (a(x) * b(y)).sum() + (b(x) * a(y)).mean(), a, b)


def a_cell_called_twice(put: Put) -> Any:
    a = put(Layer())
    return by_all(lambda x, y: (a(x) ** 2).sum() + (a(y) ** 3).sum(), a)


def a_cell_called_on_its_own_output(put: Put) -> Any:
    a = put(Layer())
    return by_all(lambda x, y: (a(a(a(x))) * y).sum(), a)


def a_call_whose_output_is_not_used(put: Put) -> Any:
    a = put(Layer())

    def function(x: Tensor, y: Tensor) -> Tensor:
        used, _ = a(x), a(x * 5 + y)
        return (used * y).sum()

    return by_all(function, a)


def an_output_without_gradient(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return by_all(lambda x, y: (a(x) * ops.stop_gradient(b(y))).sum(), a, b)


def an_input_without_gradient(put: Put) -> Any:
    a = put(Layer())
    return by_all(lambda x, y: (a(ops.stop_gradient(x)) * y).sum(), a)


def the_same_input_for_two_cells(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return by_all(lambda x, y: (a(x) + b(x) * y).sum(), a, b)


def views_as_inputs(put: Put) -> Any:
    a = put(Layer(width=3))
    return by_all(lambda x, y: (a(x.T[1:4]) * y[:, 1:].T).sum() + a(x.swapaxes(0, 1)).sum(), a)


def tied_weights(put: Put) -> Any:
    a, b = Layer(seed=1), Layer(seed=2)
    b.dense.weight = a.dense.weight
    a, b = put(a), put(b)
    return by_all(lambda x, y: (b(a(x)) * y).sum(), a, b)


def frozen_weights_before(put: Put) -> Any:
    a, b = Layer(seed=1), Layer(seed=2)
    a.dense.weight.requires_grad = False
    a, b = put(a), put(b)
    return by_all(lambda x, y: (b(a(x)) * y).sum(), a, b)


def a_frozen_cell_in_the_middle(put: Put) -> Any:
    a, b, c = Layer(seed=1), Layer(seed=2), Layer(seed=3)
    for parameter in b.get_parameters():
        parameter.requires_grad = False
    a, b, c = put(a), put(b), put(c)
    return by_all(lambda x, y: (c(b(a(x))) * y).sum(), a, b, c)


def a_first_cell_that_has_only_weights_to_train(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    weights = Stack([a, b]).trainable_params()
    return ms.value_and_grad(lambda x: settled((b(a(x)) ** 2).sum()), None, weights)(X)


def integer_inputs_only(put: Put) -> Any:
    table = nn.Embedding(5, 4)
    table.embedding_table.set_data(numbers(5, 4, seed=9))
    table = put(table)
    index = Tensor([[0, 3, 3], [1, 4, 0]], ms.int32)
    return by_all(lambda x, y: (table(index).sum(0) * x * y).sum(), table)


def no_inputs_at_all(put: Put) -> Any:
    class Norm(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(numbers(3, 4), name="w")

        def construct(self) -> Tensor:
            return ops.tanh(self.w) * self.w

    a = put(Norm())
    return by_all(lambda x, y: (a() * x * y).sum(), a)


def an_input_returned_as_output(put: Put) -> Any:
    class Through(nn.Cell):
        def construct(self, x: Tensor, y: Tensor) -> tuple:
            return x, ops.tanh(x) * y

    a = put(Through())
    return by_all(lambda x, y: (lambda same, z: (same * z * y).sum())(*a(x * 1, y)), a)


def only_the_input_comes_back(put: Put) -> Any:
    a = put(nn.Identity())
    return by_all(lambda x, y: (a(x * y) ** 2).sum(), a)


def outputs_of_which_one_is_used(put: Put) -> Any:
    class Two(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(seed=1), Layer(seed=2)

        def construct(self, x: Tensor) -> tuple:
            return self.first(x), self.second(x)

    a = put(Two())
    return by_all(lambda x, y: (a(x)[1] * y).sum(), a)


def a_view_as_output(put: Put) -> Any:
    class View(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            return self.layer(x).T[1:]

    a = put(View())
    return by_all(lambda x, y: (a(x) ** 2 * y.T[1:]).sum(), a)


def stop_gradient_inside(put: Put) -> Any:
    class Straight(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y + ops.stop_gradient(ops.sign(y) - y) * y

    a = put(Straight())
    return by_all(lambda x, y: (a(x) * y).sum(), a)


def a_bprop_of_its_own(put: Put) -> Any:
    class Cubed(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x * x

        def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple:
            return (dout * x * out,)

    a, b = put(Stack([Layer(), Cubed()])), put(Layer(seed=2))
    return by_all(lambda x, y: (b(a(x)) * y).sum(), a, b)


def a_write_into_a_temporary_inside(put: Put) -> Any:
    class Writes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            h = ops.exp(x)
            h[0] = 2.0
            return h * h

    a = put(Writes())
    return by_all(lambda x, y: (a(x) * y).sum(), a)


def top_k_and_gather_inside(put: Put) -> Any:
    class Routed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            values, index = ops.topk(self.layer(x), 2)
            return values * ops.gather_elements(x, 1, index)

    a = put(Routed())
    return by_all(lambda x, y: (a(x) * y[:, :2]).sum(), a)


def hooks_of_the_users_own_around(put: Put) -> Any:
    a = put(Layer())

    def function(x: Tensor, y: Tensor) -> Tensor:
        with ms.saved_tensors_hooks(lambda t: t.asnumpy().copy(), Tensor):
            return (a(x * y) ** 2).sum()

    return by_all(function, a)


def a_jit_function_inside(put: Put) -> Any:
    @ms.jit
    def squared(x: Tensor) -> Tensor:
        return x * x

    class Mixed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def construct(self, x: Tensor) -> Tensor:
            return squared(self.layer(x)) * x

    a = put(Mixed())
    return by_all(lambda x, y: (a(x) * y).sum(), a)


PROGRAMS = [
    value
    for name, value in list(globals().items())
    if getattr(value, "__module__", None) == __name__ and getattr(value, "__annotations__", {}).get("put") is Put
]


@functools.lru_cache
def plain(program: Callable[[Put], Any]) -> Any:
    return flat(program(lambda cell: cell), program.__name__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_plains(program: Callable[[Put], Any], kind: str) -> None:
    assert_same(flat(program(KINDS[kind]), program.__name__), plain(program))


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_gradients_are_plains_under_other_policies(kind: str) -> None:
    program = two_forwards_before_two_backwards
    assert_same(flat(program(MORE_KINDS[kind]), program.__name__), plain(program))


@pytest.mark.parametrize(
    "program",
    [a_cell_called_twice, a_call_whose_output_is_not_used, tied_weights, a_frozen_cell_in_the_middle],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_plains_inside_a_replayed_region(program: Callable[[Put], Any], kind: str) -> None:
    def around(put: Put) -> Put:
        return lambda cell: Stack([Layer(seed=71), put(cell)])

    found = flat(program(lambda cell: on(around(KINDS[kind])(cell), RECOMPUTE)), "program")
    assert_same(found, flat(program(around(lambda cell: cell)), "program"))


def test_there_are_programs() -> None:
    assert len(PROGRAMS) > 20


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs"])
def test_a_parameter_passed_as_an_argument_keeps_its_identity(kind: str) -> None:
    seen: list[Any] = []

    class Scale(nn.Cell):
        def construct(self, x: Tensor, weight: Parameter) -> Tensor:
            seen.append(weight)
            return ops.tanh(x * weight) * x

    def run(cell: nn.Cell) -> Any:
        weight = Parameter(numbers(4, seed=5), name="weight")
        weight.mark = "mine"
        found = flat(ms.value_and_grad(lambda x: (cell(x, weight) ** 2).sum(), 0, [weight])(X), "gradients")
        assert all(w is weight and w.mark == "mine" for w in seen)
        return found

    want = run(Scale())
    seen.clear()
    assert_same(run(KINDS[kind](Scale())), want)
    assert len(seen) == 2


def test_a_hook_on_a_parameter_fires_once() -> None:
    def run(net: nn.Cell) -> tuple[int, Any]:
        calls: list[Tensor] = []
        net.layers[0].dense.weight.register_hook(lambda g: calls.append(g) or g * 2)
        found = gradients(net, X)
        return len(calls), found

    (plain_calls, want) = run(Stack([Layer(seed=1), Layer(seed=2)]))
    (calls, found) = run(Stack([on(Layer(seed=1), RECOMPUTE), on(Layer(seed=2), SWAP)]))
    assert calls == plain_calls
    assert_same(found, want)


CALLS: dict[str, Callable[[Layer], Callable[[Tensor], Tensor]]] = {
    "checkpoint of a cell": lambda layer: lambda x: checkpoint(layer, x),
    "checkpoint of a bound method": lambda layer: lambda x: checkpoint(layer.construct, x),
    "checkpoint of a lambda": lambda layer: lambda x: checkpoint(lambda z: layer(z), x),
    "checkpoint with swapped inputs": lambda layer: lambda x: checkpoint(layer, x, swap_inputs=True),
    "checkpoint of a partial": lambda layer: lambda x: checkpoint(functools.partial(layer.construct, x=x)),
    "checkpoint_wrapper of a function": lambda layer: checkpoint_wrapper(lambda z: layer(z)),
    "checkpoint_wrapper of a bound method": lambda layer: checkpoint_wrapper(layer.construct, swap_inputs=True),
    "swap of a cell": lambda layer: lambda x: swap(layer, x),
    "swap_wrapper of a function": lambda layer: swap_wrapper(lambda z: layer(z)),
    "checkpoint in a swap": lambda layer: lambda x: swap(lambda z: checkpoint(layer, z), x),
    "swap in a checkpoint": lambda layer: lambda x: checkpoint(lambda z: swap(layer, z), x),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_wrapped_call_gives_plains_gradients(way: str) -> None:
    def run(wrap: Callable) -> Any:
        a, b = Layer(seed=1), Layer(seed=2)
        f, g = wrap(a), wrap(b)
        return flat(by_all(lambda x, y: (g(f(x)) * y).sum(), a, b), "gradients")

    assert_same(run(CALLS[way]), run(lambda layer: layer))


def test_a_wrapped_primitive_gives_plains_gradients() -> None:
    tanh = checkpoint_wrapper(ops.Tanh())
    assert_same(
        flat(ms.value_and_grad(lambda x: (tanh(x) ** 2).sum(), 0)(X), "g"),
        flat(ms.value_and_grad(lambda x: (ops.Tanh()(x) ** 2).sum(), 0)(X), "g"),
    )


@pytest.mark.parametrize("kind", ["swap", "swapped inputs"])
def test_swapping_really_moves(kind: str) -> None:
    two_forwards_before_two_backwards(KINDS[kind])
    stats = SwapManager().stats()
    assert stats.offloaded_bytes == stats.loaded_bytes > 0


@pytest.mark.parametrize(("kind", "calls"), [("save", 1), ("swap", 1), ("recompute", 2), ("swap, then recompute", 2)])
def test_a_region_runs_as_often_as_its_policy_says(kind: str, calls: int) -> None:
    layer = {**KINDS, **MORE_KINDS}[kind](Layer())
    gradients(layer, X)
    assert layer.calls == calls
