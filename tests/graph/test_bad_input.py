"""What graph mode can't do is an error that says what works instead, and leaves the net as it was."""

from typing import Any

import mindspore as ms
import pytest
from mindspore import nn

from hyper_parallel import (
    CheckpointPolicy,
    PolicyError,
    activation_policy,
    apply_policy,
    checkpoint_wrapper,
    load_policy,
    swap_wrapper,
    verify_policy,
)
from ms_ops.graph_flags import own_primitives
from tests.graph.nets import RECOMPUTE, TOKENS, jit_step, mlp, of, transformer
from tests.helpers import numbers

X = numbers(2, 4)


def flags(net: nn.Cell) -> list[Any]:
    return [
        (path, type(cell), cell.get_scope(), dict(getattr(cell, "_func_graph_flags", {})))
        for path, cell in net.cells_and_names()
    ] + [dict(each.attrs) for _, cell in net.cells_and_names() for each in own_primitives(cell)]


RULES: dict[str, tuple[Any, str]] = {
    "a policy function": (
        {"cells": "layers.*", "preset": "attention_only"},
        r"layers\.0, layers\.1 \(rule 2\): preset attention_only is asked operator by operator .* \(ops: \{MatMul: ",
    ),
    "every second operator": (
        {"cells": "layers.*", "preset": "every_other_matmul"},
        "preset every_other_matmul is asked operator by operator while Python runs, which a compiled graph doesn't",
    ),
    "swapped inputs": (
        {"cells": "layers.*", "policy": "must_recompute", "swap_inputs": True},
        r"swap_inputs isn't available in graph mode: the inputs of a region stay on the device; leave it out",
    ),
    "a policy per tensor": (
        {"cells": "layers.*", "policy": "must_recompute", "swap_inputs": True, "tensors": {"dtype": "float16"}},
        "a policy per tensor isn't available in graph mode",
    ),
    "swap": (
        {"cells": "layers.*", "policy": "must_swap"},
        r"must_swap isn't honoured here: MindSpore swaps only on Ascend, .* \(swap: \{when_exhausted: \[rec",
    ),
    "a swapped operator": (
        {"cells": "layers.*", "ops": {"MatMul": "must_swap"}},
        "an operator in a recomputed region can't be must_swap: MindSpore recomputes it instead; use must_save",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_graph_mode_cannot_honour(name: str) -> None:
    rule, expected = RULES[name]
    net = transformer()
    before = flags(net)
    with pytest.raises(PolicyError, match=expected):
        apply_policy(net, of({"cells": "layers.1", "policy": "must_recompute"}, rule), mode="graph")
    assert flags(net) == before
    assert apply_policy(net, of({"cells": "layers.1", "policy": "must_recompute"}), mode="graph").applied


def test_a_policy_function_of_a_decorator() -> None:
    net = transformer()
    activation_policy(policy_fn=lambda ctx, op, *args: CheckpointPolicy.PREFER_SAVE)(net.layers[0])
    with pytest.raises(PolicyError, match=r"layers\.0 \(decorator\): policy_fn is asked op"):
        apply_policy(net, {"version": 1}, mode="graph")


def test_a_context_fn() -> None:
    net = transformer()
    checkpoint_wrapper(net.layers[0], context_fn=lambda: (None, None))
    with pytest.raises(PolicyError, match="context_fn is never called in a compiled graph; name the operators instead"):
        apply_policy(net, {"version": 1}, mode="graph")


def test_a_policy_per_tensor_of_swap_wrapper() -> None:
    net = transformer()
    swap_wrapper(net.layers[0], policy_fn=lambda tensor: CheckpointPolicy.MUST_SWAP)
    with pytest.raises(PolicyError, match="a policy per tensor isn't available in graph mode"):
        apply_policy(net, {"version": 1}, mode="graph")


def test_swap_takes_the_rung_that_the_file_has() -> None:
    rule = {"cells": "blocks.*", "policy": "must_swap"}
    net = mlp()
    plan = apply_policy(net, of(rule, swap={"when_exhausted": ["recompute"]}), mode="graph")
    assert "blocks.0, blocks.1: must_swap can't be honoured in this graph, so they recompute" in plan.notes
    assert net.blocks[0].get_scope() == "recompute_blocks.0"
    report = verify_policy(net, X)
    assert report.honoured and report.recomputed["Tanh"] == 2


def test_what_has_no_effect_is_told() -> None:
    rule = {
        "cells": "layers.*",
        "policy": "must_recompute",
        "determinism_check": "values",
        "allow_cache_entry_mutation": True,
    }
    notes = apply_policy(transformer(), of(rule, swap={"window": "1MiB"}), mode="graph").notes
    assert "layers.0, layers.1: determinism_check has no effect in graph mode" in notes
    assert "layers.0, layers.1: allow_cache_entry_mutation has no effect in graph mode" in notes
    assert "swap: window has no effect in graph mode" in notes


def test_flags_of_graphs_have_no_effect_in_pynative_mode() -> None:
    rule = {"cells": "layers.0", "policy": "must_recompute", "graph": {"mp_comm_recompute": False}}
    assert "graph has no effect in PyNative mode: layers.0" in apply_policy(transformer(), of(rule)).notes


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({}, r"rule 1, graph: got \{\}, expected one or more of mp_comm_recompute, recompute_comm_op"),
        ({"mp_com_recompute": True}, "unknown key .*; did you mean 'mp_comm_recompute'"),
        ({"parallel_optimizer_comm_recompute": True}, "unknown key .*; known are mp_comm_recompute|did you mean"),
        ({"mp_comm_recompute": "x"}, "rule 1, graph, mp_comm_recompute: got 'x', expected true or false"),
        ({"backward_prefetch": -1}, "rule 1, graph, backward_prefetch: got -1, expected a whole number of operators"),
        ({"backward_prefetch": 2}, "backward_prefetch is for must_swap, but the policy is must_recompute"),
        ({"backward_prefetch": 2, "mp_comm_recompute": True}, "backward_prefetch is for must_swap, but the policy is"),
    ],
)
def test_flags_that_are_wrong(graph: Any, expected: str) -> None:
    with pytest.raises(PolicyError, match=expected):
        load_policy(of({"cells": "layers.*", "policy": "must_recompute", "graph": graph}))


