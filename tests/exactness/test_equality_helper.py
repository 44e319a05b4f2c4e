"""The helper that every other test relies on sees what it must see."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager
from ms_ops.host import HostTier, Slot
from tests.exactness import grammar
from tests.helpers import (
    RECOMPUTE,
    SWAP,
    Layer,
    Record,
    Stack,
    assert_nothing_live,
    assert_same,
    gradients,
    numbers,
    on,
    seeded,
    settled,
    train,
)


def batch_norm_net() -> nn.Cell:
    return seeded(Stack([Layer(), nn.BatchNorm1d(4), Layer()])).set_train()


def wrong_unpack(cell: nn.Cell) -> nn.Cell:
    """Saved tensors come back with another last bit."""

    def unpack(array: np.ndarray) -> Tensor:
        return Tensor(np.nextafter(array, np.float32(np.inf)) if array.dtype == np.float32 else array)

    return replaced(cell, lambda plain, x: hooked(plain, x, unpack))


def right_unpack(cell: nn.Cell) -> nn.Cell:
    """No fault: saved tensors come back as they were."""
    return replaced(cell, lambda plain, x: hooked(plain, x, Tensor))


def dropped_gradient(cell: nn.Cell) -> nn.Cell:
    """The output is right, and no gradient goes on to what came before."""
    return replaced(cell, lambda plain, x: plain(ops.stop_gradient(x)))


def doubled_update(cell: nn.Cell) -> nn.Cell:
    """Moving statistics, counters and generators move twice; output and gradient are right."""
    return replaced(cell, lambda plain, x: (plain(x), plain(x))[0])


def hooked(plain: Callable, x: Tensor, unpack: Callable[[np.ndarray], Tensor]) -> Tensor:
    with ms.saved_tensors_hooks(lambda t: t.asnumpy().copy(), unpack):
        return plain(x)


def replaced(cell: nn.Cell, construct: Callable) -> nn.Cell:
    plain = cell.construct
    cell.construct = lambda x: construct(plain, x)
    return cell


@pytest.mark.parametrize("fault", [wrong_unpack, dropped_gradient, doubled_update])
def test_training_with_a_fault_in_batch_norm_is_not_the_same(fault: Callable[[nn.Cell], nn.Cell]) -> None:
    plain = train(batch_norm_net(), numbers(3, 4), steps=2)
    net = batch_norm_net()
    fault(net.layers[1])

    with pytest.raises(AssertionError, match="differs from plain"):
        assert_same(train(net, numbers(3, 4), steps=2), plain)


def test_training_through_hooks_without_a_fault_is_the_same() -> None:
    net = batch_norm_net()
    right_unpack(net.layers[1])

    assert_same(train(net, numbers(3, 4), steps=2), train(batch_norm_net(), numbers(3, 4), steps=2))


@pytest.mark.parametrize(
    ("fault", "kind", "where"),
    [
        (wrong_unpack, "batch norm", "loss and gradients"),
        (dropped_gradient, "batch norm", "loss and gradients"),
        (doubled_update, "batch norm", "moving_mean"),
        (doubled_update, "counter Parameter", "count"),
        (doubled_update, "registered counter", "calls"),
        (doubled_update, "numpy's and Python's noise", "numpy's generator"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_random_net_with_a_fault_is_not_the_same(
    fault: Callable[[nn.Cell], nn.Cell], kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar.ON_CELL, "recompute", fault)
    program = grammar.Program(
        grammar.Layer("sequence", grammar.Layer("dense"), grammar.Layer(kind, policy="recompute"))
    )

    with pytest.raises(AssertionError, match=where):
        assert_same(grammar.run(program, plain=False), grammar.run(program, plain=True))


@pytest.mark.parametrize("options", [{"policy": SWAP}, {"policy": RECOMPUTE, "swap_inputs": True}], ids=str)
def test_one_wrong_bit_in_what_comes_back_from_host_is_seen(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in gradients: what a step computes forward, and the weights that it begins with, are right."""
    SwapManager().configure(min_bytes=0, tier="host")
    read = HostTier.read

    def wrong(tier: HostTier, slot: Slot, array: np.ndarray) -> None:
        read(tier, slot, array)
        array[0] ^= 1

    def run(policy: dict[str, Any]) -> Record:
        return gradients(Stack([on(Layer(seed=seed), **policy) for seed in range(3)]), numbers(3, 4), wait=True)

    plain = run({"policy": None})
    assert_same(run(options), plain)
    monkeypatch.setattr(HostTier, "read", wrong)
    found = run(options)
    with pytest.raises(AssertionError, match=r"value and gradients\[1\].* differs from plain"):
        assert_same(found, plain)
    assert found["value and gradients[0]"].tobytes() == plain["value and gradients[0]"].tobytes()


def test_what_is_still_swapped_is_seen() -> None:
    net = on(Layer(), SWAP)
    output, pull = ms.vjp(net, numbers(3, 4))
    settled(output)
    with pytest.raises(AssertionError, match="still live"):
        assert_nothing_live()
    pull(output)
    del pull
    assert_nothing_live()


def test_two_plain_runs_are_the_same() -> None:
    assert_same(*(train(batch_norm_net(), numbers(3, 4), steps=2, position=0) for _ in range(2)))


ONE: Record = {"a": np.array([1.0, 0.0], np.float32)}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"b": ONE["a"]},
        {**ONE, "b": ONE["a"]},
        {"a": ONE["a"].astype(np.float64)},
        {"a": ONE["a"][None]},
        {"a": np.array([1.0, -0.0], np.float32)},
        {"a": np.nextafter(ONE["a"], 2)},
    ],
    ids=["nothing", "another name", "one more", "dtype", "shape", "sign of zero", "last bit"],
)
def test_records_that_differ_are_told_apart(other: Record) -> None:
    with pytest.raises(AssertionError):
        assert_same(ONE, other)


def test_the_same_record_is_the_same() -> None:
    assert_same(ONE, {"a": ONE["a"].copy()})


def test_gradients_include_every_bias_and_the_input() -> None:
    record = gradients(Layer(), numbers(3, 4))
    assert len(record) == 4 and all(value.any() for value in record.values())
