"""Converted settings, applied: the numbers of the plain net, with less kept; a net of one stage by global numbers."""

from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager, apply_policy
from hyper_parallel.policy_file.mindformers import convert_mindformers
from tests.exactness.conftest import everything_is_swapped as everything_is_swapped
from tests.helpers import assert_same, gradients, numbers, seeded
from tests.mindformers.decoder import IndexedCells
from tests.mindformers.held import held

WIDTH = 8
MUL, SILU = r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"


class Activation(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.silu = ops.silu

    def construct(self, x: Tensor) -> Tensor:
        return self.silu(x)


class Linear(nn.Cell):
    def __init__(self, into: int, out: int, activation: nn.Cell | None = None) -> None:
        super().__init__()
        self.dense, self.activation = nn.Dense(into, out, has_bias=False), activation

    def construct(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x if self.activation is None else self.activation(x)


class FeedForward(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = Linear(WIDTH, 4 * WIDTH, Activation()), Linear(WIDTH, 4 * WIDTH)
        self.w2, self.mul = Linear(4 * WIDTH, WIDTH), ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(self.mul(self.w1(x), self.w3(x)))


class Layer(nn.Cell):
    """Built as MindFormers' Llama layer, with less in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.attention, self.feed_forward = nn.Dense(WIDTH, WIDTH), FeedForward()

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Net(nn.Cell):
    """Some of the layers of a net, by their global numbers."""

    def __init__(self, layers: range = range(4)) -> None:
        super().__init__()
        self.layers = IndexedCells([Layer() for _ in layers])
        self.layers._cells = type(self.layers._cells)(
            (str(number), cell) for number, cell in zip(layers, self.layers._cells.values(), strict=True)
        )

    def construct(self, x: Tensor) -> Tensor:
        for cell in self.layers._cells.values():
            x = cell(x)
        return x


def net(layers: range = range(4)) -> Net:
    return seeded(Net(layers), 3)


SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {"recompute_config": {"recompute": [3]}},
    "operators": {"recompute_config": {"select_recompute": {MUL: [4], SILU: [3]}}},
    "operators and layers": {"recompute_config": {"recompute": [1], "select_recompute": True}},
    "communication": {"recompute_config": {"select_recompute": True, "select_comm_recompute": {r".*\.norm": [2]}}},
    "excluded": {"recompute_config": {"recompute": True, "select_recompute_exclude": {MUL: [2]}}},
    "shape 11": {
        "recompute_config": {"recompute": False, "select_recompute": {"feed_forward": [0, 3]}},
        "swap_config": {
            "swap": True,
            "op_swap": [
                {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]},
                {"op_name": "attention", "backward_prefetch": 10, "layers": [3]},
                {"op_name": "feed_forward", "backward_prefetch": 15, "layers": [1, 2]},
            ],
        },
    },
    "operators in swapped layers": {
        "recompute_config": {"select_recompute": {MUL: [0, 1]}},
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 1, "layers": [0]}],
            "op_swap": [{"op_name": "feed_forward", "backward_prefetch": 1, "layers": [1]}],
        },
    },
    "swapped operators": {
        "swap_config": {"swap": True, "op_swap": [{"op_name": MUL, "backward_prefetch": 1, "layers": True}]}
    },
}


@pytest.fixture(autouse=True)
def in_memory(everything_is_swapped: None) -> None:
    SwapManager().configure(min_bytes=0, tier="host")


@pytest.mark.parametrize("case", SETTINGS)
def test_the_numbers_are_those_of_the_plain_net(case: str) -> None:
    under = net()
    apply_policy(under, convert_mindformers(SETTINGS[case], layers=4).policy)
    x = numbers(4, WIDTH)
    assert_same(gradients(under, x, wait=True), gradients(net(), x))


@pytest.mark.parametrize("case", ["operators", "shape 11", "operators in swapped layers"])
def test_less_is_kept_than_by_the_plain_net(case: str) -> None:
    under = net()
    apply_policy(under, convert_mindformers(SETTINGS[case], layers=4).policy)
    x = ms.ops.add(numbers(32, WIDTH), 0.0)
    assert held(under, x)[0] < held(net(), x)[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_net_of_one_stage_has_the_global_numbers(stage: int) -> None:
    done = convert_mindformers({"recompute_config": {"recompute": [1, 2]}}, layers=4, stages=2)
    layers = done.pipeline.layers_of(stage)
    plan = apply_policy(net(range(layers[0], layers[-1] + 1)), done.policy, stage=stage)
    assert [row.path for row in plan.rows] == [["layers.0"], ["layers.2", "layers.3"]][stage]


def test_a_part_that_a_swapped_layer_recomputes_is_said_with_the_rest_on_host() -> None:
    rules = convert_mindformers(SETTINGS["operators in swapped layers"], layers=4).policy["rules"]
    assert [rule for rule in rules if "ops" in rule] == [
        {
            "cells": f"**.layers.{layers}.feed_forward",
            "policy": "must_recompute",
            "ops": {"Mul": "must_recompute", "*": "must_swap"},
        }
        for layers in ("0", "1")
    ]
