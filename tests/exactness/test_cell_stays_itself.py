"""A cell under a policy is the cell it was: names, keys, type, printing, copies, subclasses, later class swaps."""

import copy
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, PolicyError, activation_policy, checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_memory.attach import attach, restore
from hyper_parallel.core.activation_memory.spec import RegionSpec
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Stack, assert_same, gradients, numbers, on

X = numbers(3, 4, seed=1)
POLICIES = [RECOMPUTE, SWAP, SAVE]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


def net_of(policy: Any = None) -> nn.Cell:
    return Stack([on(Layer(seed=seed), policy) for seed in (1, 2)])


@each_policy
def test_the_same_object_comes_back(policy: CheckpointPolicy) -> None:
    layer = Layer()
    assert activation_policy(policy)(layer) is layer
    assert layer.unwrap_cell is layer
    assert checkpoint_wrapper(cell := Layer()) is cell and swap_wrapper(cell) is cell


@each_policy
def test_names_type_and_printing_are_unchanged(policy: CheckpointPolicy) -> None:
    net, plain = net_of(policy), net_of()
    assert str(net) == str(plain) and repr(net) == repr(plain)
    assert [p.name for p in net.get_parameters()] == [p.name for p in plain.get_parameters()]
    assert [name for name, _ in net.cells_and_names()] == [name for name, _ in plain.cells_and_names()]
    layer = net.layers[0]
    assert isinstance(layer, Layer) and type(layer).__name__ == "Layer" and type(layer).__module__ == Layer.__module__
    assert layer.cls_name == plain.layers[0].cls_name


@each_policy
def test_attributes_that_are_added_start_with_an_underscore(policy: CheckpointPolicy) -> None:
    def public(cell: nn.Cell) -> set[str]:
        return {name for name in dir(cell) if not name.startswith("_")}

    assert public(on(Layer(), policy)) - public(Layer()) <= {"unwrap_cell"}


@each_policy
def test_checkpoints_load_across_policies(policy: CheckpointPolicy, tmp_path: Path) -> None:
    net, plain = net_of(policy), Stack([Layer(seed=8), Layer(seed=9)])
    ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
    assert ms.load_param_into_net(plain, ms.load_checkpoint(str(tmp_path / "net.ckpt"))) == ([], [])
    assert_same(gradients(plain, X), gradients(net, X))


@each_policy
def test_assigning_a_cell_to_its_own_name_keeps_the_keys(policy: CheckpointPolicy) -> None:
    net = net_of()
    keys = [name for name, _ in net.parameters_and_names()]
    net.layers[0] = on(net.layers[0], policy)
    assert [name for name, _ in net.parameters_and_names()] == keys


@each_policy
def test_a_deepcopy_uses_its_own_weights(policy: CheckpointPolicy) -> None:
    net = net_of(policy)
    other = copy.deepcopy(net)
    for parameter in other.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 2 + 1))
    plain = net_of()
    for parameter in plain.get_parameters():
        parameter.set_data(Tensor(parameter.asnumpy() * 2 + 1))

    assert_same(gradients(other, X), gradients(plain, X))
    assert_same(gradients(net, X), gradients(net_of(), X))
    assert other.layers[0].calls == (2 if policy.replays else 1)


def test_attributes_may_change_between_steps() -> None:
    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x) * self.scale

    cell, plain = on(Scaled(), RECOMPUTE), Scaled()
    for scale in (1.0, 2.5):
        cell.scale = plain.scale = scale
        assert_same(gradients(cell, X), gradients(plain, X))


def decorated(policy: CheckpointPolicy) -> type:
    @activation_policy(policy)
    class Decorated(Layer):
        pass

    return Decorated


@each_policy
def test_a_decorated_class_covers_its_instances(policy: CheckpointPolicy) -> None:
    cell = decorated(policy)()
    assert_same(gradients(cell, X), gradients(Layer(), X))
    assert cell.calls == (2 if policy.replays else 1)


def test_decorating_a_class_leaves_its_base_alone() -> None:
    decorated(RECOMPUTE)
    plain = Layer()
    gradients(plain, X)
    assert plain.calls == 1


