"""Tensors that no swapped region takes to host, while they live."""

import weakref

from mindspore import Tensor

from ms_ops.tensors import storage_of

_marked: dict[int, "weakref.ref[Tensor]"] = {}
"""By the id of the object."""


def mark(tensor: Tensor) -> None:
    """Leave the tensor, and whatever lies in its storage, on the device as long as this object lives."""
    key = id(tensor)
    _marked[key] = weakref.ref(tensor, lambda _: _marked.pop(key, None))


def storages(more: list[Tensor]) -> set[int]:
    """Where the storages of the marked tensors, and of `more`, begin; waits for the queue if there are any."""
    if not (_marked or more):
        return set()
    alive = [tensor for ref in list(_marked.values()) if (tensor := ref()) is not None]
    return {storage_of(tensor) for tensor in (*alive, *more)} - {0}
