"""The import path that MindFormers uses: the names of `hyper_parallel` under the neighbouring project's module."""

from hyper_parallel import (
    CheckpointPolicy,
    SwapManager,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    is_recomputing,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)
from hyper_parallel.core.activation_memory.sessions import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)

__all__ = [
    "CheckpointPolicy",
    "SwapManager",
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "clear_recompute_session",
    "is_recomputing",
    "recompute_handle",
    "recompute_handle_collector_ctx",
    "recompute_session_ctx",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
]
