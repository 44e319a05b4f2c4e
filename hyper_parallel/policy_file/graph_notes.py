"""Notes of a plan for a compiled net: what of the file means nothing there."""

from hyper_parallel.policy_file.loading import Source
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
