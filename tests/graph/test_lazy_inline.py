"""Cells under lazy_inline: what MindSpore's front end computes again there; its back end compiles them only on Ascend.

MindSpore gives a recomputed one a second graph with the copies, and tells in another way which these are.
"""

from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, lazy_inline, nn
from mindspore.ops import operations

from hyper_parallel import apply_policy, verify_policy
from tests.graph.nets import Net, of
from tests.helpers import numbers, seeded


class Late(nn.Cell):
    """Three products around two activations."""

    @lazy_inline
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)
        self.tanh, self.sigmoid = operations.Tanh(), operations.Sigmoid()

    def construct(self, x: Tensor) -> Tensor:
        return self.third(self.sigmoid(self.second(self.tanh(self.first(x)))))


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "full": ({"policy": "must_recompute"}, {"MatMul": 2, "BiasAdd": 2, "Tanh": 1, "Sigmoid": 1}),
    "selective": ({"preset": "selective"}, {"BiasAdd": 2, "Tanh": 1, "Sigmoid": 1}),
    # Nothing reads the result of the product before it.
    "an operator is kept": ({"ops": {"Tanh": "must_save"}}, {"MatMul": 1, "BiasAdd": 1, "Sigmoid": 1}),
    "an operator is recomputed": ({"ops": {"Tanh": "must_recompute", "*": "must_save"}}, {"Tanh": 1}),
    "a cell is kept": (
        {"policy": "must_recompute", "exclude": "second"},
        {"MatMul": 1, "BiasAdd": 1, "Tanh": 1, "Sigmoid": 1},
    ),
}


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("name", CASES)
def test_each_block_computes_again_what_its_policy_says(name: str) -> None:
    rule, expected = CASES[name]
    net = seeded(Net(Late(), Late()))
    apply_policy(net, of({"cells": "blocks.*", **rule}))
    report = verify_policy(net, numbers(2, 4))
    assert report.honoured
    blocks = [row for row in report.rows if row.plan.class_name == "Late"]
    assert [row.verdict for row in blocks] == ["honoured", "honoured"]
    assert [row.recomputed for row in blocks] == [expected, expected]


@pytest.mark.usefixtures("graph_mode")
def test_a_block_beside_one_that_is_recomputed_computes_nothing_again() -> None:
    net = seeded(Net(Late(), Late()))
    apply_policy(net, of({"cells": "blocks.0", "policy": "must_recompute"}))
    report = verify_policy(net, numbers(2, 4))
    assert report.honoured
    assert report.recomputed == CASES["full"][1]
    assert report.gates == 1


def test_nets_train_in_pynative_mode_after_one_under_lazy_inline_was_verified(graph_mode: None) -> None:
    net = Net(Late())
    apply_policy(net, of({"cells": "blocks.*", "policy": "must_recompute"}), mode="graph")
    verify_policy(net, numbers(2, 4))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    other = nn.WithLossCell(nn.Dense(4, 4), nn.MSELoss())
    step = nn.TrainOneStepCell(other, nn.Adam(other.trainable_params()))  # the optimizer is compiled
    assert step(numbers(2, 4), numbers(2, 4)) > 0
