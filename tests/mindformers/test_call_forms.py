"""The call forms of MindFormers 2.0.0 and 2.1.0, one by one, through the import path that it uses."""

import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import PolicyOverruledWarning
from hyper_parallel.core.activation_checkpoint import (
    CheckpointPolicy,
    SwapManager,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    swap_wrapper,
)
from tests.helpers import Layer, Stack, assert_same, gradients, numbers

X = numbers(3, 4, seed=3)


def one_shot() -> tuple[Any, Any]:
    """Two contexts that can be entered once each; the replay consumes what the forward has put down."""
    values: deque[str] = deque()

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        values.append("from the forward")
        yield

    @contextlib.contextmanager
    def replay() -> Iterator[None]:
        assert values.popleft() == "from the forward"
        yield
        assert not values

    return forward(), replay()


@pytest.mark.parametrize("early_stop", [True, False])
def test_one_shot_contexts_are_used_once_a_call(early_stop: bool) -> None:
    net, calls = Stack([Layer(), Layer(seed=1)]), []

    def context_fn() -> tuple[Any, Any]:
        calls.append(None)
        return one_shot()

    for layer in net.layers:
        checkpoint_wrapper(layer, context_fn=context_fn, early_stop=early_stop)
    for step in (1, 2):
        assert_same(gradients(net, X), gradients(Stack([Layer(), Layer(seed=1)]), X))
        assert len(calls) == 2 * step


def test_a_one_shot_context_serves_nested_regions_and_second_readers() -> None:
    inner = Stack([Layer(), Layer(seed=1)])
    for layer in inner.layers:
        checkpoint_wrapper(layer, context_fn=one_shot)
    net = checkpoint_wrapper(Stack([inner]), context_fn=one_shot, early_stop=False)
    assert_same(gradients(net, X), gradients(Stack([Stack([Layer(), Layer(seed=1)])]), X))


class Dropping(nn.Cell):
    """A dense cell, dropout and a function of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = Layer(), nn.Dropout(p=0.5)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dropout(self.layer(x))) * x


def keeps_matmul(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """As the `exclude_op` of 2.0.0: MUST_RECOMPUTE for whatever it doesn't know."""
    name = (getattr(op, "name", "") or "").lower()
    return CheckpointPolicy.MUST_SAVE if "matmul" in name or "dense" in name else CheckpointPolicy.MUST_RECOMPUTE


def dropping(wrap: Callable[[nn.Cell], Any]) -> dict:
    ms.set_seed(5)
    net = Dropping().set_train()
    wrap(net)
    return gradients(net, X)


@pytest.mark.filterwarnings("ignore::hyper_parallel.PolicyOverruledWarning")
def test_a_policy_function_that_would_recompute_dropout_gives_the_plain_numbers() -> None:
    got = dropping(lambda net: checkpoint_wrapper(net, policy_fn=keeps_matmul, context_fn=one_shot))
    assert_same(got, dropping(lambda net: None))


def test_a_random_operator_that_should_be_recomputed_is_reported_with_its_name() -> None:
    class RandomLayer(Dropping):
        """A name that no other test has: every overruling is reported once a place."""

    ms.set_seed(5)
    net = checkpoint_wrapper(RandomLayer().set_train(), policy_fn=keeps_matmul, context_fn=one_shot)
    with pytest.warns(PolicyOverruledWarning, match="RandomLayer: MUST_RECOMPUTE for .*Dropout"):
        gradients(net, X)


