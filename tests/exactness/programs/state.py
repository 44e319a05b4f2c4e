"""Cells that change something in their forward: a replay changes it no second time and computes from what it was."""

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from tests.exactness.programs.program import Program, Put, X, named, step
from tests.helpers import Layer, Stack, seeded


def batch_norm_first(put: Put) -> Any:
    a = put(Stack([seeded(nn.BatchNorm1d(4)), Layer()])).set_train()
    return step(lambda x, y: (a(x) * y).sum(), a, times=2)


def batch_norm_last(put: Put) -> Any:
    a = put(Stack([Layer(), seeded(nn.BatchNorm1d(4))])).set_train()
    return step(lambda x, y: (a(x) * y).sum(), a, times=2)


def batch_norm_called_twice(put: Put) -> Any:
    a = put(Stack([seeded(nn.BatchNorm1d(4)), Layer()])).set_train()
    return step(lambda x, y: (a(x) * a(y)).sum(), a, times=2)


def batch_norm_in_evaluation(put: Put) -> Any:
    a = put(Stack([seeded(nn.BatchNorm1d(4)), Layer()]))
    a.set_train(False)
    return step(lambda x, y: (a(x) * y).sum(), a, times=2)


class Counts(nn.Cell):
    """Counts its calls and sums its outputs, in parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.count = Parameter(Tensor(0.0, ms.float32), name="count", requires_grad=False)
        self.total = Parameter(Tensor(0.0, ms.float32), name="total", requires_grad=False)
        self.last = Parameter(Tensor(np.ones((3, 4), np.float32)), name="last", requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        ops.assign_add(self.count, Tensor(1.0, ms.float32))
        ops.assign(self.total, self.total + y.sum())
        return y * y


def parameters_that_count_and_sum(put: Put) -> Any:
    a = put(Counts())
    return step(lambda x, y: (a(x) * y).sum(), a, times=2)


def a_result_scaled_by_a_parameter_that_counts(put: Put) -> Any:
    class Scaled(Counts):
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x) * self.count * ops.tanh(x * self.count)

    a = put(Scaled())
    return step(lambda x, y: (a(x) * a(y)).sum(), a)


def a_parameter_that_copies_take_the_place_of(put: Put) -> Any:
    """`copy_` writes in place; `set_data` gives the parameter another storage."""

    class Keeps(Counts):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(self.layer(x) + self.last)
            self.last.copy_(ops.stop_gradient(y))
            self.total.set_data(ops.stop_gradient(y.sum()))
            return y * x

    a = put(Keeps())
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_parameter_written_by_index(put: Put) -> Any:
    class Writes(Counts):
        def construct(self, x: Tensor) -> Tensor:
            y = ops.tanh(self.layer(x) + self.last)
            self.last[0] = ops.stop_gradient(y[1])
            return y * x

    a = put(Writes())
    return step(lambda x, y: (a(x) * y).sum(), a)


def a_weight_normalised_inside(put: Put) -> Any:
    """As spectral norm does: a vector is moved in every forward, and the weight divided by what it gives."""

    class Spectral(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            self.u = Parameter(Tensor(np.ones(4, np.float32)), name="u", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            w = self.layer.dense.weight
            v = ops.stop_gradient(ops.matmul(w, self.u))
            ops.assign(self.u, v / ops.norm(v))
            return ops.tanh(ops.matmul(x, w / ops.matmul(self.u, ops.matmul(w, self.u)))) * x

    a = put(Spectral())
    return step(lambda x, y: (a(x) * y).sum(), a)


class Memory:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.tensor: Any = None
        self.more: list[Tensor] = []
        self.count = 0


class Remembers(nn.Cell):
    """Keeps tensors in attributes of every kind, and computes from what it kept before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.hidden = ops.zeros((3, 4), ms.float32)
        self.outputs: list[Tensor] = []
        self.table: dict[str, Any] = {"inner": [ops.ones((3, 4), ms.float32)]}
        self.memory = Memory()

    def construct(self, x: Tensor) -> Tensor:
        y = ops.tanh(self.layer(x) + self.hidden + sum(self.outputs) + self.table["inner"][0])
        if self.memory.tensor is not None:
            y = y * ops.exp(self.memory.tensor) * len(self.memory.more) * self.memory.count
        kept = ops.stop_gradient(y)
        self.hidden = kept * 0.5
        self.outputs.append(kept)
        self.table["inner"][0] = kept + 1
        self.memory.tensor = kept
        self.memory.more.append(kept)
        self.memory.count += 1
        return y * x

    def kept(self) -> Any:
        return self.hidden, self.outputs, self.table, self.memory.tensor, self.memory.more, self.memory.count


