"""`NoBenefitWarning`: a region that can't lower the memory says so once, with the bytes."""

import warnings
from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    CheckpointPolicy,
    NoBenefitWarning,
    SwapManager,
    activation_policy,
    apply_policy,
    checkpoint,
    presets,
    swap_wrapper,
)
from hyper_parallel.core.activation_memory import benefit
from ms_ops.autograd import alias, saved_tensors_hooks
from tests.helpers import PREFER_RECOMPUTE, RECOMPUTE, SAVE, SWAP, Layer, Stack, numbers, on

X = numbers(2, 4)


@pytest.fixture(autouse=True)
def nothing_was_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once in a process for each region."""
    monkeypatch.setattr(benefit, "_looked_at", set())
    monkeypatch.setattr(benefit, "_warned", set())
    monkeypatch.setattr(benefit, "_swapped", set())


def said(run: Callable[[], Any]) -> list[str]:
    """The warnings while `run` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {warning.category for warning in caught} <= {NoBenefitWarning}
    return [str(warning.message) for warning in caught]


def gradient(function: Callable[[Tensor], Tensor], x: Tensor = X) -> Callable[[], Any]:
    return lambda: ms.grad(lambda x: function(x).sum())(x)


def step(net: nn.Cell, weights: Any = None, position: Any = None) -> Callable[[], Any]:
    weights = net.trainable_params() if weights is None else weights
    return lambda: ms.value_and_grad(lambda x: net(x).sum(), position, weights)(X)


# ---- a region that saves nothing


def test_a_region_that_saves_only_its_input_has_no_benefit() -> None:
    (text,) = said(gradient(lambda x: checkpoint(ops.sin, x)))
    for part in (
        "sin: no benefit from recomputing it",
        "frees 0 bytes",
        "keeps 32 bytes of inputs",
        "nothing of it but its inputs and outputs",
        "Give the policy to a larger cell",
    ):
        assert part in text


def test_a_region_that_saves_only_its_output_has_no_benefit() -> None:
    (text,) = said(gradient(lambda x: checkpoint(ops.tanh, x)))
    assert text.startswith("tanh: no benefit")


def test_a_region_that_saves_nothing_at_all_has_no_benefit() -> None:
    def twice(x: Tensor, y: Tensor) -> Tensor:
        return x * 2.0 + y

    (text,) = said(gradient(lambda x: checkpoint(twice, x, y=x * 1.0)))
    assert "twice: no benefit" in text
    assert "keeps 64 bytes of inputs" in text


def test_a_region_that_saves_its_own_results_has_a_benefit() -> None:
    assert said(gradient(lambda x: checkpoint(lambda x: ops.exp(ops.tanh(x)), x))) == []


def test_a_result_that_is_given_out_counts_as_kept() -> None:
    def block(x: Tensor) -> tuple:
        y = ops.tanh(x)
        return y, [ops.exp(y)]

    (text,) = said(lambda: ms.grad(lambda x: checkpoint(block, x)[1][0].sum())(X))
    assert "frees 0 bytes" in text


def test_a_saved_weight_is_nothing_that_a_replay_frees() -> None:
    layer = nn.Dense(4, 4, has_bias=False)
    (text,) = said(step(Stack([Layer(), on(layer, RECOMPUTE)])))
    assert "Dense: no benefit" in text
    assert "frees 0 bytes" in text


def test_a_parameter_among_the_arguments_is_no_input_that_is_kept() -> None:
    weight = ms.Parameter(numbers(2, 4, seed=1), name="w")
    (text,) = said(gradient(lambda x: checkpoint(lambda x, w: x * w, x, weight)))
    assert "keeps 32 bytes of inputs" in text


def test_swapped_inputs_of_a_region_that_saves_nothing_lower_the_memory(manager: SwapManager) -> None:
    assert said(gradient(lambda x: checkpoint(ops.sin, x * 1.0, swap_inputs=True))) == []


