"""`SwapStats`: what the swap manager did since the last reset."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapStats:
    """Counters and peaks since `SwapManager().reset()`; bytes unless the name says otherwise."""

    live_bytes: int = 0
    """Held now: on the device, on host, or in flight. 0 after a step."""
    host_live_bytes: int = 0
    """Held on host now."""
    offloaded_bytes: int = 0
    """Copied to host."""
    loaded_bytes: int = 0
    """Copied back."""
    duplicate_bytes: int = 0
    """Not copied, since the same storage was saved more than once."""
    cancelled_bytes: int = 0
    """Not copied, since backward arrived first."""
    parameter_bytes: int = 0
    """Left alone: parameters."""
    small_bytes: int = 0
    """Left alone: tensors below `min_bytes`."""
    kept_bytes: int = 0
    """Left alone: a tensor policy said so, or the budget was exhausted and `when_exhausted` allows it."""
    recomputed_regions: int = 0
    """Calls of swapped regions that were recomputed instead, since the budget was exhausted."""
    resident_peak_bytes: int = 0
    """Most bytes of swapped tensors on the device at one time."""
    host_peak_bytes: int = 0
    """Most bytes on host at one time."""
    allocated_bytes: int = 0
    """Taken from the disk (file tier) or from RAM (host tier), in use or free for reuse."""
    late_loads: int = 0
    """Tensors that backward needed before their load was even begun."""
    wait_seconds: float = 0.0
    """Time that forward and backward spent waiting for copies."""