class Calls(nn.Cell):
    """Counts in a place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4, weight_init=numbers(4, 4), bias_init="zeros")
        self.counts = {"base": 0, "own": 0}

    def construct(self, x: Tensor) -> Tensor:
        self.counts["base"] += 1
        return ops.tanh(self.dense(x)) * x


def subclasses(base: type) -> dict[str, type]:
    class Inherits(base):
        pass

    class Overrides(base):
        def construct(self, x: Tensor) -> Tensor:
            self.counts["own"] += 1
            return ops.exp(self.dense(x)) * x

    class Extends(base):
        def construct(self, x: Tensor) -> Tensor:
            self.counts["own"] += 1
            return ops.tanh(super().construct(x * 2)) * x

    class ExtendsTwice(Extends):
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(super().construct(x))

    return {cls.__name__: cls for cls in (Inherits, Overrides, Extends, ExtendsTwice)}


@pytest.mark.parametrize("name", ["Inherits", "Overrides", "Extends", "ExtendsTwice"])
@pytest.mark.parametrize("when", ["before", "after"])
@each_policy
def test_a_subclass_of_a_decorated_class_is_one_region(policy: CheckpointPolicy, when: str, name: str) -> None:
    class Base(Calls):
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(x)

    if when == "before":
        cls = subclasses(activation_policy(policy)(Base))[name]
    else:
        cls = subclasses(Base)[name]
        activation_policy(policy)(Base)
    cell, plain = cls(), subclasses(Calls)[name]()

    assert_same(gradients(cell, X), gradients(plain, X))
    times = 2 if policy.replays else 1
    assert cell.counts == {key: count * times for key, count in plain.counts.items()}


class Mixin:
    """What FSDP puts on top of a cell."""

    def construct(self, x: Tensor) -> Tensor:
        return super().construct(x * 1.5)


@each_policy
def test_a_class_that_others_put_on_top_keeps_working(policy: CheckpointPolicy) -> None:
    cell, plain = on(Layer(), policy), Layer()
    for target in (cell, plain):
        target.__class__ = type("HSDP", (Mixin, target.__class__), {})

    assert_same(gradients(cell, X), gradients(plain, X))
    assert cell.calls == (2 if policy.replays else 1)


@each_policy
def test_a_policy_on_top_of_others_class_keeps_working(policy: CheckpointPolicy) -> None:
    cell, plain = Layer(), Layer()
    for target in (cell, plain):
        target.__class__ = type("HSDP", (Mixin, target.__class__), {})
    on(cell, policy)

    assert_same(gradients(cell, X), gradients(plain, X))
    assert cell.calls == (2 if policy.replays else 1)


@each_policy
def test_restore_leaves_the_cell_as_it_was(policy: CheckpointPolicy) -> None:
    cell, plain = Layer(), Layer()
    restore(cell, attach(cell, RegionSpec(policy)))

    assert type(cell) is Layer and cell.__dict__.keys() == plain.__dict__.keys()
    assert_same(gradients(cell, X), gradients(plain, X))
    assert cell.calls == 1


@each_policy
def test_restore_peels_only_our_layer(policy: CheckpointPolicy) -> None:
    cell, plain = Layer(), Layer()
    before = attach(cell, RegionSpec(policy))
    for target in (cell, plain):
        target.__class__ = type("HSDP", (Mixin, target.__class__), {})
    restore(cell, before)

    assert type(cell).__name__ == "HSDP"
    assert_same(gradients(cell, X), gradients(plain, X))
    assert cell.calls == 1


def test_a_construct_on_the_instance_is_refused() -> None:
    cell = Layer()
    cell.construct = lambda x: x
    with pytest.raises(PolicyError, match="construct of its own"):
        on(cell, RECOMPUTE)


def test_training_mode_and_requires_grad_are_unchanged() -> None:
    cell = Layer().set_train()
    cell.dense.bias.requires_grad = False
    on(cell, RECOMPUTE)
    assert cell.training and [p.name for p in cell.trainable_params()] == ["dense.weight"]
    assert np.array_equal(cell.dense.bias.asnumpy(), Layer().dense.bias.asnumpy())