def tensors_that_a_cell_keeps(put: Put) -> Any:
    cell = Remembers()
    a = put(cell)
    return step(lambda x, y: (a(x) * a(y)).sum(), a, times=2), cell.kept()


def tensors_that_an_inner_cell_keeps(put: Put) -> Any:
    cell = Remembers()
    a = put(Stack([Layer(seed=4), cell]))
    return step(lambda x, y: (a(x) * a(y)).sum(), a), cell.kept()


def an_attribute_that_appears_in_the_forward(put: Put) -> Any:
    class Lazy(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.scale = ops.full((4,), 2.0, dtype=ms.float32)
                return ops.exp(x) * x
            self.scale = self.scale + 1
            return ops.tanh(x) * x * self.scale

    cell = Lazy()
    a = put(cell)
    return step(lambda x, y: (a(x) * a(y)).sum(), a), cell.scale


def a_tensor_that_a_function_closes_over(put: Put) -> Any:
    moved = ops.ones((3, 4), ms.float32)

    class Moves(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            nonlocal moved
            moved = moved * 2 + ops.stop_gradient(x)
            return ops.tanh(x * moved) * x

    a = put(Moves())
    return step(lambda x, y: (a(x) * a(y)).sum(), a, times=2), moved


class Caches(nn.Cell):
    """Appends to what it is called with, as cells with key and value caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def construct(self, x: Tensor, cache: Any) -> Tensor:
        keys = cache["keys"] if isinstance(cache, dict) else cache.more if isinstance(cache, Memory) else cache
        keys.append(self.layer(x))
        return ops.concat(list(keys), 0).sum(0) * x * len(keys)


def _appends(put: Put, new: Callable[[], Any], keys_of: Callable[[Any], list]) -> Any:
    a = put(Caches())
    lengths = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        cache = new()
        result = (a(x, cache) * a(y, cache)).sum()
        lengths.append(cache)
        return result + sum(key.sum() for key in keys_of(cache))

    return step(function, a), [len(keys_of(cache)) for cache in lengths]


def a_list_that_is_passed_and_appended_to(put: Put) -> Any:
    return _appends(put, list, lambda cache: cache)


def a_dict_that_is_passed_and_appended_to(put: Put) -> Any:
    return _appends(put, lambda: {"keys": []}, lambda cache: cache["keys"])


def an_object_that_is_passed_and_appended_to(put: Put) -> Any:
    return _appends(put, Memory, lambda cache: cache.more)


def a_mask_built_in_the_first_call_and_cached(put: Put) -> Any:
    @functools.lru_cache
    def mask(length: int) -> Tensor:
        return Tensor(np.tri(length, 4, dtype=np.float32))

    class Masks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x * mask(3)) * x

    a = put(Masks())
    return step(lambda x, y: (a(x) * y).sum(), a)


def statistics_moved_by_a_forward_alone(put: Put) -> Any:
    a = put(Stack([seeded(nn.BatchNorm1d(4)), Counts()])).set_train()
    a(X)
    moved = [p.asnumpy().copy() for p in a.get_parameters()]
    return moved, step(lambda x, y: (a(x) * y).sum(), a)


PROGRAMS: dict[str, Program] = named(globals())
