"""The peak of device memory under swap: measured, and predicted from plain's profile, what is swapped, and the limits.

Note: [What a peak under swap is made of]
A step has phases: the forward of each block, and the backward of each. In every phase swap has on the device what plain
has, less what is on host meanwhile: all that earlier blocks have saved, but for what is still on its way (in forward,
at most `pending`) or loaded ahead (in backward, at most `window`, and only when what the block itself has saved is
loaded, so at the end of its phase). The largest of these is the predicted peak. It takes from plain its peaks, phase by
phase, and from the policy the bytes that a block sends and the two limits; nothing of what was measured under swap.

Plain's own peak is where backward begins, when all is saved. The one under swap is where backward ends: then all
gradients are there. That is why the peak drops by less than what is on host. The prediction is from above: it counts
all that a block has saved as there when its backward begins, but it comes back bit by bit.

Note: [Late launches]
MindSpore hands out memory on one thread and launches on another, and a copy between device and host holds its tensors
until it is launched (2.10.0). On a busy machine the second thread is late, and the peak higher by some tensors, once in
a while. So it is measured four times, the least counts, and all are reported.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mindspore as ms
from ascend_training import Size, Trainer, batch, build, measured
from mindspore import Tensor

from hyper_parallel import SwapManager


@dataclass(frozen=True)
class Phase:
    """The forward or the backward of one block."""

    block: int
    is_backward: bool
    peak: int
    """Most bytes on the device, beyond what is there between steps."""
    end: int
    """Those that are there at its end."""


class _Profile:
    """Peaks between the moments in which blocks begin, forward and backward."""

    def __init__(self, trainer: Trainer) -> None:
        self.phases: list[Phase] = []
        self._now: tuple[int, bool] | None = None
        self._standing = ms.runtime.memory_allocated()
        for index, layer in enumerate(trainer.net.layers):
            layer.register_forward_pre_hook(lambda cell, inputs, index=index: self._begins(index, False))
            layer.register_forward_hook(lambda cell, inputs, output, index=index: self._watch(output, index))

    def _watch(self, output: Tensor, index: int) -> None:
        output.register_hook(lambda gradient: self._begins(index, True))

    def _begins(self, block: int, is_backward: bool) -> None:
        self.ends()
        self._now = block, is_backward

    def ends(self) -> None:
        ms.runtime.synchronize()
        if self._now is not None:
            peak, end = ms.runtime.max_memory_allocated(), ms.runtime.memory_allocated()
            self.phases.append(Phase(*self._now, peak - self._standing, end - self._standing))
        ms.runtime.reset_peak_memory_stats()
        self._now = None


def profile(size: Size) -> list[Phase]:
    """Of a step of the plain transformer."""
    trainer, x = Trainer(build("transformer", "plain", size)), batch(size, 0)
    trainer.step(x)
    ms.runtime.synchronize()
    found = _Profile(trainer)
    trainer.step(x)
    found.ends()
    return found.phases


def predicted_peak(phases: Sequence[Phase], saved: int, pending: int, window: int) -> int:
    """See Note: [What a peak under swap is made of].

    Args:
        phases: Of plain.
        saved: Bytes that each block sends.
        pending: The limit of what is on its way to host.
        window: The limit of what is loaded ahead; the largest transfer, if that is more.
    """

    def under_swap(phase: Phase) -> int:
        before = phase.block * saved
        if phase.is_backward:
            return max(phase.peak, phase.end + window) - before
        return phase.peak - max(0, before - pending)

    return max(map(under_swap, phases))


SIZE = Size(blocks=8, width=64, heads=4, batch=4, tokens=64)
UNIT = 4 * SIZE.batch * SIZE.tokens * SIZE.width
LARGEST = UNIT * max(4, SIZE.heads * SIZE.tokens // SIZE.width)
"""Bytes of the largest tensor that a block saves: its hidden layer, or its scores."""
CASES: dict[str, dict[str, Any]] = {"each tensor on its own": {"fuse_below": 0}, "small tensors together": {}}
BEFORE = ("plain", "native_recompute")


def _least(mode: str) -> dict[str, Any]:
    """Of some measurements that with the lowest peak, and the peaks of all; see Note: [Late launches]."""
    found = [measured(mode, SIZE, steps=2) for _ in range(4)]
    return {**min(found, key=lambda each: each["peak"]), "peaks": [each["peak"] for each in found]}


def peaks(modes: Sequence[str]) -> dict[str, Any]:
    """Of training steps under some modes, in each case; pending and window are one tensor.

    Args:
        modes: Among them `plain`, `native_recompute` and `swap`.
    """
    phases = profile(SIZE)
    found = {mode: measured(mode, SIZE, steps=2) for mode in modes if mode in BEFORE}
    plain, native = (found[mode]["peak"] for mode in BEFORE)
    cases: dict[str, Any] = {}
    for case, settings in CASES.items():
        SwapManager().configure(min_bytes=4096, pending=UNIT, window=UNIT, **settings)
        own = {mode: _least(mode) for mode in modes if mode not in BEFORE}
        swap = own["swap"]
        predicted = predicted_peak(phases, int(swap["on_host"]) // (SIZE.blocks - 1), UNIT, LARGEST)
        cases[case] = {
            "modes": {**found, **own},
            "predicted_peak": predicted,
            "swap_by_native": swap["peak"] / native,
            "drop_by_predicted": (plain - swap["peak"]) / (plain - predicted),
            "drop_by_bytes": (plain - swap["peak"]) / (swap["on_host"] - swap["window"]),
        }
    return {"size": asdict(SIZE), "phases": [asdict(phase) for phase in phases], "cases": cases}
