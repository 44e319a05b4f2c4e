"""Which calls there are, which are used, and which gradients flow."""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from tests.exactness.programs.program import Program, Put, X, Y, named, step
from tests.helpers import Layer, numbers


def one_cell(put: Put) -> Any:
    a = put(Layer())
    return step(lambda x, y: (a(x) * y).sum(), a)


def two_forwards_before_two_backwards(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return step(lambda x, y: (a(x) * b(y)).sum() + (b(x) * a(y)).sum(), a, b)


def a_cell_called_twice(put: Put) -> Any:
    a = put(Layer())
    return step(lambda x, y: (a(x) ** 2).sum() + (a(y) ** 3).sum(), a)


def a_cell_called_on_its_own_output(put: Put) -> Any:
    a = put(Layer())
    return step(lambda x, y: (a(a(a(x))) * y).sum(), a)


def four_micro_batches_in_one_loss(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return step(lambda x, y: sum((b(a(x * scale)) * y).sum() for scale in (1.0, 0.5, -1.0, 2.0)), a, b)


def a_call_whose_output_is_not_used(put: Put) -> Any:
    a = put(Layer())

    def function(x: Tensor, y: Tensor) -> Tensor:
        used, _ = a(x), a(x * 5 + y)
        return (used * y).sum()

    return step(function, a, times=2)


def no_output_is_used(put: Put) -> Any:
    a, b = put(Layer(seed=1)), Layer(seed=2)

    def function(x: Tensor, y: Tensor) -> Tensor:
        a(x), a(y)
        return (b(x) * y).sum()

    return step(function, a, b, times=2)


def an_output_without_gradient(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return step(lambda x, y: (a(x) * ops.stop_gradient(b(y))).sum(), a, b, times=2)


def an_input_without_gradient(put: Put) -> Any:
    a = put(Layer())
    return step(lambda x, y: (a(ops.stop_gradient(x)) * y).sum(), a)


def the_same_input_for_two_cells(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return step(lambda x, y: (a(x) + b(x) * y).sum(), a, b)


def views_as_inputs(put: Put) -> Any:
    a = put(Layer(width=3))
    return step(lambda x, y: (a(x.T[1:4]) * y[:, 1:].T).sum() + a(x.swapaxes(0, 1)).sum() + a(y.T[::2]).sum(), a)


def a_branch_that_joins_again(put: Put) -> Any:
    a, b, c = put(Layer(seed=1)), put(Layer(seed=2)), put(Layer(seed=3))
    return step(lambda x, y: (lambda h: (c(b(h) * a(h) + h) * y).sum())(a(x)), a, b, c)


def a_branch_on_a_value(put: Put) -> Any:
    class Chooses(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(seed=1), Layer(seed=2)

        def construct(self, x: Tensor) -> Tensor:
            return self.first(x) if x.sum() > 0 else self.second(ops.exp(x))

    a = put(Chooses())
    return step(lambda x, y: (a(x) * a(-x) * y).sum(), a)


def tied_weights(put: Put) -> Any:
    a, b = Layer(seed=1), Layer(seed=2)
    b.dense.weight = a.dense.weight
    a, b = put(a), put(b)
    return step(lambda x, y: (b(a(x)) * y).sum(), a, b)


def weights_frozen_before_the_policy(put: Put) -> Any:
    a, b = Layer(seed=1), Layer(seed=2)
    a.dense.weight.requires_grad = False
    a, b = put(a), put(b)
    return step(lambda x, y: (b(a(x)) * y).sum(), a, b)


def weights_frozen_after_the_policy(put: Put) -> Any:
    layer = Layer(seed=1)
    a, b = put(layer), put(Layer(seed=2))
    layer.dense.weight.requires_grad = False
    return step(lambda x, y: (b(a(x)) * y).sum(), a, b)


def a_frozen_cell_in_the_middle(put: Put) -> Any:
    a, b, c = Layer(seed=1), Layer(seed=2), Layer(seed=3)
    for parameter in b.get_parameters():
        parameter.requires_grad = False
    a, b, c = put(a), put(b), put(c)
    return step(lambda x, y: (c(b(a(x))) * y).sum(), a, b, c)


def a_frozen_cell_that_nothing_needs_the_gradient_of(put: Put) -> Any:
    a, b = Layer(seed=1), Layer(seed=2)
    for parameter in a.get_parameters():
        parameter.requires_grad = False
    a = put(a)
    return step(lambda x, y: (b(x) * a(ops.stop_gradient(y))).sum(), a, b)


def a_first_cell_that_has_only_weights_to_train(put: Put) -> Any:
    a, b = put(Layer(seed=1)), put(Layer(seed=2))
    return step(lambda: (b(a(X)) ** 2).sum(), a, b, inputs=())


def only_a_weight_before_the_region_is_trained(put: Put) -> Any:
    outer = Parameter(numbers(4, seed=5), name="outer")
    a = put(Layer())
    return ms.value_and_grad(lambda x: (a(x * outer) ** 2).sum(), None, [outer])(X)


def integer_inputs_only(put: Put) -> Any:
    table = nn.Embedding(5, 4)
    table.embedding_table.set_data(numbers(5, 4, seed=9))
    table = put(table)
    index = Tensor([[0, 3, 3], [1, 4, 0]], ms.int32)
    return step(lambda x, y: (table(index).sum(0) * x * y).sum(), table)


def no_inputs_at_all(put: Put) -> Any:
    class Norm(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(numbers(3, 4), name="w")

        def construct(self) -> Tensor:
            return ops.tanh(self.w) * self.w

    a = put(Norm())
    return step(lambda x, y: (a() * x * y).sum(), a)


def an_input_returned_as_output(put: Put) -> Any:
    class Through(nn.Cell):
        def construct(self, x: Tensor, y: Tensor) -> tuple:
            return x, ops.tanh(x) * y

    a = put(Through())
    return step(lambda x, y: (lambda same, z: (same * z * y).sum())(*a(x * 1, y)), a)


def only_the_input_comes_back(put: Put) -> Any:
    a = put(nn.Identity())
    return step(lambda x, y: (a(x * y) ** 2).sum(), a)


def outputs_of_which_one_is_used(put: Put) -> Any:
    class Two(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(seed=1), Layer(seed=2)

        def construct(self, x: Tensor) -> tuple:
            return self.first(x), self.second(x)

    a = put(Two())
    return step(lambda x, y: (a(x)[1] * y).sum(), a)


def a_parameter_passed_as_an_argument_keeps_its_identity(put: Put) -> Any:
    weight = Parameter(numbers(4, seed=5), name="weight")
    weight.mark = "mine"

    class Scale(nn.Cell):
        def construct(self, x: Tensor, other: Parameter) -> Tensor:
            assert other is weight and other.mark == "mine"
            return ops.tanh(x * other) * x

    a = put(Scale())
    return ms.value_and_grad(lambda x: (a(x, weight) ** 2).sum(), 0, [weight])(X)


def an_attribute_on_a_tensor_argument(put: Put) -> Any:
    class Scale(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x) * x * x.scale

    a = put(Scale())

    def function(x: Tensor, y: Tensor) -> Tensor:
        h = x * y
        h.scale = 3.0
        return (a(h) ** 2).sum()

    return step(function, a)


def a_tensor_of_the_inside_that_the_outside_reads(put: Put) -> Any:
    class Leaks(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            self.last: Any = None

        def construct(self, x: Tensor) -> Tensor:
            h = ops.exp(self.layer(x))
            self.last = h
            return h * x

    leaks = Leaks()
    a = put(leaks)
    return step(lambda x, y: (a(x) * y).sum() + (ops.stop_gradient(leaks.last) * y).sum(), a)


def the_same_policy_twice(put: Put) -> Any:
    layer = Layer()
    put(layer)
    a = put(layer)
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_construct_under_a_decorator(put: Put) -> Any:
    def doubled(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(construct)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            return construct(self, *args, **kwargs) * 2

        return wrapped

    class Wrapped(Layer):
        @doubled
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x)

    a = put(Wrapped())
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_construct_replaced_after_the_policy(put: Put) -> Any:
    layer = Layer()
    a = put(layer)
    before = layer.construct
    layer.construct = MethodType(lambda self, x: before(x * 3) * x, layer)
    return step(lambda x, y: (a(x) * y).sum(), a)


def keywords_named_like_those_of_checkpoint(put: Put) -> Any:
    class Named(nn.Cell):
        def construct(
            self, x: Tensor, early_stop: bool = False, save_rng_state: Any = None, context_fn: Any = None
        ) -> Tensor:
            return ops.tanh(x) * x * (2.0 if early_stop else 1.0) * save_rng_state * context_fn

    a = put(Named())
    return step(lambda x, y: (a(x, early_stop=True, save_rng_state=3.0, context_fn=y) ** 2).sum(), a)


def a_deepcopy_with_weights_of_its_own(put: Put) -> Any:
    a = put(Layer())
    b = copy.deepcopy(a)
    for parameter in b.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 2 + 1))
    return step(lambda x, y: (a(x) * y).sum() + (b(y) * x).sum(), a, b)


def train_and_eval_toggled_before_backward(put: Put) -> Any:
    inner = Layer()

    class Depends(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = inner

        def construct(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return ops.exp(y) * y if self.training and self.layer.training else ops.tanh(y)

    a = put(Depends()).set_train()

    def function(x: Tensor, y: Tensor) -> Tensor:
        a.set_train()
        z = a(x)
        a.set_train(False)
        return (z * y).sum()

    return step(function, a), a.training, inner.training


def hooks_registered_on_an_inner_cell(put: Put) -> Any:
    """Saved-tensor hooks: MindSpore asks them if the cell has `set_grad()`, and ignores them if not."""
    first, second = Layer(seed=1), Layer(seed=2)
    for layer in (first, second):
        layer.register_saved_tensors_hooks(lambda t: t.asnumpy().copy(), Tensor)
    first.set_grad()

    class Two(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def construct(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    a = put(Two())
    return step(lambda x, y: (a(x) * y).sum(), a)


def one_forward_serves_two_gradients(put: Put) -> Any:
    a = put(Layer())
    outputs, pull = ms.vjp(lambda x: a(x) * Y, X)
    return outputs, pull(X), pull(Y)


PROGRAMS: dict[str, Program] = named(globals())
