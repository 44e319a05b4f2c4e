"""Putting a policy on one cell, and taking it off: the cell stays itself."""

import copy
import inspect
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, PolicyError, activation_policy, checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_memory.attach import attach, restore
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of
from tests.helpers import Layer, Stack, assert_same, gradients, numbers, seeded

P = CheckpointPolicy


class Scaled(nn.Cell):
    """A cell whose construct has a signature worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = seeded(nn.Dense(4, 4))

    def construct(self, x: Tensor, scale: float = 2.0, *, bias: float = 0.5) -> Tensor:
        """Scale and shift."""
        return ops.tanh(self.dense(x)) * scale + bias


@pytest.mark.parametrize("target", [int, object, 3, "layer", None, np.ones(2), lambda x: x])
def test_a_target_that_is_no_cell_is_refused(target: Any) -> None:
    with pytest.raises(
        TypeError, match=r"activation_policy goes on a Cell class or a Cell, but got .*checkpoint_wrapper"
    ):
        activation_policy(P.MUST_SWAP)(target)


def test_attach_refuses_what_is_no_cell_and_names_the_source() -> None:
    with pytest.raises(TypeError, match=r"rule 2: a policy goes on a Cell, but got int: 3"):
        attach(3, RegionSpec(P.MUST_SWAP, source="rule 2"))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", P)
def test_the_same_object_comes_back_and_is_an_instance_of_its_class(policy: CheckpointPolicy) -> None:
    layer = Scaled()
    names = [parameter.name for parameter in layer.get_parameters()]
    text = repr(layer)
    assert activation_policy(policy)(layer) is layer
    assert isinstance(layer, Scaled)
    assert type(layer).__name__ == "Scaled"
    assert [parameter.name for parameter in layer.get_parameters()] == names
    assert repr(layer) == text
    assert layer.unwrap_cell is layer


def test_the_signature_and_docstring_of_construct_stay() -> None:
    layer = Scaled()
    before = inspect.signature(layer.construct)
    activation_policy(P.MUST_RECOMPUTE)(layer)
    assert inspect.signature(layer.construct) == before
    assert layer.construct.__doc__ == "Scale and shift."
    assert layer.construct.__qualname__ == "Scaled.construct"


def test_what_is_added_to_a_cell_begins_with_an_underscore_or_is_unwrap_cell() -> None:
    layer = Scaled()
    before = set(dir(layer))
    activation_policy(P.MUST_RECOMPUTE)(layer)
    assert {name for name in set(dir(layer)) - before if not name.startswith("_")} == {"unwrap_cell"}


def test_a_deep_copy_carries_the_policy_and_its_own_weights() -> None:
    layer = activation_policy(P.MUST_RECOMPUTE)(Layer(seed=1))
    twin = seeded(copy.deepcopy(layer), seed=7)
    assert spec_of(twin) is spec_of(layer)
    plain = Layer(seed=7)
    assert_same(gradients(twin, numbers(2, 4)), gradients(plain, numbers(2, 4)))


def test_a_second_contradicting_policy_raises_and_changes_nothing() -> None:
    layer = activation_policy(P.MUST_SAVE)(Layer())
    before = spec_of(layer)
    with pytest.raises(PolicyError, match=r"a Layer carries MUST_SAVE .*contradicts"):
        activation_policy(P.MUST_SWAP)(layer)
    assert spec_of(layer) is before


@pytest.mark.parametrize("order", [(swap_wrapper, checkpoint_wrapper), (checkpoint_wrapper, swap_wrapper)])
def test_swap_and_checkpoint_wrapper_on_one_cell_swap_its_inputs(order: tuple) -> None:
    layer = Layer()
    for wrapper in order:
        assert wrapper(layer) is layer
    spec = spec_of(layer)
    assert spec is not None
    assert (spec.policy, spec.swap_inputs) == (P.MUST_RECOMPUTE, True)


def test_a_construct_on_the_instance_is_refused() -> None:
    layer = Layer()
    object.__setattr__(layer, "construct", lambda x: x)
    with pytest.raises(PolicyError, match="construct of its own on the instance"):
        activation_policy(P.MUST_RECOMPUTE)(layer)
    assert spec_of(layer) is None


def test_must_agree_accepts_an_equal_policy() -> None:
    layer = activation_policy(P.MUST_RECOMPUTE)(Layer())
    attach(layer, RegionSpec(P.MUST_RECOMPUTE, source="rule 1", path="layers.0"), must_agree=True)
    spec = spec_of(layer)
    assert spec is not None
    assert (spec.source, spec.path) == ("decorator", "layers.0")


def test_must_agree_refuses_what_would_be_stacked() -> None:
    layer = activation_policy(P.MUST_SWAP)(Layer())
    with pytest.raises(PolicyError, match="they must agree"):
        attach(layer, RegionSpec(P.MUST_RECOMPUTE, source="rule 1"), must_agree=True)
    assert spec_of(layer) == RegionSpec(P.MUST_SWAP)


def test_restore_gives_a_plain_cell_its_class_back() -> None:
    layer = Layer()
    before = dict(layer.__dict__)
    previous = attach(layer, RegionSpec(P.MUST_SWAP))
    assert previous is None
    restore(layer, previous)
    assert type(layer) is Layer
    assert spec_of(layer) is None
    assert layer.__dict__ == before


def test_restore_gives_back_what_the_instance_carried() -> None:
    layer = activation_policy(P.MUST_SWAP)(Layer())
    carried = spec_of(layer)
    where = layer._hp_where
    previous = attach(layer, RegionSpec(P.MUST_RECOMPUTE, source="rule 1", path="layers.0"))
    assert spec_of(layer) != carried
    restore(layer, previous)
    assert spec_of(layer) is carried
    assert layer._hp_where == where


def test_restore_leaves_a_class_that_other_code_put_on_top() -> None:
    layer = Layer(seed=3)
    previous = attach(layer, RegionSpec(P.MUST_RECOMPUTE))
    layer.__class__ = type("Sharded", (type(layer),), {})
    restore(layer, previous)
    assert type(layer).__name__ == "Sharded"
    assert spec_of(layer) is None
    calls = layer.calls
    assert_same(gradients(layer, numbers(2, 4)), gradients(Layer(seed=3), numbers(2, 4)))
    assert layer.calls == calls + 1


def test_cells_of_one_class_share_one_region_class() -> None:
    first, second = (activation_policy(P.MUST_SWAP)(Layer()) for _ in range(2))
    assert type(first) is type(second)


def test_other_instances_of_the_class_stay_plain() -> None:
    activation_policy(P.MUST_RECOMPUTE)(Layer())
    assert type(Layer()) is Layer
    assert spec_of(Layer()) is None


def test_a_recomputed_cell_runs_twice_and_a_plain_call_runs_it_once() -> None:
    layer = activation_policy(P.MUST_RECOMPUTE)(Layer())
    layer(numbers(2, 4))
    assert layer.calls == 1
    gradients(layer, numbers(2, 4))
    assert layer.calls == 3


@pytest.mark.parametrize("policy", P)
def test_hooks_of_the_cell_itself_fire_once(policy: CheckpointPolicy) -> None:
    layer = activation_policy(policy)(Layer())
    fired: list[str] = []
    layer.register_forward_pre_hook(lambda cell, inputs: fired.append("before"))
    layer.register_forward_hook(lambda cell, inputs, output: fired.append("after"))
    gradients(layer, numbers(2, 4))
    assert fired == ["before", "after"]


def test_a_cell_that_calls_its_own_construct_is_one_region() -> None:
    class Again(nn.Cell):
        depth = 0

        def construct(self, x: Tensor, times: int = 2) -> Tensor:
            Again.depth += 1
            return ops.tanh(x) if times == 0 else self.construct(ops.sin(x), times - 1)

    x = numbers(2, 4)
    plain = ms.grad(Again())(x).asnumpy()
    Again.depth = 0
    got = ms.grad(activation_policy(P.MUST_RECOMPUTE)(Again()))(x).asnumpy()
    assert np.array_equal(got, plain)
    assert Again.depth == 6


def test_setting_the_same_cell_again_leaves_names_as_they_were() -> None:
    plain, net = Stack([Layer()]), Stack([activation_policy(P.MUST_SWAP)(Layer())])
    for one in (plain, net):
        one.layers[0].dense = one.layers[0].dense
    assert [p.name for p in net.get_parameters()] == [p.name for p in plain.get_parameters()]
