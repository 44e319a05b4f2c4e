"""In which of MindSpore's modes a plan works: PyNative, or compiled."""

from typing import Any

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.names import did_you_mean
from ms_ops.graph_compile import in_graph_mode

PYNATIVE, GRAPH, AUTO = "pynative", "graph", "auto"
MODES = (AUTO, PYNATIVE, GRAPH)


def decided(source: Source, mode: Any) -> str:
    """Decide the mode of a plan.

    Args:
        source: The file, which may say it.
        mode: What the caller says: one of `MODES`, or None for what the file says.

    Returns:
        `PYNATIVE` or `GRAPH`.

    Raises:
        PolicyError: The caller's mode is unknown or isn't the file's, or MindSpore doesn't run in that mode.
    """
    if mode is not None and mode not in MODES:
        offer = did_you_mean(str(mode), MODES)
        raise PolicyError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}{offer}")
    in_file = source.file.mode
    if AUTO not in (in_file, mode or AUTO) and mode != in_file:
        raise PolicyError(f"{source.origin} says mode: {in_file}, but mode={mode!r} was given; the two must agree")
    said = mode if mode not in (None, AUTO) else in_file
    compiled = in_graph_mode()
    if said == PYNATIVE and compiled:
        raise PolicyError(
            f"{source.origin} (mode: pynative): MindSpore is in graph mode, where a PyNative policy would be passed "
            f"over; give mode='graph', or call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first"
        )
    return said if said != AUTO else GRAPH if compiled else PYNATIVE
