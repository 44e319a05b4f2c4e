"""Five Adam steps of whole nets, in every mode: losses, gradients, parameters and buffers have plain's bits."""

from collections.abc import Callable
from functools import lru_cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager
from tests.helpers import (
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    RECOMPUTE,
    SAVE,
    SWAP,
    ConvLayer,
    MlpLayer,
    Record,
    Stack,
    Transformer,
    assert_same,
    mean_square,
    numbers,
    on,
    seeded,
    train,
)


def cross_entropy(logits: Tensor) -> Tensor:
    """Written out: the value (not the gradient) of `ops.cross_entropy` differs between two plain runs on CPU."""
    labels = np.random.RandomState(3).randint(0, logits.shape[-1], logits.shape[0])
    wanted = Tensor(np.eye(logits.shape[-1], dtype=np.float32)[labels])
    return -(ops.log_softmax(logits, -1) * wanted).sum() / logits.shape[0]


def conv_net() -> nn.Cell:
    pools = [nn.MaxPool2d(3, 1, "same"), nn.AvgPool2d(3, 1, "same")]
    return Stack([ConvLayer(3, pools[i % 2]) for i in range(4)]).set_train()


PROGRAMS: dict[str, tuple[Callable[[], nn.Cell], tuple, Callable]] = {
    "mlp": (lambda: Stack([MlpLayer(6) for _ in range(4)]), (numbers(5, 6),), mean_square),
    "conv": (conv_net, (numbers(2, 3, 8, 8),), mean_square),
    "transformer": (Transformer, (Tensor(np.array([3, 1, 4, 1, 5, 9]), ms.int32),), cross_entropy),
}


def on_every_layer(policy, **options) -> Callable[[nn.Cell], None]:
    return lambda net: [on(layer, policy, **options) for layer in net.layers] and None


def mixed(net: nn.Cell) -> None:
    for layer, policy in zip(net.layers, (RECOMPUTE, SWAP, PREFER_SAVE, PREFER_RECOMPUTE), strict=False):
        on(layer, policy)


def recompute_beside_swap(net: nn.Cell) -> None:
    for index, layer in enumerate(net.layers):
        if index % 2:
            on(layer, RECOMPUTE, swap_inputs=True)
        else:
            on(layer, SWAP)


def nested(net: nn.Cell) -> None:
    policies = (
        (RECOMPUTE, SAVE, SWAP),
        (SWAP, RECOMPUTE, SWAP),
        (RECOMPUTE, SWAP, PREFER_SAVE),
        (RECOMPUTE, RECOMPUTE, SWAP),
    )
    for layer, (outer, first, second) in zip(net.layers, policies, strict=False):
        on(layer, outer)
        on(layer.first, first)
        on(layer.second, second)


def whole_net_around_layers(net: nn.Cell) -> None:
    on(net, RECOMPUTE)
    mixed(net)


MODES: dict[str, tuple[Callable[[nn.Cell], None], str, bool]] = {
    "save": (on_every_layer(SAVE), "file", False),
    "recompute": (on_every_layer(RECOMPUTE), "file", False),
    "prefer recompute": (on_every_layer(PREFER_RECOMPUTE), "file", False),
    "swap to file": (on_every_layer(SWAP), "file", True),
    "swap to host": (on_every_layer(SWAP), "host", True),
    "recompute, inputs on file": (on_every_layer(RECOMPUTE, swap_inputs=True), "file", True),
    "recompute, inputs on host": (on_every_layer(RECOMPUTE, swap_inputs=True), "host", True),
    "mixed": (mixed, "file", True),
    "recompute beside swap": (recompute_beside_swap, "file", True),
    "nested": (nested, "file", True),
    "whole net around layers": (whole_net_around_layers, "host", True),
}


@lru_cache
def plain(program: str) -> Record:
    build, inputs, loss = PROGRAMS[program]
    return train(seeded(build()), *inputs, loss=loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_bit_identical(program: str, mode: str) -> None:
    build, inputs, loss = PROGRAMS[program]
    apply, tier, swaps = MODES[mode]
    SwapManager().configure(min_bytes=0, tier=tier)
    net = seeded(build())
    apply(net)

    record = train(net, *inputs, loss=loss, wait=swaps)

    assert_same(record, plain(program))
    stats = SwapManager().stats()
    assert (stats.offloaded_bytes > 0) == swaps
    assert (stats.loaded_bytes > 0) == swaps


@pytest.mark.parametrize("mode", ["swap to file", "recompute, inputs on file", "nested"])
@pytest.mark.parametrize("program", ["mlp", "conv"])
def test_backward_may_overtake_the_copies(program: str, mode: str) -> None:
    build, inputs, loss = PROGRAMS[program]
    net = seeded(build())
    MODES[mode][0](net)

    assert_same(train(net, *inputs, loss=loss), plain(program))


def test_a_window_and_a_queue_of_one_byte_still_give_plains_numbers() -> None:
    build, inputs, loss = PROGRAMS["mlp"]
    SwapManager().configure(min_bytes=0, window=1, pending=1)
    net = seeded(build())
    on_every_layer(SWAP)(net)

    assert_same(train(net, *inputs, loss=loss, wait=True), plain("mlp"))


def test_the_convolution_net_moves_its_statistics() -> None:
    moved = [value for name, value in plain("conv").items() if name.startswith("final") and "moving_mean" in name]
    assert len(moved) == 4 and all(value.any() for value in moved)
