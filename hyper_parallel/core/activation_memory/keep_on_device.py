"""`keep_on_device`: tensors that no swapped region takes to host."""

from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory import marks
from hyper_parallel.core.activation_memory.scopes import open_scopes
from hyper_parallel.core.activation_memory.swap_group import SwapScope
from hyper_parallel.core.activation_memory.trees import leaves
from ms_ops.autograd import alias


def keep_on_device(target: Any) -> Any:
    """Leave tensors on the device: no region swaps them, nor anything that lies in their storage.

    For what other code holds anyway (a mask, a table that every layer reads), or what is needed again at once. The mark
    lasts as long as the tensor; one that is made inside a swapped region is kept for this call of the region.

    Args:
        target: A tensor, or a nested structure of tuples, lists, dicts and dataclasses with tensors in it.

    Returns:
        `target` itself.

    Raises:
        TypeError: There is no tensor in `target`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from hyper_parallel import keep_on_device
        >>> mask = keep_on_device(ms.Tensor([[0.0, -1e9], [0.0, 0.0]]))
    """
    tensors = [leaf for leaf in leaves(target) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(f"keep_on_device takes a tensor, or a structure with tensors in it, but got {target!r}")
    groups = [scope.group for scope in open_scopes() if isinstance(scope, SwapScope)]
    for tensor in tensors:
        marks.mark(tensor)
        for group in groups:
            group.left_alone.append(alias(tensor, tracked=False))
    return target