def test_communication_flags_need_a_recomputed_cell() -> None:
    with pytest.raises(PolicyError, match="so there is no communication to recompute"):
        load_policy(of({"cells": "layers.*", "policy": "must_save", "graph": {"mp_comm_recompute": True}}))


def test_a_contradiction_that_is_in_flags_alone_names_them() -> None:
    net = transformer()
    activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(net.layers[0])
    rule = {"cells": "layers.0", "policy": "must_recompute", "graph": {"mp_comm_recompute": False}}
    with pytest.raises(PolicyError, match="must_recompute and graph: mp_comm_recompute false for layers"):
        apply_policy(net, of(rule), mode="graph")


def test_communication_flags_become_attributes() -> None:
    given = {"mp_comm_recompute": False, "recompute_slice_activation": True}
    net = transformer()
    plan = apply_policy(net, of({"cells": "layers.0", "policy": "must_recompute", "graph": given}), mode="graph")
    inside, outside = net.layers[0].qkv.matmul.attrs, net.layers[1].qkv.matmul.attrs
    assert (inside["recompute_comm_op"], inside["slice_activation"]) == (False, True)
    assert "recompute_comm_op" not in outside
    plan.remove()
    own = {"cells": "layers.0.qkv", "policy": "must_recompute", "graph": {"recompute_comm_op": True}}
    apply_policy(net, of(own), mode="graph")
    assert net.layers[0].qkv.matmul.attrs["recompute_comm_op"] is True
    assert "recompute_comm_op" not in net.layers[0].up.matmul.attrs


class TestVerify:
    @pytest.mark.parametrize("level", ["O3", "o1", ""])
    def test_an_unknown_jit_level(self, level: str) -> None:
        with pytest.raises(PolicyError, match=f"jit_level: got '{level}', expected O0 or O1"):
            verify_policy(transformer(), TOKENS, jit_level=level)

    def test_a_net_without_a_plan(self) -> None:
        with pytest.raises(PolicyError, match=r"Transformer is under no plan; call apply_policy\(net, \.\.\., mode="):
            verify_policy(transformer(), TOKENS)

    def test_a_net_under_a_pynative_plan(self) -> None:
        net = transformer()
        apply_policy(net, of({"cells": "layers.*", "policy": "must_recompute"}))
        with pytest.raises(PolicyError, match=r"is applied in PyNative mode, where nothing is compiled; plan"):
            verify_policy(net, TOKENS)

    @pytest.mark.parametrize("target", [lambda x: x, 3, transformer], ids=["a function", "a number", "a factory"])
    def test_what_is_no_cell_and_not_under_jit(self, target: Any) -> None:
        with pytest.raises(TypeError, match=r"verify_policy takes a Cell or a function under ms\.jit, but got"):
            verify_policy(target, TOKENS)

    @pytest.mark.parametrize("mode", ["bytecode", "trace"])
    def test_a_function_that_is_captured_in_another_way(self, mode: str) -> None:
        net = transformer(1)
        apply_policy(net, of({"cells": "layers.*", "policy": "must_recompute"}), mode="graph")
        with pytest.raises(PolicyError, match=rf"step is under ms\.jit\(capture_mode='{mode}'\), whose"):
            verify_policy(jit_step(net, capture_mode=mode), TOKENS)

    def test_what_takes_no_gradient(self, either_mode: str) -> None:
        net = mlp(1)
        apply_policy(net, RECOMPUTE, mode="graph")
        around = nn.SequentialCell(net)
        with pytest.raises(PolicyError, match=r"takes no gradient, and without one nothing is computed again; give th"):
            verify_policy(around if either_mode == "GRAPH_MODE" else ms.jit(around), X)

    def test_a_step_of_several_nets_needs_the_plan(self) -> None:
        one, other = mlp(1), mlp(1)
        other.update_parameters_name("other.")  # one graph takes each name once
        first = apply_policy(one, RECOMPUTE, mode="graph")
        apply_policy(other, RECOMPUTE, mode="graph")
        gradient, second = ms.value_and_grad(one, None, one.trainable_params()), other

        @ms.jit
        def step(x: ms.Tensor) -> Any:
            return gradient(x), second(x)

        with pytest.raises(PolicyError, match=r"several plans are applied \(dict, dict\); say which one: plan=\.\.\."):
            verify_policy(step, X)
        assert verify_policy(step, X, plan=first).honoured
        assert verify_policy(jit_step(one), X).net == "Net"
