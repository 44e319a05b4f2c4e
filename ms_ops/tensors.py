"""Tensors and numpy arrays over the same bytes. Seen in MindSpore 2.9.0 and 2.10.0 on the CPU backend."""

import numpy as np
from mindspore import Tensor


def view_of(tensor: Tensor) -> np.ndarray:
    """The tensor's own bytes as an array (zero-copy on CPU); keeps its storage alive.

    Waits until every dispatched operator has run (the whole queue, not only this tensor's): call it for a group of
    tensors at once, so that only the first call waits.
    """
    return tensor.asnumpy()


def address_of(array: np.ndarray) -> int:
    """Where the array's bytes begin."""
    return array.__array_interface__["data"][0]


def over(array: np.ndarray) -> Tensor:
    """A tensor over the array's bytes (zero-copy); it keeps the array alive until its last queued reader has run."""
    return Tensor.from_numpy(array)
