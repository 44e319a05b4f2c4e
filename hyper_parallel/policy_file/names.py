"""The closest valid name for a wrong one."""

import difflib
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?![0-9])")
_OPEN = re.compile(r"\[[0-9]+(?:-[0-9]+)?\]|(?<![0-9])[0-9]+(?![0-9])|(?<=\.)\*(?=\.|$)|^\*(?=\.)")


def did_you_mean(value: str, known: Iterable[str], count: int = 3) -> str:
    """Offer the known names that are closest to a wrong one.

    Args:
        value: What was written.
        known: What could have been meant.
        count: Most names to offer.

    Returns:
        ``"; did you mean 'a' or 'b'?"``, or an empty string if nothing is close.
    """
    close = difflib.get_close_matches(value[:200], list(known), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class PathNames:
    """The paths of a net's cells, with the numbers of like cells drawn together: ``layers.[0-7].attention``.

    Args:
        paths: The paths.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        numbers: dict[str, list[set[int]]] = {}
        for path in paths:
            found = _NUMBER.findall(path)
            per_place = numbers.setdefault(_NUMBER.sub("#", path), [set() for _ in found])
            for seen, number in zip(per_place, found, strict=True):
                seen.add(int(number))
        self._drawn = {shape: _drawn(shape, per_place) for shape, per_place in numbers.items()}

    def closest(self, pattern: str) -> str:
        """The path that is most like a pattern.

        Args:
            pattern: What matched nothing.

        Returns:
            A path, ready to be written into a file; empty if none is close.
        """
        wanted = _OPEN.sub("#", pattern.removeprefix("**."))
        close = difflib.get_close_matches(wanted[:200], list(self._drawn), n=1, cutoff=0.6)
        if not close and pattern.startswith("**."):
            ends = {shape.rsplit(".", 1)[-1]: shape for shape in self._drawn}
            close = [ends[end] for end in difflib.get_close_matches(wanted[:200], list(ends), n=1, cutoff=0.6)]
        return self._drawn[close[0]] if close else ""


def _drawn(shape: str, numbers: Sequence[set[int]]) -> str:
    parts = shape.split("#")
    return parts[0] + "".join(f"{_range(seen)}{part}" for seen, part in zip(numbers, parts[1:], strict=True))


def _range(numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(low) if low == high else f"[{low}-{high}]" for low, high in runs]
    return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"
