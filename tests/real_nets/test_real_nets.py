"""A training step of nets that nobody here wrote: under a policy on every block it gives plain's bits."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from hyper_parallel import SwapManager, is_recomputing
from tests.helpers import RECOMPUTE, SWAP, Record, assert_same, flat, gradients, mean_square, numbers, on, state_of
from tests.real_nets.nets import MODELS, blocks_of, built

Apply = Callable[[list[nn.Cell]], Any]
"""Puts policies on the blocks of a net."""

every_model = pytest.mark.parametrize(
    # one worker has all tests of a model, so that its plain step is taken once
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS],
)


def step(name: str, apply: Apply, wait: bool = False) -> Record:
    """Loss and gradients of a step in train mode, and all that it leaves behind: buffers, generators, next masks.

    How far each random layer has drawn is seen by the forward after it, which takes no gradient and updates the moving
    statistics, too.
    """
    net = built(name)
    apply(blocks_of(net, name))
    x = numbers(2, 3, MODELS[name].size, MODELS[name].size)
    record = gradients(net, x, wait=wait)
    record.update({f"{path} after the step": value for path, value in state_of(net).items()})
    record.update(flat(mean_square(net(x)), "loss of the next forward"))
    record.update({f"{path} after the next forward": value for path, value in state_of(net).items()})
    record["MindSpore's generator"] = ms.get_rng_state().asnumpy().copy()
    record["MindSpore's next numbers"] = ops.standard_normal((3,)).asnumpy().copy()
    record["numpy's next numbers"] = np.random.random(3)
    return record


@lru_cache
def plain(name: str) -> Record:
    return step(name, lambda blocks: None)


def recompute(blocks: list[nn.Cell]) -> None:
    for block in blocks:
        on(block, RECOMPUTE)


def swap_beside_recompute(blocks: list[nn.Cell]) -> None:
    for index, block in enumerate(blocks):
        if index % 2:
            on(block, RECOMPUTE, swap_inputs=True)
        else:
            on(block, SWAP)


@every_model
def test_two_plain_steps_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no comparison with plain would mean anything."""
    draws: Counter[int] = Counter()
    construct = nn.Dropout.construct

    def counted(self: nn.Dropout, x: ms.Tensor) -> ms.Tensor:
        draws[id(self)] += self.p > 0
        return construct(self, x)

    first = plain(name)
    monkeypatch.setattr(nn.Dropout, "construct", counted)
    record = step(name, lambda blocks: None)

    assert_same(record, first)
    assert max(draws.values(), default=0) <= 5, "see the note [Equal masks]"
    assert all(np.isfinite(value).all() for value in record.values())
    assert record["value and gradients[1][0]"].any()  # of the input: it comes through every block


@every_model
def test_one_replay_of_every_block_gives_plains_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    replays: list[int] = []

    def noting(construct: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(construct)
        def noted(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
            if is_recomputing():
                replays.append(id(self))
            return construct(self, *args, **kwargs)

        return noted

    def apply(found: list[nn.Cell]) -> None:
        blocks.extend(map(id, found))
        recompute(found)

    for kind in MODELS[name].blocks:
        monkeypatch.setattr(kind, "construct", noting(kind.construct))

    assert_same(step(name, apply), plain(name))
    assert sorted(replays) == sorted(blocks)


@every_model
def test_swap_beside_recompute_with_swapped_inputs_gives_plains_bits(name: str) -> None:
    assert_same(step(name, swap_beside_recompute, wait=True), plain(name))
    assert SwapManager().stats().offloaded_bytes > 0


@pytest.mark.parametrize("name", ["ResNet", "ViT"])
def test_the_comparison_sees_statistics_updated_twice_and_masks_drawn_again(name: str) -> None:
    """What MindSpore's own recompute does: to the buffers of the one model, to the gradients of the other."""

    def native(blocks: list[nn.Cell]) -> None:
        for block in blocks:
            block.recompute(use_reentrant=False, early_stop=False)

    with pytest.raises(AssertionError, match="differs from plain"):
        assert_same(step(name, native), plain(name))
