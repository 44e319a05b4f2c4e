"""Layer numbers as ranges."""

from collections.abc import Iterable


def runs(layers: Iterable[int]) -> list[range]:
    """Give layers as ranges without gaps, in order.

    Args:
        layers: Layer numbers.

    Returns:
        The ranges.
    """
    found: list[range] = []
    for layer in sorted(layers):
        if found and found[-1].stop == layer:
            found[-1] = range(found[-1].start, layer + 1)
        else:
            found.append(range(layer, layer + 1))
    return found


def in_ranges(layers: Iterable[int]) -> str:
    """Write layers for a reader.

    Args:
        layers: Layer numbers.

    Returns:
        For example ``0-3, 5``.
    """
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(layers))