class Uses(nn.Cell):
    """A cell whose operators are replaced as MindFormers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.function, self.primitive, self._settable = mint.exp, ops.Tanh(), ops.sin
        self._comm_ops = {"input.allgather": {"fn": ops.cos, "domain": "tp"}}

    @property
    def settable(self) -> Any:
        return self._settable

    @settable.setter
    def settable(self, value: Any) -> None:
        self._settable = value

    def method(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x) * x

    def construct(self, x: Tensor) -> Tensor:
        x = self.method(self.layer(x))
        x = self._comm_ops["input.allgather"]["fn"](self.settable(x))
        return self.primitive(self.function(x))


def on_attribute(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    cell.function = wrap(cell.function)


def on_primitive(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    cell.primitive = wrap(cell.primitive)


def on_method(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    object.__setattr__(cell, "method", wrap(cell.method))


def on_method_by_setattr(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    setattr(cell, "method", wrap(cell.method))  # noqa: B010


def on_property(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    cell.settable = wrap(cell.settable)


def on_slot(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    cell._comm_ops["input.allgather"]["fn"] = wrap(cell._comm_ops["input.allgather"]["fn"])


def on_cell(cell: Uses, wrap: Callable[[Any], Any]) -> None:
    cell.layer = wrap(cell.layer)


PLACES = [on_attribute, on_primitive, on_method, on_method_by_setattr, on_property, on_slot]


def output_recomputed(target: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyOverruledWarning)  # its output isn't, which another test is about
        return checkpoint_wrapper(target, output_recompute=True)


@pytest.mark.parametrize("place", PLACES)
def test_an_operator_with_output_recompute_gives_the_plain_numbers(place: Callable[..., None]) -> None:
    net = Uses()
    place(net, output_recomputed)
    assert_same(gradients(net, X), gradients(Uses(), X))


def test_output_recompute_says_that_the_output_stays() -> None:
    with pytest.warns(PolicyOverruledWarning, match="its output stays"):
        checkpoint_wrapper(ops.tanh, output_recompute=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_deep_copy_of_a_replaced_operator_works_alone(place: Callable[..., None]) -> None:
    net = Uses()
    place(net, output_recomputed)
    other = copy.deepcopy(net)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 0))
    assert_same(gradients(other, X), gradients(Uses(), X))


@pytest.mark.parametrize("place", [*PLACES, on_cell])
def test_what_is_excluded_runs_once_wherever_it_is_stored(place: Callable[..., None]) -> None:
    net, runs = Uses(), []

    def excluded(target: Any) -> Any:
        if isinstance(target, nn.Cell):
            return checkpoint_exclude_wrapper(target)

        def counted(x: Tensor) -> Tensor:
            runs.append(None)
            return target(x)

        return checkpoint_exclude_wrapper(counted)

    place(net, excluded)
    checkpoint_wrapper(net, context_fn=one_shot, early_stop=False)
    assert_same(gradients(net, X), gradients(Uses(), X))
    assert (net.layer.calls if place is on_cell else len(runs)) == 1


class KeepsStorages:
    """As the swap policy of 2.1.0: an object that compares storages."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.asked: list[int] = []

    def __call__(self, tensor: Tensor) -> CheckpointPolicy:
        storage = tensor.untyped_storage()
        assert storage.size()
        self.asked.append(storage.data_ptr())
        return CheckpointPolicy.MUST_SAVE if storage.data_ptr() in self.kept else CheckpointPolicy.MUST_SWAP


def test_a_swap_policy_that_reads_storages_keeps_those_it_knows() -> None:
    x, policy = ops.add(X, 0.0), KeepsStorages()
    policy.kept.add(x.untyped_storage().data_ptr())
    net = Stack([swap_wrapper(Layer(), policy_fn=policy), Layer(seed=1)])
    SwapManager().reset()
    assert_same(gradients(net, x, wait=True), gradients(Stack([Layer(), Layer(seed=1)]), x))
    assert SwapManager().stats().kept_bytes >= x.nbytes
    assert SwapManager().stats().offloaded_bytes > 0


def test_a_swap_policy_is_asked_once_for_a_tensor() -> None:
    policy = KeepsStorages()
    net = Stack([swap_wrapper(Layer(), policy_fn=policy), Layer(seed=1)])
    gradients(net, ops.add(X, 0.0))
    assert policy.asked and len(policy.asked) == len(set(policy.asked))


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, checkpoint_exclude_wrapper, swap_wrapper])
def test_unwrap_cell_is_a_property_that_gives_what_is_wrapped(wrap: Callable[[Any], Any]) -> None:
    layer = Layer()
    assert isinstance(getattr(wrap(layer), "unwrap_cell", None), Layer)
    assert wrap(ops.tanh).unwrap_cell is ops.tanh


def test_prefetch_layers_need_neither_a_policy_nor_to_be_neighbours() -> None:
    net = Stack([Layer(seed=seed) for seed in range(4)])
    swap_wrapper(net.layers[0].dense)
    SwapManager().set_forward_prefetch_layer(net.layers[0], net.layers[2])
    plain = gradients(Stack([Layer(seed=seed) for seed in range(4)]), X)
    assert_same(gradients(net, X, wait=True), plain)


def test_a_cell_that_is_assigned_to_its_own_name_keeps_the_names_of_its_parameters() -> None:
    net = Stack([Uses(), Uses()])
    names = [parameter.name for parameter in net.get_parameters()]
    for cell in net.layers:
        cell.layer = checkpoint_wrapper(cell.layer)
    assert [parameter.name for parameter in net.get_parameters()] == names


def test_a_wrapped_cell_that_is_assigned_to_a_new_name_takes_it() -> None:
    outer = nn.Cell()
    outer.inner = checkpoint_wrapper(Layer())
    outer.moved = outer.inner
    assert [parameter.name for parameter in outer.get_parameters()] == ["moved.dense.weight", "moved.dense.bias"]
