"""`SwapStats`: what the swap manager did since the last reset."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CellStats:
    """What was done for the tensors of one region, by all its calls; bytes unless the name says otherwise."""

    offloaded_bytes: int = 0
    """Copied to host."""
    loaded_bytes: int = 0
    """Copied back."""
    duplicate_bytes: int = 0
    """Not copied, since the same storage was saved more than once."""
    cancelled_bytes: int = 0
    """Not copied, since backward arrived first."""
    held_bytes: int = 0
    """Left alone: other code held the tensor as long as backward didn't need it."""
    parameter_bytes: int = 0
    """Left alone: parameters, their views and casts."""
    small_bytes: int = 0
    """Left alone: tensors below `min_bytes`."""
    kept_bytes: int = 0
    """Left alone: a tensor policy said so, or the host is exhausted and `when_exhausted` allows it."""
    no_room_bytes: int = 0
    """The part of `kept_bytes` for which the host had no room, or that could not be written."""
    recomputed_regions: int = 0
    """Calls that were recomputed instead, since the host is exhausted."""
    kept_regions: int = 0
    """Calls whose tensors or inputs all stayed on the device, since the host is exhausted."""
    late_loads: int = 0
    """Tensors that backward needed before their load was even begun."""
    evicted_bytes: int = 0
    """Loaded too early, and given up again for something that was needed first."""
    wait_seconds: float = 0.0
    """Time that forward and backward spent waiting for copies."""


@dataclass(frozen=True)
class SwapStats(CellStats):
    """Counters and peaks since `SwapManager().reset()`; bytes unless the name says otherwise."""

    live_bytes: int = 0
    """Held now: on the device, on host, or in flight. 0 after a step."""
    host_live_bytes: int = 0
    """Held on host now."""
    resident_peak_bytes: int = 0
    """Most bytes of swapped tensors on the device at one time."""
    pending_peak_bytes: int = 0
    """Most bytes on their way to host at one time; limited by `pending`."""
    window_peak_bytes: int = 0
    """Most bytes loaded and not given up at one time; limited by `window`."""
    host_peak_bytes: int = 0
    """Most bytes on host at one time; limited by `host_budget`."""
    allocated_bytes: int = 0
    """Taken from the disk (file tier) or from RAM (host tier), in use or free for reuse."""
    host_allocations: int = 0
    """How often the tier had to ask the system for more."""
    cells: Mapping[str, CellStats] = field(default_factory=dict)
    """The same per region, by its path."""
