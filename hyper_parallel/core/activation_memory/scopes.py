"""`Scope`: what happens to the saved tensors and operators of the code that runs now. One stack per thread.

Entering a region pushes a scope; the innermost one decides. A scope lives for one forward or one replay, so that a cell
called twice, nested or re-entered never meets its own state.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Tensor

from ms_ops.autograd import alias, gradient_depth, is_parameter, requires_grad, saved_tensors_hooks
from ms_ops.dispatch import NO_ANSWER, Interception


class Kept:
    """A saved tensor that stays on the device.

    Note: [Never hand a saved tensor back]
    A hook that returns the tensor it was given leaks it when the graph is dropped without a backward (MindSpore 2.9,
    2.10): a result holds its node, the node what the hook returned. An alias without history has no node.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = alias(tensor, tracked=False) if requires_grad(tensor) and not is_parameter(tensor) else tensor

    def get(self) -> Tensor:
        """The tensor."""
        return self._tensor


class Scope:
    """Keeps what is saved on the device and lets every operator run: a cell that is kept inside another's region."""

    replays = False
    """Whether the code that runs now repeats an earlier forward."""
    records = False
    """Whether the code that runs now will be repeated."""
    _depth = 0

    def offer(self, tensor: Tensor) -> Any:
        """`pack`, but for what a gradient taken inside the region saves: that is read back before the region ends."""
        return Kept(tensor) if self.inside_a_gradient else self.pack(tensor)

    @property
    def inside_a_gradient(self) -> bool:
        """Whether the code that runs now belongs to a gradient that was begun after this scope was entered."""
        return gradient_depth() != self._depth

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of `tensor`: an object with `get()`."""
        return Kept(tensor)

    def dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        """The result of an operator."""
        return run(*args)

    def answer(self, name: str, args: tuple) -> Any:
        """The result of an old primitive that isn't to be dispatched."""
        return NO_ANSWER


class _Outside(Scope):
    """No region: no hooks are entered for it."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = [_Outside()]
        self.interception = Interception(self._dispatch, self._answer)

    def _answer(self, name: str, args: tuple) -> Any:
        return self.scopes[-1].answer(name, args)

    def _dispatch(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        return self.scopes[-1].dispatch(name, run, args)


_stack = _Stack()


def current() -> Scope:
    """The scope that decides now."""
    return _stack.scopes[-1]


def _unpack(packed: Any) -> Tensor:
    return packed.get()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Let `scope` decide, inside."""
    scope._depth = gradient_depth()
    _stack.scopes.append(scope)
    try:
        with saved_tensors_hooks(scope.offer, _unpack):
            if scope.records or scope.replays:
                with _stack.interception:
                    yield
            else:
                yield
    finally:
        _stack.scopes.pop()


def is_recomputing() -> bool:
    """Whether the code that runs now is a replay: for auxiliary losses, counters and logs that must act once.

    Returns:
        True inside a replay, False in a forward and outside of regions.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel import is_recomputing
        >>> is_recomputing()
        False
    """
    return current().replays