def test_a_nested_region_that_saves_nothing_says_nothing() -> None:
    def block(x: Tensor) -> Tensor:
        return ops.exp(ops.tanh(checkpoint(ops.sin, ops.tanh(x))))

    assert said(gradient(lambda x: checkpoint(block, x))) == []


def test_a_forward_without_gradient_says_nothing() -> None:
    assert said(lambda: checkpoint(ops.sin, X)) == []


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_policies_that_replay_nothing_say_nothing(policy: CheckpointPolicy) -> None:
    assert said(step(on(Layer(), policy))) == []


# ---- a region over the whole net


@pytest.mark.parametrize("policy", [RECOMPUTE, PREFER_RECOMPUTE])
def test_a_region_over_the_whole_net_has_no_benefit(policy: CheckpointPolicy) -> None:
    (text,) = said(step(on(Stack([Layer(), Layer(seed=1)]), policy)))
    for part in ("Stack: no benefit", "it is the whole net", "at the peak", "Give the policy to each of its blocks"):
        assert part in text


def saved_bytes(net: nn.Cell) -> int:
    """Bytes of all that autograd saves in the net."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return alias(tensor, tracked=False)

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return net(x).sum()

    ms.grad(forward, None, net.trainable_params())(X)
    return sum(sizes)


def test_the_bytes_that_come_back_at_once_are_named() -> None:
    (text,) = said(step(on(Stack([Layer(), Layer(seed=1)]), RECOMPUTE)))
    assert f"brings back all {saved_bytes(Stack([Layer(), Layer(seed=1)]))} bytes at once" in text


def test_a_function_over_the_whole_net_has_no_benefit() -> None:
    net = Stack([Layer(), Layer(seed=1)])
    found = said(lambda: ms.grad(lambda x: checkpoint(net, x).sum(), None, net.trainable_params())(X))
    assert ["the whole net" in text for text in found] == [True]


def test_blocks_of_a_net_have_a_benefit() -> None:
    net = Stack([on(Layer(seed=seed), RECOMPUTE) for seed in range(2)])
    assert said(step(net)) == []


def test_a_part_of_the_weights_that_lies_in_the_region_is_the_whole_of_what_is_trained() -> None:
    net = Stack([on(Layer(), RECOMPUTE), Layer(seed=1)])
    (text,) = said(step(net, weights=net.layers[0].trainable_params()))
    assert "Layer: no benefit" in text


def test_frozen_weights_inside_do_not_count() -> None:
    net = Stack([on(Layer(), RECOMPUTE), Layer(seed=1)])
    for parameter in net.layers[0].trainable_params():
        parameter.requires_grad = False
    assert said(step(net)) == []


def test_a_gradient_of_inputs_alone_is_of_no_net() -> None:
    net = on(Stack([Layer(), Layer(seed=1)]), RECOMPUTE)
    assert said(gradient(net)) == []


# ---- once


def test_it_is_said_once_for_each_region() -> None:
    net = on(Stack([Layer(), Layer(seed=1)]), RECOMPUTE)
    assert [len(said(step(net))) for _ in range(3)] == [1, 0, 0]


def test_it_is_said_once_for_a_function_that_saves_nothing() -> None:
    run = gradient(lambda x: checkpoint(ops.sin, x))
    assert [len(said(run)) for _ in range(3)] == [1, 0, 0]


def test_it_is_said_for_another_region() -> None:
    assert len(said(gradient(lambda x: checkpoint(ops.tanh, checkpoint(ops.sin, x))))) == 2


def test_only_the_first_call_of_a_region_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    monkeypatch.setattr(benefit, "storage_of", lambda tensor: asked.append(tensor) or 1)
    run = gradient(lambda x: checkpoint(ops.tanh, x))
    said(run)
    first = len(asked)
    said(run)
    assert first > 0
    assert len(asked) == first


def test_it_is_a_user_warning_that_can_be_turned_into_an_error() -> None:
    assert issubclass(NoBenefitWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoBenefitWarning)
        with pytest.raises(NoBenefitWarning):
            gradient(lambda x: checkpoint(ops.sin, x))()


# ---- a policy that swaps or names operators, and meets nothing


def swapped(**options: Any) -> Callable[[], Any]:
    """A step of two layers, of which the second is under a policy; the first one's output is its input."""
    net = Stack([Layer(), activation_policy(**{"policy": SWAP, **options})(Layer(seed=1))])
    return gradient(lambda x: ops.sin(net(x)) * 2)


