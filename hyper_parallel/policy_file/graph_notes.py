"""Notes of a plan about the mode: what of a file means nothing in graph mode, or in PyNative mode."""

from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.notes import shown
from hyper_parallel.policy_file.resolve import Resolution


def graph_notes(source: Source, resolution: Resolution) -> list[str]:
    """Tell which keys of a file have no effect in graph mode.

    Args:
        source: The file.
        resolution: What it means for a net.

    Returns:
        One note per key.
    """
    notes = []
    idle = sorted(source.file.swap.model_fields_set - {"when_exhausted"})
    if idle:
        notes.append(f"swap: {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect in graph mode")
    if resolution.prefetch:
        notes.append("prefetch has no effect in graph mode; graph: {backward_prefetch: 2} is for that")
    return notes


def pynative_notes(resolution: Resolution) -> list[str]:
    """Tell which keys of a file have no effect in PyNative mode.

    Args:
        resolution: What the file means for a net.

    Returns:
        One note per key.
    """
    flagged = [decision.node.path for decision in resolution.regions.decisions if decision.spec.graph is not None]
    return [f"graph has no effect in PyNative mode: {shown(flagged)}"] if flagged else []
