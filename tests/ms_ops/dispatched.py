"""What MindSpore dispatches when something is run, and tensors to run it on."""

import contextlib
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ms_ops.autograd import saved_tensors_hooks, wait_for_operators
from ms_ops.dispatch import Interception

F = mint.nn.functional
IS_2_9 = ms.__version__.startswith("2.9")
PYTHON = {"IsShapeUnKnown", "make_range", "sequence_len", "typeof"}
"""What MindSpore computes with in Python, and dispatches too."""


def numbers(*shape: int) -> Tensor:
    return Tensor(np.random.RandomState(0).randn(*shape).astype(np.float32))


V, X, B, IMAGE, KERNEL = numbers(4), numbers(4, 4), numbers(2, 4, 4), numbers(2, 4, 8, 8), numbers(4, 4, 3, 3)
HEADS, ROW = numbers(1, 2, 16, 16), numbers(1, 4)
YES = Tensor(np.eye(4) > 0)
WORDS, TWO = Tensor(np.array([0, 1, 2, 3], np.int32)), Tensor(np.zeros((2, 2), np.int64))


def seen(run: Callable[[], Any]) -> list[str]:
    """Names of what `run` dispatches, each once, in the order in which it begins.

    Operators of Ascend are seen, and fail then. Saved-tensor hooks are entered as in a region: without them MindSpore
    passes over operators none of whose tensors comes from Python.
    """
    found: list[str] = []
    with (
        contextlib.suppress(RuntimeError),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        Interception(lambda name, call, args: found.append(name) or call(*args)),
    ):
        run()
        wait_for_operators()
    return [name for name in dict.fromkeys(found) if name not in PYTHON]


def operator(name: str) -> Any:
    return getattr(ops.auto_generate, name)()
