"""`keep_on_device` and `swap_tensor_wrapper`: single tensors that swapped regions leave alone, or take in any case."""

from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory import marks
from hyper_parallel.core.activation_memory.scopes import current, open_scopes
from hyper_parallel.core.activation_memory.swap_group import SwapScope
from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.core.errors import PolicyError
from ms_ops.autograd import alias, recording


def keep_on_device(target: Any) -> Any:
    """Leave tensors on the device: no region swaps them, nor anything that lies in their storage.

    For what other code holds anyway (a mask, a table that every layer reads), or what is needed again at once. The mark
    lasts as long as the tensor; one that is made inside a region is kept for this call of the region.

    Args:
        target: A tensor, or a nested structure of tuples, lists, dicts and dataclasses with tensors in it.

    Returns:
        `target` itself.

    Raises:
        TypeError: There is no tensor in `target`.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from hyper_parallel import keep_on_device
        >>> mask = keep_on_device(ms.Tensor([[0.0, -1e9], [0.0, 0.0]]))
    """
    tensors = _tensors_in(target, "keep_on_device")
    for tensor in tensors:
        marks.mark(tensor)
        for scope in open_scopes():
            scope.leave_alone(tensor)
    return target


def swap_tensor_wrapper(target: Any, tag: str | None = None, group_swap: bool = False) -> Any:
    """Have the swapped region that runs now take these tensors to host, whatever its tensor policy says of them.

    With ``swap_wrapper(cell, policy_fn=lambda tensor: CheckpointPolicy.MUST_SAVE)`` these are the only ones that go.
    Small tensors (below the setting `min_bytes`) and parameters stay, as always. Without a gradient nothing is saved,
    and nothing happens.

    Args:
        target: A tensor, or a nested structure of tuples, lists, dicts and dataclasses with tensors in it.
        tag: Accepted for compatibility: a name for the reader of the code.
        group_swap: Accepted for compatibility: what is swapped always travels in groups.

    Returns:
        `target` itself.

    Raises:
        TypeError: There is no tensor in `target`, or `tag` is no string.
        PolicyError: No swapped region is open here, so that nothing would take the tensors to host.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import ops
        >>> from hyper_parallel import CheckpointPolicy, swap, swap_tensor_wrapper
        >>> def body(x):
        ...     return ops.tanh(swap_tensor_wrapper(ops.exp(x)))
        >>> keeps = lambda tensor: CheckpointPolicy.MUST_SAVE
        >>> ms.grad(lambda x: swap(body, x, policy_fn=keeps).sum())(ms.Tensor([0.0])).asnumpy().round(4)
        array([0.42], dtype=float32)
    """
    tensors = _tensors_in(target, "swap_tensor_wrapper")
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"swap_tensor_wrapper: tag must be a string, but got {tag!r}")
    if not recording():
        return target
    scope = current()
    if not isinstance(scope, SwapScope):
        if scope.replays:
            return target  # it has been registered in the forward, or has raised there
        inside = "a replayed region, which keeps nothing of its inside" if scope.records else "no swapped region"
        raise PolicyError(
            f"swap_tensor_wrapper registers tensors with the swapped region that runs, but the code here runs in "
            f"{inside}; call it inside a cell or function under MUST_SWAP (swap_wrapper, swap)"
        )
    scope.group.registered.extend(alias(tensor, tracked=False) for tensor in tensors)
    return target


def _tensors_in(target: Any, who: str) -> list[Tensor]:
    tensors = [leaf for leaf in leaves(target) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(f"{who} takes a tensor, or a structure with tensors in it, but got {target!r}")
    return tensors
