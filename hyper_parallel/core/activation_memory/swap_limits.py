"""`Limits`: how many bytes may be on their way to host, and loaded ahead of backward."""

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings

_MOST_FUSED_BYTES = 4 * 2**20


class Limits:
    """What the settings say; where they say nothing and a device orders its copies by itself, what suits the regions.

    Note: [Limits that fit]
    A device copies while it computes only if what it may have on its way is more than what a region sends: with less,
    every region waits for its own copies, or for those of the one before. Regions on such devices differ in size by
    orders of magnitude. So a limit that nobody has set follows the largest region seen: two of it may be on their way
    to host, of which what the running region saves takes its part, and one may be loaded ahead. Where copies just fit
    under computation, a step took 1.04 of plain's with these limits, 1.12 with one and one, 1.27 with one and a half
    (docs/ascend_proof.md).

    Note: [Small tensors come back together]
    The tensors of a transfer leave and come back at once: backward waits for all of them, and the last one that is read
    frees the memory of all. So eight of them fit into the window, and one into what may be on its way.

    Args:
        settings: The user's.
        fit: Whether limits follow the regions.
    """

    def __init__(self, settings: SwapSettings, fit: bool) -> None:
        self.pending, self.window = int(settings.pending), int(settings.window)
        self._fit_pending = fit and "pending" not in settings.model_fields_set
        self._fit_window = fit and "window" not in settings.model_fields_set

    def has_seen(self, nbytes: int) -> None:
        """A region sends so many bytes."""
        if self._fit_pending and 2 * nbytes > self.pending:
            self.pending = 2 * nbytes
        if self._fit_window and nbytes > self.window:
            self.window = nbytes

    @property
    def fused(self) -> int:
        """Most bytes of small tensors that travel together: see Note: [Small tensors come back together]."""
        return min(_MOST_FUSED_BYTES, self.pending, self.window // 8)
