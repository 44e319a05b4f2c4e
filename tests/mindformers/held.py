"""What waits for backward on the device."""

import gc
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from ms_ops.autograd import wait_for_operators
from ms_ops.tensors import storage_of
from tests.helpers import Record, flat, mean_square, settled


def held(net: nn.Cell, *inputs: Any) -> tuple[int, Record]:
    """Bytes of the storages that live between forward and backward, but not before: all that autograd keeps.

    MindSpore keeps tensors where Python can't see them; hooks around the whole step have it keep Python objects.

    Returns:
        The bytes; loss and gradients of the step.
    """
    net(*inputs)  # weights have their storage from now on
    found: list[int] = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = ms.ops.stop_gradient(tensor)

    def forward(*args: Any) -> Tensor:
        with ms.saved_tensors_hooks(Held, lambda held: held.tensor):
            value = mean_square(net(*args))
        found.append(_bytes_beside(settled(value), *known))
        return value

    # not all that live: a tensor of another test's failed step may never be computed, and asking for it waits for ever
    known = [*net.get_parameters(), *(each for each in inputs if isinstance(each, Tensor))]
    wait_for_operators()
    gc.collect()
    gc.freeze()  # from now on only what is new is looked at; it stays so, since unfreezing is for all or nothing
    result = ms.value_and_grad(forward, 0, net.trainable_params())(*inputs)
    return found[0], flat(result, "value and gradients")


def _tensors() -> list[Tensor]:
    wait_for_operators()  # those that are queued hold their inputs
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]  # isinstance would ask proxies, too


def _bytes_beside(*others: Tensor) -> int:
    """Bytes of the storages of new tensors; storages of `others` don't count."""
    sizes = {}
    for tensor in _tensors():
        if address := storage_of(tensor):
            sizes[address] = tensor.untyped_storage().size()
    for other in others:
        sizes.pop(storage_of(other), None)
    return sum(sizes.values())
