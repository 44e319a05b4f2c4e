"""Policies with the names that users know, as keyword arguments of `activation_policy`: combine them with `**`.

``activation_policy(**selective(), **inputs_on_host())(block)`` replays a block but for its matrix products, and keeps
its inputs on host meanwhile.
"""

from typing import Any

from hyper_parallel.core.activation_memory.operator_policy import Alternating
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy

_HEADS_RANK = 4
"""Dimensions of what core attention computes with: batch, heads, length, length or width."""


def full() -> dict[str, Any]:
    """Replay everything but random operators.

    Returns:
        Keyword arguments of `activation_policy`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import activation_policy, presets
        >>> block = activation_policy(**presets.full())(nn.Dense(4, 4))
    """
    return {"policy": CheckpointPolicy.MUST_RECOMPUTE}


def selective() -> dict[str, Any]:
    """Keep the results of matrix products, convolutions and fused attention, and replay the rest.

    What is replayed is cheap, so that nearly all of recomputation's cost is gone; the idea is that of Korthikanti et
    al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    Returns:
        Keyword arguments of `activation_policy`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import activation_policy, presets
        >>> block = activation_policy(**presets.selective())(nn.Dense(4, 4))
    """
    kept = ("MatMul", "Conv", "Attention")
    return {"ops": {**dict.fromkeys(kept, CheckpointPolicy.MUST_SAVE), "*": CheckpointPolicy.PREFER_RECOMPUTE}}


def every_other_matmul() -> dict[str, Any]:
    """Keep the result of every second matrix product of a call, from the first on, and replay the rest.

    Returns:
        Keyword arguments of `activation_policy`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import activation_policy, presets
        >>> mlp = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4))
        >>> mlp = activation_policy(**presets.every_other_matmul())(mlp)
    """
    return {"ops": Alternating("MatMul", "every_other_matmul")}


def attention_only() -> dict[str, Any]:
    """Replay core attention, the part that grows with the square of the length, and keep everything else.

    Core attention is what gives results with four dimensions: batch, heads, length, and length or width. Fused
    attention keeps little, and is kept.

    Returns:
        Keyword arguments of `activation_policy`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import activation_policy, presets
        >>> attention = activation_policy(**presets.attention_only())(nn.Dense(4, 4))
    """
    return {"policy_fn": _replays_attention}


def inputs_on_host() -> dict[str, Any]:
    """Keep the inputs of the replayed region on host.

    Returns:
        Keyword arguments of `activation_policy`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import activation_policy, presets
        >>> block = activation_policy(**presets.inputs_on_host())(nn.Dense(4, 4))
    """
    return {"swap_inputs": True}


def _replays_attention(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
    is_attention = any(len(shape) == _HEADS_RANK for shape, _ in op.outputs) and op.name != "Attention"
    return CheckpointPolicy.PREFER_RECOMPUTE if is_attention or op.is_view else CheckpointPolicy.PREFER_SAVE
