"""Say, per cell, what happens to the activations that backward needs: keep, recompute, or swap to host.

Training gives the same numbers with less memory. `activation_policy` is the decorator, `apply_policy` takes a policy
file, `SwapManager` owns what waits on host.
"""

# ruff: noqa: E402  (what another distribution may have overwritten is imported after the check)
import pkgutil
from pathlib import Path

from hyper_parallel._beside import refuse_mixture

refuse_mixture(Path(__file__).parent)
__path__ = pkgutil.extend_path(__path__, __name__)

from hyper_parallel import presets
from hyper_parallel.core.activation_memory.decorator import activation_policy
from hyper_parallel.core.activation_memory.keep_on_device import keep_on_device, swap_tensor_wrapper
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.scopes import is_recomputing
from hyper_parallel.core.activation_memory.state_providers import register_state_provider
from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.core.activation_memory.wrappers import (
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    not_replayed,
    swap,
    swap_wrapper,
)
from hyper_parallel.core.errors import (
    ActivationMemoryError,
    HostMemoryError,
    NoBenefitWarning,
    PolicyError,
    PolicyOverruledWarning,
    ReplayMismatchError,
    SwapStateError,
)
from hyper_parallel.policy_file import PolicyPlan, apply_policy, load_policy, verify_policy
from ms_ops.autograd import guard_gradient_calls
from ms_ops.dispatch import answer_old_primitives

__all__ = [
    "ActivationMemoryError",
    "CheckpointPolicy",
    "HostMemoryError",
    "NoBenefitWarning",
    "PolicyError",
    "PolicyOverruledWarning",
    "PolicyPlan",
    "ReplayMismatchError",
    "SwapManager",
    "SwapStateError",
    "activation_policy",
    "apply_policy",
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "is_recomputing",
    "keep_on_device",
    "load_policy",
    "not_replayed",
    "presets",
    "register_state_provider",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "verify_policy",
]

guard_gradient_calls()
answer_old_primitives()
