"""Whether a net can be under a policy in the way it runs."""

import mindspore as ms

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.loading import Source


def require_pynative(source: Source) -> None:
    """Refuse graph mode, in which policies would be passed over.

    Args:
        source: The file.

    Raises:
        PolicyError: MindSpore is in graph mode.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE:
        raise PolicyError(
            f"{source.origin} (mode: {source.file.mode}): MindSpore is in graph mode, in which policies aren't "
            f"available yet; call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before the policy is applied"
        )
