"""Every ordering action of the Ascend back end, each behind a name of its own.

Nothing else in `ms_ops.ascend` records an event, lets a stream wait, asks or waits for one on the host, or says that a
slot is in use: whoever wants to know whether one of these is needed takes it out here (callers go through the module,
`order.x(...)`).

Note: [Happens-before]
Three kinds of streams: the owner's (on which a region computes, and to whose pool its memory belongs), one for copies
to host, one for copies to the device. "a -> b" means that b runs on the device after a has.

    to host:   operators that write the source -> ready (owner) -> copy -> sent (copy stream)
               -> the owner waits for sent -> whatever the owner's pool makes of the source's memory
    to device: whoever used the destination's memory before -> allocated (owner) -> copy -> loaded (copy stream)
               -> the reader waits for loaded -> operators that read it

Memory is handed out and taken back in the order in which operators are queued, so that waiting on the owner's stream
is all that is needed before memory changes hands: there, the host waits for nothing.

Note: [A slot of pinned memory changes hands on the owner's stream]
A slot is free again when the owner has waited for the last copy that uses it. Whoever takes it next records its own
`ready` or `allocated` on the owner's stream afterwards, so that its copy comes after that wait. Only where several
owner streams share the pool must the two copy streams wait for each other, too.

Note: [What holds memory under a copy]
No action does. What a load writes is in its batch, to be handed out when the owner has waited. What a copy to host
reads is held by the transfer until it has been sent. If nobody needs it any more before that, MindSpore (2.10.0) holds
it: the queued copy until it is launched; then the pool, which has noted that another stream uses this memory, and gives
it to nobody before the owner's stream has been told to wait for something that was recorded on that stream later. That
is what `wait_until_sent` does. `Event.synchronize`, `Stream.synchronize` and `Event.query` don't give it back.
"""

from typing import Any

# ---- to host


def record_ready(event: Any, owner: Any) -> None:
    """What was computed so far on the owner's stream is what the copies of a closed group will read."""
    event.record(owner)


def wait_until_ready(to_host: Any, event: Any) -> None:
    """A copy to host reads nothing before it has been computed, and writes no slot that is still read."""
    to_host.wait_event(event)


def record_sent(event: Any, to_host: Any) -> None:
    """The copies of a batch have run when this has."""
    event.record(to_host)


def wait_until_sent(owner: Any, event: Any) -> None:
    """The owner's stream goes on when the bytes are on host: from here on their memory may be used for something else.

    This is what gives the memory back: Note: [What holds memory under a copy].
    """
    owner.wait_event(event)


def begin_use_of_slot(transfer: Any) -> None:
    """A slot that a copy in flight reads or writes is not given back, even if nobody needs its bytes any more."""
    transfer.busy = True


def end_use_of_slot(transfer: Any) -> None:
    """The owner has waited for the copy: the slot may be given back."""
    transfer.busy = False


# ---- to the device


def record_allocated(event: Any, owner: Any) -> None:
    """The memory into which a load copies has been handed out: whoever used it before comes earlier on this stream."""
    event.record(owner)


def wait_until_allocated(to_device: Any, event: Any) -> None:
    """A load writes no memory that an operator queued earlier still reads."""
    to_device.wait_event(event)


def record_loaded(event: Any, to_device: Any) -> None:
    """The loads of a batch have run when this has."""
    event.record(to_device)


def wait_until_loaded(reader: Any, event: Any) -> None:
    """Nobody reads, frees or uses for something else what a load still writes."""
    reader.wait_event(event)


# ---- several owners


def let_copies_wait(later: Any, earlier: Any, event: Any) -> None:
    """Copies in one direction come after those in the other: see [A slot of pinned memory changes hands ...]."""
    event.record(earlier)
    later.wait_event(event)


# ---- the host


def is_sent(event: Any) -> bool:
    """Whether a batch is on host; for the copy thread, which must not read what is still written."""
    return event.query()


def is_loaded(event: Any) -> bool:
    """Whether the device has read a block of pinned memory; for the copy thread, which must not overwrite it before."""
    return event.query()


def wait_on_host(to_host: Any, to_device: Any) -> None:
    """No copy is in flight any more: before pinned memory goes back to the system, never in a step."""
    to_host.synchronize()
    to_device.synchronize()
