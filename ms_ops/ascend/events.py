"""Marks: places in a stream, each an event that is used again.

Note: [Events never end]
Seen in MindSpore 2.10.0: the first record of an event waits for the queue of dispatched operators, and the end of an
event is dispatched like an operator, though the queue takes those of one thread at a time. The last reference to a mark
may go on any thread, wherever the collector runs. So events belong to the process: a mark that goes leaves its event to
the next one, also to one of the next engine.

Note: [When an event may be recorded anew]
As soon as every wait for it has been called, and the host asks it no more. A wait means the last record before it, and
nothing that is recorded later: AscendCL promises that for the events that MindSpore makes, and MindSpore launches
records and waits in the order in which they are called.
"""

from collections import deque
from typing import Any

import mindspore as ms

_made: list[Any] = []
_unused: deque[Any] = deque()


def made() -> int:
    """How many events there are."""
    return len(_made)


class Mark:
    """A place in a stream, once its event has been recorded there; the event is used again when the mark goes."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        try:
            self.event = _unused.popleft()
        except IndexError:
            self.event = ms.runtime.Event()
            _made.append(self.event)

    def __del__(self, unused: deque = _unused) -> None:
        unused.append(self.event)  # on any thread: appending is all that is safe here
