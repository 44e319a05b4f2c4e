"""Every ordering action of the Ascend back end, each behind a name of its own.

Nothing else in `ms_ops.ascend` records an event, lets a stream wait, holds memory for a copy in flight or lets it go:
whoever wants to know whether one of these is needed takes it out here (callers go through the module, `order.x(...)`).

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

Note: [Events are used again]
The first record of an event waits until all dispatched operators have been launched (MindSpore 2.10.0); the next ones
don't. When an event may be recorded anew: Note: [Events rest] of `ms_ops.ascend.backend`.

Seen in MindSpore 2.10.0: an owner's `wait_event` is what gives memory back that a copy on another stream has used;
`Event.synchronize`, `Stream.synchronize` and `Event.query` don't. What MindSpore does by itself for such memory is to
record an event of its own, which it may launch before the copy.
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

    This is what gives the memory back: see the top of this module.
    """
    owner.wait_event(event)


def hold_source(batch: Any, storage: Any) -> None:
    """What a copy to host reads lives until the owner has waited for it, whoever else lets go of it."""
    batch.held.append(storage)


def let_sources_go(batch: Any) -> None:
    """The owner has waited: the storages of the batch may go."""
    batch.held.clear()


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


def hold_destination(batch: Any, tensor: Any) -> None:
    """What a load writes lives until the owner has waited for it, whoever else lets go of it."""
    batch.held.append(tensor)


def let_destinations_go(batch: Any) -> None:
    """The owner has waited: the tensors of the batch are their readers' alone."""
    batch.held.clear()


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
