"""Sessions: replays that are run early and read by several passes of a split backward.

A pipeline's schedule takes the gradients of inputs first and those of weights later, or has a replay run while another
thread communicates. `recompute_handle_collector_ctx` collects a handle for every replayed region of a forward,
`recompute_handle` runs its replay at once, and what the replay gave is held until `clear_recompute_session`.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any

from hyper_parallel.core.activation_memory.replay import Invocation
from hyper_parallel.core.errors import ReplayMismatchError


class RecomputeHandle:
    """One call of a replayed region, of which the replay can be run early.

    Args:
        invocation: The call.
    """

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    @property
    def path(self) -> str:
        """The region."""
        return self._invocation.path

    def __repr__(self) -> str:
        return f"RecomputeHandle({self.path})"


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.collectors: list[list[RecomputeHandle]] = []
        self.sessions: list[Hashable] = []


_of_thread = _OfThread()
_held: dict[Hashable, list[Any]] = {}
"""What replays have given, by session: placeholders, which hold the values."""
_lock = threading.Lock()


def _begun(invocation: Invocation) -> None:
    """An outermost replayed region's forward has ended on this thread."""
    for handles in _of_thread.collectors:
        handles.append(RecomputeHandle(invocation))


def _replayed(invocation: Invocation) -> None:
    """A replay has run on this thread: a session that retains what is unpacked holds it."""
    for session_id in _of_thread.sessions:
        _hold(session_id, invocation)


def _hold(session_id: Hashable, invocation: Invocation) -> None:
    held = [placeholder for ref in invocation.placeholders if (placeholder := ref()) is not None]
    with _lock:
        _held.setdefault(session_id, []).extend(held)


@contextlib.contextmanager
def recompute_handle_collector_ctx() -> Iterator[list[RecomputeHandle]]:
    """Collect a handle for every replayed region whose forward runs inside, in forward order.

    Regions inside other replayed regions have none of their own: they are replayed with the outermost one.

    Yields:
        The list of handles, which grows. A handle keeps what its region keeps: drop it after the backward.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import ops
        >>> from hyper_parallel.core.activation_checkpoint import (
        ...     checkpoint, clear_recompute_session, recompute_handle, recompute_handle_collector_ctx
        ... )
        >>> def forward(x):
        ...     with recompute_handle_collector_ctx() as handles:
        ...         y = checkpoint(lambda x: ops.tanh(ops.exp(x)), x).sum()
        ...     recompute_handle(handles[0], "micro-batch 0")  # before backward asks for it
        ...     return y
        >>> ms.grad(forward)(ms.Tensor([0.0])).asnumpy().round(4)
        array([0.42], dtype=float32)
        >>> clear_recompute_session("micro-batch 0")
    """
    handles: list[RecomputeHandle] = []
    _of_thread.collectors.append(handles)
    try:
        yield handles
    finally:
        _of_thread.collectors.remove(handles)


@contextlib.contextmanager
def recompute_session_ctx(session_id: Hashable, retain_on_unpack: bool = False) -> Iterator[None]:
    """Name the session of a backward pass.

    Args:
        session_id: Any hashable value; the same one for the passes that read the same replays.
        retain_on_unpack: Hold what replays inside give until `clear_recompute_session`, so that a later pass over the
            same graph reads it. False: it lives as long as autograd's own nodes.

    Raises:
        TypeError: `retain_on_unpack` is no bool, or `session_id` can't be hashed.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.core.activation_checkpoint import clear_recompute_session, recompute_session_ctx
        >>> with recompute_session_ctx(0, retain_on_unpack=True):
        ...     pass  # the pass that takes the gradients of inputs
        >>> clear_recompute_session(0)
    """
    hash(session_id)
    if not isinstance(retain_on_unpack, bool):
        raise TypeError(f"retain_on_unpack must be a bool, but got {retain_on_unpack!r}")
    if retain_on_unpack:
        _of_thread.sessions.append(session_id)
    try:
        yield
    finally:
        if retain_on_unpack:
            _of_thread.sessions.remove(session_id)


def recompute_handle(handle: RecomputeHandle, session_id: Hashable) -> None:
    """Run the replay of a region now, unless it has run, and hold what it gives for the session.

    Args:
        handle: From `recompute_handle_collector_ctx`.
        session_id: What `clear_recompute_session` is called with.

    Raises:
        TypeError: `handle` is none.
        ReplayMismatchError: The replay does something else than its forward.

    Supported Platforms:
        ``CPU``

    Examples:
        See `recompute_handle_collector_ctx`.
    """
    if not isinstance(handle, RecomputeHandle):
        raise TypeError(f"recompute_handle takes what recompute_handle_collector_ctx has collected, but got {handle!r}")
    hash(session_id)
    invocation = handle._invocation
    if not invocation.has_replayed:
        _hold(session_id, invocation)  # what nobody else holds is not replayed into
        invocation.replay()


def clear_recompute_session(session_id: Hashable) -> None:
    """Let go of what replays have given for a session; a session without any is cleared, too.

    Autograd's nodes that still live can't be read any more: that raises.

    Args:
        session_id: The session.

    Raises:
        TypeError: `session_id` can't be hashed.

    Supported Platforms:
        ``CPU``

    Examples:
        See `recompute_handle_collector_ctx`.
    """
    hash(session_id)  # an empty dict doesn't ask
    with _lock:
        held = _held.pop(session_id, [])
    for placeholder in held:
        placeholder.clear(
            ReplayMismatchError(
                f"{placeholder.path}: its recompute session {session_id!r} was cleared before backward has read what "
                f"the replay gave; call clear_recompute_session after the last pass"
            )
        )


Invocation.after_forward.append(_begun)
Invocation.after_replay.append(_replayed)
