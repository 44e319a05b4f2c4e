"""The demo's modes: what each of them says about the activations of the net."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path

import yaml
from mindspore import nn

from hyper_parallel import CheckpointPolicy, activation_policy, apply_policy

PLAIN = "plain"
"""The mode that the others are compared with."""


def plain(net: nn.Cell) -> None:
    """Leave everything to MindSpore: what backward needs stays on the device.

    Args:
        net: The net.
    """


def recompute(net: nn.Cell) -> None:
    """Keep a block's input only, and replay the block in backward.

    Args:
        net: A net with its blocks in `layers`.
    """
    for layer in net.layers:
        activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(layer)


def swap(net: nn.Cell) -> None:
    """Keep what backward needs on host; nothing is replayed.

    Args:
        net: A net with its blocks in `layers`.
    """
    for layer in net.layers:
        activation_policy(CheckpointPolicy.MUST_SWAP)(layer)


def recompute_swap_inputs(net: nn.Cell) -> None:
    """Keep a block's input on host, and replay the block in backward.

    Args:
        net: A net with its blocks in `layers`.
    """
    for layer in net.layers:
        activation_policy(CheckpointPolicy.MUST_RECOMPUTE, swap_inputs=True)(layer)


def mixed(net: nn.Cell) -> None:
    """Apply the policy file that comes with the demo.

    Args:
        net: The demo's net.
    """
    text = resources.files("hyper_parallel.demo").joinpath("mixed.yaml").read_text("utf-8")
    apply_policy(net, yaml.safe_load(text))


MODES: dict[str, Callable[[nn.Cell], None]] = {
    PLAIN: plain,
    "recompute": recompute,
    "swap": swap,
    "recompute_swap_inputs": recompute_swap_inputs,
    "mixed": mixed,
}


def apply_mode(net: nn.Cell, mode: str, policy: Path | None = None) -> None:
    """Put a net under a mode.

    Args:
        net: The demo's net.
        mode: A name from `MODES`; any name if `policy` is given.
        policy: A policy file to apply instead.

    Raises:
        PolicyError: The policy file doesn't fit the net.
    """
    if policy is None:
        MODES[mode](net)
    else:
        apply_policy(net, policy)
