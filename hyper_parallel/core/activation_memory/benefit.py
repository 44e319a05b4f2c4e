"""Warning about regions that can't lower the memory that training needs: replayed or swapped ones."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.core.errors import NoBenefitWarning
from ms_ops.autograd import alias, gradient_weights, is_parameter
from ms_ops.tensors import storage_of

_looked_at: set[str] = set()
"""Regions, by path, that were measured: once is enough, since asking for a storage waits for the queue."""
_warned: set[str] = set()
_swapped: set[str] = set()
"""Regions, by path, whose first call was asked what of it goes to host."""


class Benefit:
    """What one call of a region keeps and what it frees.

    Args:
        path: The region.
        arguments: What it is called with.
    """

    def __init__(self, path: str, arguments: Any) -> None:
        self._path = path
        self._inputs = [leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor) and not is_parameter(leaf)]
        self._saved: dict[int, Tensor] = {}

    @classmethod
    def of_new(cls, path: str, arguments: Any) -> "Benefit | None":
        """Measure the first call of a region; None for later ones."""
        if path in _looked_at:
            return None
        _looked_at.add(path)
        return cls(path, arguments)

    def saved(self, tensor: Tensor) -> None:
        """Backward needs this tensor, which the region doesn't keep."""
        if not is_parameter(tensor):
            self._saved[storage_of(tensor)] = alias(tensor, tracked=False)  # so that the address isn't used again

    def check(self, output: Any) -> None:
        """The forward has ended: warn if nothing but inputs and outputs was saved, which live anyway."""
        kept = {storage_of(tensor): tensor.nbytes for tensor in self._inputs}
        given = {storage_of(leaf) for leaf in leaves(output) if isinstance(leaf, Tensor)}
        freed = sum(one.nbytes for storage, one in self._saved.items() if storage not in kept and storage not in given)
        if not freed:
            _warn(
                self._path,
                f"{self._path}: no benefit from recomputing it: it frees 0 bytes and keeps {sum(kept.values())} bytes "
                f"of inputs; backward needs nothing of it but its inputs and outputs. Give the policy to a larger cell",
            )


def check_whole_net(path: str, parameters: Any, replayed_bytes: Callable[[], int]) -> None:
    """A replay begins: warn if the region holds every weight that the gradient is taken of.

    Args:
        path: The region.
        parameters: Ids of the `param_info` of every parameter that it reads.
        replayed_bytes: Gives what the replay brings back at once, in bytes.
    """
    weights = () if path in _warned else gradient_weights()
    if weights and all(id(weight.param_info) in parameters for weight in weights):
        _warn(
            path,
            f"{path}: no benefit from recomputing it: it is the whole net, so that its replay brings back all "
            f"{replayed_bytes()} bytes at once, at the peak. Give the policy to each of its blocks",
        )


def is_first_swap(path: str) -> bool:
    """Whether a region that should send something to host is called for the first time; later calls aren't asked."""
    if path in _swapped:
        return False
    _swapped.add(path)
    return True


def check_swap(path: str, source: str, what: str, left: Mapping[str, int] | None) -> None:
    """The first call of a region has ended: warn if nothing goes to host of what was asked for.

    Args:
        path: The region.
        source: Who has asked for it.
        what: What should go to host.
        left: Bytes that stay, by why; None: something goes.
    """
    if left is not None:
        why = ", ".join(f"{nbytes} bytes {_WHY_LEFT[name]}" for name, nbytes in sorted(left.items()) if nbytes)
        warnings.warn(
            f"{path}: no benefit from swapping {what} ({source}): nothing of it goes to host, since "
            f"{why or 'there is nothing that backward needs'}. Lower min_bytes, give the policy to another cell, or "
            f"leave it out",
            NoBenefitWarning,
            stacklevel=2,
        )


def check_operators(path: str, source: str, names: Sequence[str], policy: Any) -> None:
    """The first call of a region has ended: warn if entries of its table name operators of which it runs none."""
    if names:
        warnings.warn(
            f"{path}: no benefit from the policy of {' and '.join(names)} ({policy}; {source}): the region runs no "
            f"such operator. `hyper-parallel ops` lists what a model runs",
            NoBenefitWarning,
            stacklevel=2,
        )


_WHY_LEFT = {
    "small_bytes": "are in tensors below min_bytes",
    "parameter_bytes": "are weights",
    "kept_bytes": "are to stay",
    "held_bytes": "are held by other code",
}


def _warn(path: str, message: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(message, NoBenefitWarning, stacklevel=2)
