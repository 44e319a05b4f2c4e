"""MindSpore's own simulation of an Ascend device: every operator is dispatched, none computes, memory is only counted.

Note: [Parameters without values]
A simulation needs no values, but MindSpore makes them on host before they go to the device: an initializer fills an
array, and an optimizer's state begins as a copy of its parameter. Both take host memory and minutes for a large net.
Here an initializer fills nothing, so that the system never gives the array any memory, and the copy of a parameter is
a new one of the same shape. Seen in MindSpore 2.10.0: `Initializer.__call__` fills, `Parameter.__reduce_ex__` copies.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter
from mindspore.common.initializer import Initializer, initializer

SIMULATION = "MS_SIMULATION_LEVEL"
"""The environment variable that MindSpore reads when it is imported; 1 simulates one process."""


def choose_simulated_ascend() -> None:
    """Let this process compute on the simulated device.

    Raises:
        RuntimeError: There is no Ascend backend to simulate, or MindSpore doesn't simulate.
    """
    if not os.environ.get(SIMULATION):
        raise RuntimeError(f"{SIMULATION} isn't set")
    ms.set_device("Ascend")


def is_emulated() -> bool:
    """Whether an emulator stands in for the Ascend runtime: it says so in the environment, and is never imported."""
    return bool(os.environ.get("ASCSIM_LIBRARY"))


@contextmanager
def parameters_without_values() -> Iterator[None]:
    """Make parameters that take no memory on host, and hold nothing; see [Parameters without values]."""
    fill, copy = Initializer.__call__, Parameter.__reduce_ex__
    Initializer.__call__ = _fill_nothing
    Parameter.__reduce_ex__ = _by_its_shape
    try:
        yield
    finally:
        Initializer.__call__ = fill
        Parameter.__reduce_ex__ = copy


def _fill_nothing(self: Initializer, array: Any) -> None:
    return None


def _by_its_shape(self: Parameter, protocol: Any) -> tuple[Any, ...]:
    about = (self.shape, self.dtype, self.name, self.requires_grad, self.layerwise_parallel)
    return _parameter_of_shape, about


def _parameter_of_shape(shape: tuple[int, ...], dtype: Any, *about: Any) -> Parameter:
    return Parameter(initializer("zeros", shape, dtype), *about)