def test_a_swapped_region_of_which_nothing_is_large_enough_says_so_once_with_the_bytes(manager: SwapManager) -> None:
    manager.configure()
    run = swapped()
    (text,) = said(lambda: (run(), run()))
    for part in (
        "Layer: no benefit from swapping it (decorator)",
        "bytes are in tensors below min_bytes",
        "Lower min_b",
    ):
        assert part in text
    assert manager.stats().offloaded_bytes == 0


def test_the_rule_of_a_policy_file_is_named(manager: SwapManager) -> None:
    manager.configure()
    net = Stack([Layer(), Layer(seed=1)])
    apply_policy(net, {"version": 1, "rules": [{"cells": "layers.1", "policy": "must_swap"}]})
    (text,) = said(gradient(net))
    assert text.startswith("layers.1: no benefit from swapping it (dict: rule 1): ")


@pytest.mark.parametrize(
    "options",
    [
        {"policy": SWAP},
        {"policy": RECOMPUTE, "swap_inputs": True},
        {"policy": None, "ops": {"Tanh": SWAP}},
    ],
    ids=str,
)
def test_what_is_swapped_says_nothing(options: dict[str, Any]) -> None:
    assert said(swapped(**options)) == []


def test_swapped_inputs_that_are_too_small_say_so(manager: SwapManager) -> None:
    manager.configure()
    (text,) = said(swapped(policy=RECOMPUTE, swap_inputs=True))
    assert "no benefit from swapping its inputs (decorator)" in text


def test_a_swapped_region_that_saves_nothing_says_so() -> None:
    (text,) = said(gradient(on(Adds(), SWAP)))
    assert "nothing of it goes to host, since there is nothing that backward needs" in text


class Adds(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_is_to_stay_on_the_device_is_counted(manager: SwapManager) -> None:
    net = Stack([Layer(), swap_wrapper(Layer(seed=1), policy_fn=lambda tensor: SAVE)])
    (text,) = said(gradient(net))
    assert "128 bytes are to stay, 64 bytes are weights" in text


def test_an_operator_that_the_region_does_not_run_is_named() -> None:
    table = {"Softmax": SWAP, "MatMul": SAVE}
    (text,) = said(swapped(policy=None, ops=table))
    for part in ("Layer: no benefit from the policy of Softmax (", "decorator", "the region runs no such operator"):
        assert part in text


@pytest.mark.parametrize(
    "options",
    [{"ops": {"Softmax": SAVE}}, {"ops": ["Softmax"], "keep_collectives": True}, presets.every_other_matmul()],
    ids=["table", "list", "preset"],
)
def test_a_table_of_which_the_region_runs_nothing_says_so(options: dict[str, Any]) -> None:
    region = activation_policy(**options)(nn.SequentialCell(nn.Tanh(), nn.Sigmoid()))
    (text,) = said(gradient(lambda x: region(ops.sin(x))))
    assert "no benefit from the policy of" in text


def test_a_table_of_which_the_region_runs_something_says_nothing() -> None:
    assert said(swapped(policy=None, **presets.selective())) == []


def test_swapped_results_that_are_too_small_say_so(manager: SwapManager) -> None:
    manager.configure()
    (text,) = said(swapped(policy=None, ops={"Tanh": SWAP}))
    assert "no benefit from swapping results of Tanh (decorator)" in text
