"""Limits that nobody has set follow the regions, where a device orders its copies by itself."""

from hyper_parallel.core.activation_memory.swap_limits import Limits
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings

MIB = 2**20


def test_on_a_cpu_they_are_the_settings() -> None:
    limits = Limits(SwapSettings(), fit=False)
    limits.has_seen(900 * MIB)
    assert (limits.pending, limits.window) == (32 * MIB, 24 * MIB)


def test_on_a_device_they_grow_with_the_largest_region() -> None:
    limits = Limits(SwapSettings(), fit=True)
    for region in (10, 900, 300):
        limits.has_seen(region * MIB)
    assert (limits.pending, limits.window) == (1800 * MIB, 900 * MIB)


def test_what_is_set_stays() -> None:
    limits = Limits(SwapSettings(pending="64MiB", window="48MiB"), fit=True)
    limits.has_seen(900 * MIB)
    assert (limits.pending, limits.window) == (64 * MIB, 48 * MIB)
