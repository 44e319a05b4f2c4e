"""A PyNative policy that a compiled graph would ignore stops the compilation."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, activation_policy
from hyper_parallel.core.activation_memory.attach import attach, restore
from hyper_parallel.core.activation_memory.spec import RegionSpec
from ms_ops.graph import compiling, probe, refuse_in_graph

X = Tensor(np.random.RandomState(0).randn(2, 4).astype(np.float32))


class Inner(nn.Cell):
    """One operator."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class Outer(nn.Cell):
    """A cell in a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def compiled(net: nn.Cell) -> Tensor:
    @ms.jit
    def run(x: Tensor) -> Tensor:
        return net(x)

    return run(X)


def test_python_is_no_compiler() -> None:
    assert compiling(probe) is False
    assert probe() == 0


def test_a_refusal_names_where_and_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"layers\.2 is under a PyNative policy.*plan\.remove\(\)"):
        refuse_in_graph("layers.2")


@pytest.mark.parametrize("policy", CheckpointPolicy)
def test_compiling_a_cell_under_a_policy_raises_and_names_it(policy: CheckpointPolicy) -> None:
    net = Outer()
    attach(net.inner, RegionSpec(policy, source="rule 3", path="inner"))
    with pytest.raises(RuntimeError, match=rf"inner \({policy.name}, rule 3\) is under a PyNative policy"):
        compiled(net)


def test_compiling_an_instance_of_a_decorated_class_raises() -> None:
    class Mine(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(x)

    activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(Mine)
    with pytest.raises(RuntimeError, match=r"a Mine \(MUST_RECOMPUTE, decorator on its class\)"):
        compiled(Mine())


def test_a_cell_whose_policy_was_taken_off_compiles() -> None:
    net = Outer()
    previous = attach(net.inner, RegionSpec(CheckpointPolicy.MUST_SWAP))
    restore(net.inner, previous)
    np.testing.assert_allclose(compiled(net).asnumpy(), np.tanh(X.asnumpy()) * 2, rtol=1e-5)


def test_the_same_cell_runs_outside_of_a_graph() -> None:
    net = activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(Outer())
    np.testing.assert_allclose(net(X).asnumpy(), np.tanh(X.asnumpy()) * 2, rtol=1e-5)
