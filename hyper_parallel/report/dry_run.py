"""The peak of training steps on a simulated device, and what such a figure can't know.

Note: [Swapping in a dry run]
A simulation copies nothing: memory that would wait for a copy is given back at once, and a peak under swapping would be
too good to be true. What a policy swaps is kept on the device here, and the peak is then a limit from above: swapping
can only lower it. How many bytes the policy moves is counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, mint, nn

from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.policy_file.plan import PolicyPlan, apply_policy

PLAIN = "plain"
OPTIMIZERS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "adamw": lambda weights: mint.optim.AdamW(weights),
    "sgd": lambda weights: mint.optim.SGD(weights, lr=0.01),
    "none": lambda weights: lambda gradients: None,
}
"""What takes the step. Those of `mindspore.nn` keep the last gradients alive until they are called again."""

STEPS = 2
"""The first one brings weights and the optimizer's state to the device; the second has all of it from its start."""

CANNOT_KNOW = (
    "time: nothing is computed and nothing is copied",
    "what swapping frees: it counts as kept here, so that the peak is a limit from above",
    "values: a loss is no loss, and what depends on values may go another way",
    "other ranks: buffers of collective communication",
)
"""What no dry run tells, in words."""

_NEVER_SMALL_ENOUGH = 2**62


@dataclass(frozen=True)
class DryRun:
    """What one mode needs on the simulated device."""

    mode: str
    """`plain`, or the policy file's name without its ending."""
    peak_bytes: int
    """The most that tensors took at one time."""
    reserved_bytes: int
    """The most that MindSpore's pool took from the device for them."""
    standing_bytes: int
    """What is there between steps: weights, the optimizer's state, inputs."""
    gradient_bytes: int
    """Of all weights together."""
    swapped_bytes: int
    """What the policy would swap in a step, and is kept here."""

    @property
    def step_bytes(self) -> int:
        """What a step adds to what is there: activations, gradients, temporaries."""
        return self.peak_bytes - self.standing_bytes

    @property
    def is_limit(self) -> bool:
        """Whether the peak is only a limit from above."""
        return self.swapped_bytes > 0

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {**asdict(self), "step_bytes": self.step_bytes, "is_limit": self.is_limit}


def keep_what_is_swapped(net: nn.Cell, plan: PolicyPlan) -> PolicyPlan:
    """Apply a plan so that whatever it swaps stays on the device; see [Swapping in a dry run].

    Args:
        net: The net.
        plan: A plan that isn't applied.

    Returns:
        The plan that is applied instead.

    Raises:
        PolicyError: The plan doesn't fit the net.
    """
    plan.resolve(net)  # its errors name the file
    # Of the policy's own settings of swapping none matters where nothing is swapped.
    return apply_policy(net, {**plan.to_plain_values(), "swap": {"min_bytes": _NEVER_SMALL_ENOUGH}}, stage=plan.stage)


def dry_run(mode: str, net: nn.Cell, inputs: Sequence[Any], optimizer: str) -> DryRun:
    """Take some training steps on the simulated device, which this process must have chosen.

    Args:
        mode: A name for the result.
        net: The net, under its policy; its output is the loss, or is summed up.
        inputs: What it is called with.
        optimizer: One of `OPTIMIZERS`.

    Returns:
        What the steps needed.

    Raises:
        ValueError: The net has nothing to train.
    """
    weights: tuple[Parameter, ...] = tuple(net.trainable_params())
    if not weights:
        raise ValueError("the net has no trainable parameter, so there is no step to take")
    take_step = OPTIMIZERS[optimizer](weights)
    gradient = ms.value_and_grad(net, None, weights)
    manager = SwapManager()
    ms.runtime.synchronize()
    ms.runtime.reset_peak_memory_stats()
    for _ in range(STEPS):
        manager.reset()
        _, gradients = gradient(*inputs)
        gradient_bytes = sum(each.nbytes for each in gradients)
        take_step(gradients)
        del _, gradients
        ms.runtime.synchronize()
    return DryRun(
        mode=mode,
        peak_bytes=ms.runtime.max_memory_allocated(),
        reserved_bytes=ms.runtime.max_memory_reserved(),
        standing_bytes=ms.runtime.memory_allocated(),
        gradient_bytes=gradient_bytes,
        swapped_bytes=manager.stats().small_bytes,
    )
