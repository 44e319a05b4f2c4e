"""`Scope`: what happens to the saved tensors and operators of the code that runs now. One stack per thread.

Entering a region pushes a scope; the innermost one decides. A scope lives for one forward or one replay, so that a cell
called twice, nested or re-entered never meets its own state.
"""

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.activation_memory.call_site import call_site
from hyper_parallel.core.activation_memory.written import Written
from hyper_parallel.core.errors import ReplayMismatchError
from ms_ops.autograd import data_of, gradient_depth, is_parameter, requires_grad, saved_tensors_hooks
from ms_ops.cells import hear_of_calls
from ms_ops.dispatch import NO_ANSWER, Interception
from ms_ops.host_values import hear_of_values

watched: "dict[int, weakref.ref[Watched]]" = {}
"""Every live `Watched` that asked to hear of writes, by its id."""


def why(written: Written) -> str:
    """Why what holds the written tensor for backward can't be read any more."""
    return (
        f"a tensor that backward needs {written} was written by {written.how}{call_site()} before backward has read "
        f"it; write into a copy"
    )


class Watched:
    """Holds a tensor that backward will read, and hears of writes into it.

    MindSpore compares versions of saved tensors only where there are no saved-tensor hooks.
    """

    __slots__ = ("__weakref__", "changed")

    def __init__(self) -> None:
        self.changed = ""
        """Who wrote into the tensor since."""
        key = id(self)
        watched[key] = weakref.ref(self, lambda _: watched.pop(key, None))  # runs on MindSpore's threads, too

    def is_reached(self, written: Written) -> bool:
        """Whether the write changes what is held."""
        raise NotImplementedError

    def wrote(self, written: Written) -> None:
        """A tensor is about to be written."""
        if not self.changed and self.is_reached(written):
            self.changed = why(written)

    def check(self) -> None:
        """Raise ReplayMismatchError if what is held was written."""
        if self.changed:
            raise ReplayMismatchError(self.changed)


class Kept(Watched):
    """A saved tensor that stays on the device.

    Note: [Never hand a saved tensor back]
    A hook that returns the tensor it was given leaks it when the graph is dropped without a backward (MindSpore 2.9,
    2.10): a result holds its node, the node what the hook returned. An alias without history has no node.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = data_of(tensor) if requires_grad(tensor) and not is_parameter(tensor) else tensor
        super().__init__()  # from here on it hears of writes; an alias may raise what an operator before it has raised

    def get(self) -> Tensor:
        """The tensor."""
        self.check()
        return self._tensor

    def is_reached(self, written: Written) -> bool:
        # of a parameter, plain reads what was written, unless MindSpore's own check sees it
        return written.reaches(self._tensor) and (written.counts_as_new_version or not is_parameter(self._tensor))


class Scope:
    """Keeps what is saved on the device and lets every operator run: a cell that is kept inside another's region."""

    replays = False
    """Whether the code that runs now repeats an earlier forward."""
    records = False
    """Whether the code that runs now will be repeated."""
    intercepts = False
    """Whether it wants to see operators although it neither replays nor records."""
    written_parameters: Mapping[int, Parameter] = types.MappingProxyType({})
    """Parameters that the code in the scope has written."""
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

    def wrote(self, written: Written) -> None:
        """The code that runs in the scope is about to write into a tensor."""
        if isinstance(written.tensor, Parameter):
            self.written_parameters = {**self.written_parameters, id(written.tensor): written.tensor}

    def enters(self, cell: nn.Cell) -> None:
        """A cell is about to run in the scope."""

    def leave_alone(self, tensor: Tensor) -> None:
        """Leave on the device what the code in the scope has marked; see `keep_on_device`."""

    def reads_on_host(self) -> None:
        """The code that runs in the scope reads a value on host."""

    def remembers(self, site: Any, value: Any) -> None:
        """The code that runs in the scope has read a small value on host."""

    def recalls(self, site: Any) -> Any:
        """What the code that runs in the scope is to read on host; NO_ANSWER: what is there."""
        return NO_ANSWER

    def takes_value(self, site: Any, what: str, value: Any) -> None:
        """The code that runs in the scope takes a value from Python into a tensor."""


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


def _enters(cell: nn.Cell) -> None:
    for scope in reversed(_stack.scopes):
        if not scope.records:
            return
        scope.enters(cell)


def _takes_value(site: Any, what: str, value: Any) -> None:
    _stack.scopes[-1].takes_value(site, what, value)


hear_of_calls(_enters)
hear_of_values(_takes_value)


def current() -> Scope:
    """The scope that decides now."""
    return _stack.scopes[-1]


def open_scopes() -> list[Scope]:
    """All scopes of this thread, the outermost first."""
    return _stack.scopes


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Operators that run inside are ours: no scope hears of them."""
    _stack.scopes.append(_Outside())
    try:
        yield
    finally:
        _stack.scopes.pop()


def _unpack(packed: Any) -> Tensor:
    return packed.get()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Let `scope` decide, inside."""
    scope._depth = gradient_depth()
    _stack.scopes.append(scope)
    try:
        with saved_tensors_hooks(scope.offer, _unpack):
            if scope.records or scope.replays or scope.intercepts:
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
