"""Which back end a process swaps with: decided by MindSpore's device target when the first tensor is swapped."""

from collections.abc import Callable

from ms_ops.backend import BackEnd, NotSupported
from ms_ops.host import WrittenTier
from ms_ops.memory import container_bytes, ranks_on_this_host
from ms_ops.tensors import device_target

STAGING_SHARE = 8
"""Pinned memory may be one of so many parts of the machine's, if it is only the way to files."""


def back_end_for(limit: int, verify: bool, tier: Callable[[], WrittenTier], wants_file: bool) -> BackEnd:
    """A back end for the present device target.

    Args:
        limit: Most bytes on host.
        verify: Compare what comes back with what left.
        tier: Makes the tier that the copy thread writes and reads.
        wants_file: Whether the user has asked for the file tier, which a device with pinned memory doesn't need.

    Raises:
        NotSupported: There is none.
        TierFull: It would take more memory than there is.
        OSError: The folder of the file tier can't be used.
    """
    target = device_target()
    if target == "CPU":
        from ms_ops.cpu import CpuBackEnd

        return CpuBackEnd(tier(), verify)
    if target == "Ascend":
        from ms_ops.ascend.backend import AscendBackEnd

        if not wants_file:
            return AscendBackEnd(limit, verify)
        from ms_ops.ascend.file_below import AscendFileBackEnd

        return AscendFileBackEnd(tier(), container_bytes() // STAGING_SHARE // ranks_on_this_host(), verify)
    raise NotSupported(
        f"swapping to host needs streams, events and pinned memory, which MindSpore has for the device target 'Ascend' "
        f"(mindspore.runtime.Stream, Event, StreamCtx), or 'CPU'; the device target is {target!r}"
    )
