"""Which layer is in which pipeline stage and chunk, by MindFormers' rules for graph mode and for PyNative mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Offset = Any
"""A number, a list of them, or a list of lists."""


@dataclass(frozen=True)
class Pipeline:
    """The layers of every chunk of every stage. Numbers are global: those of the whole net, in every stage."""

    chunks: tuple[tuple[range, ...], ...]
    """By interleave chunk, then by stage."""
    mtp: int = 0
    """Layers for multi-token prediction, which are numbered after the decoder's and run in the last stage."""

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        return sum(len(part) for chunk in self.chunks for part in chunk)

    @property
    def total(self) -> int:
        """Layers of the decoder and those for multi-token prediction."""
        return self.layers + self.mtp

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.chunks[0])

    @property
    def interleave(self) -> int:
        """Chunks of a stage."""
        return len(self.chunks)

    @property
    def counts(self) -> list[list[int]]:
        """Number of layers by chunk, then by stage."""
        return [[len(part) for part in chunk] for chunk in self.chunks]

    def place_of(self, layer: int) -> tuple[int, int]:
        """Give the chunk and the stage of a layer."""
        for number, chunk in enumerate(self.chunks):
            for stage, part in enumerate(chunk):
                if layer in part:
                    return number, stage
        return self.last_place

    @property
    def last_place(self) -> tuple[int, int]:
        """Chunk and stage of the decoder's last layer; layers for multi-token prediction are there, too."""
        parts = [(number, stage) for number in range(self.interleave) for stage in range(self.stages)]
        return max(parts, key=lambda place: (self.chunks[place[0]][place[1]].stop, place))

    def layers_of(self, stage: int, chunk: int | None = None) -> list[int]:
        """Give the layers of a stage, in order; of one of its chunks, if it is given."""
        places = [(number, stage) for number in range(self.interleave) if chunk in (None, number)]
        found = sorted(layer for number, _ in places for layer in self.chunks[number][stage])
        return found + (list(range(self.layers, self.total)) if self.last_place in places else [])


def graph_pipeline(
    layers: int, stages: int = 1, interleave: int = 1, offset: Offset = 0, *, zero_bubble_v: bool = False, mtp: int = 0
) -> Pipeline:
    """Split layers as MindFormers does in graph mode: evenly, and what `offset` adds or takes.

    Args:
        layers: Layers of the decoder.
        stages: Pipeline stages.
        interleave: Chunks of a stage.
        offset: Layers more or less than even: one number, one per stage, or one per chunk and stage.
        zero_bubble_v: Whether the second chunk goes through the stages backwards.
        mtp: Layers for multi-token prediction.

    Returns:
        The layers of every chunk of every stage.

    Raises:
        ValueError: The offset doesn't fit the stages or the remainder, or leaves a stage without layers.
    """
    parts = stages * interleave
    each, rest = divmod(layers, parts)
    if parts == 1:
        return Pipeline(((range(layers),),), mtp)
    if zero_bubble_v and interleave != 2:
        raise ValueError(f"zero_bubble_v means two chunks per stage, but the interleave is {interleave}")
    more = _spread(offset, stages, interleave)
    total = sum(map(sum, more))
    if total != rest:
        raise ValueError(
            f"{layers} layers in {_parts(stages, interleave)} are {each} each, and {rest} more; the offset must add up "
            f"to {rest}, but {offset} adds up to {total}{' (a number counts once per part)' if _one(offset) else ''}"
        )
    counts = [[each + extra for extra in row] for row in more]
    flat = [count for row in counts for count in row]
    if min(flat[0], flat[-1]) < 0 or any(count < 1 for count in flat[1:-1]):
        raise ValueError(f"offset {offset} leaves a stage without layers: by chunk and stage there are {counts}")
    if not zero_bubble_v:
        return Pipeline(_ranges(counts), mtp)
    there, back = _ranges([counts[0], counts[1][::-1]])
    return Pipeline((there, back[::-1]), mtp)


def pynative_pipeline(
    layers: int, stages: int = 1, interleave: int = 1, per_stage: Any = "auto", *, mtp: int = 0
) -> Pipeline:
    """Split layers as MindFormers' PyNative trainer does: evenly, or by `pipeline_parallel_layers_per_stage`.

    Args:
        layers: Layers of the decoder.
        stages: Pipeline stages.
        interleave: Chunks of a stage.
        per_stage: ``auto``, or for each stage a string such as ``0-3,8-11``, with one range per chunk.
        mtp: Layers for multi-token prediction.

    Returns:
        The layers of every chunk of every stage.

    Raises:
        ValueError: The layers can't be split evenly, or the ranges aren't all layers once.
    """
    parts = stages * interleave
    if per_stage in (None, "auto"):
        if layers % parts:
            raise ValueError(
                f"{layers} layers can't be split evenly into {_parts(stages, interleave)}; say which are where, "
                f"in pipeline_parallel_layers_per_stage"
            )
        return Pipeline(_ranges([[layers // parts] * stages for _ in range(interleave)]), mtp)
    key = "pipeline_parallel_layers_per_stage"
    if not isinstance(per_stage, (list, tuple)) or len(per_stage) != stages:
        raise ValueError(f"{key} must be a list with one string per stage, {stages} in all, but got {per_stage!r}")
    chunks: list[list[range]] = [[] for _ in range(interleave)]
    for stage, text in enumerate(per_stage):
        found = str(text).split(",")
        if len(found) != interleave:
            raise ValueError(f"{key}: stage {stage} has {len(found)} ranges ({text!r}), but {interleave} chunks")
        for chunk, one in zip(chunks, found, strict=True):
            ends = [end.strip() for end in one.split("-")]
            if len(ends) > 2 or not all(end.isdigit() for end in ends) or int(ends[0]) > int(ends[-1]):
                raise ValueError(f"{key}: stage {stage} has {one.strip()!r}, expected a layer or a range such as '0-3'")
            chunk.append(range(int(ends[0]), int(ends[-1]) + 1))
    named = [layer for chunk in chunks for part in chunk for layer in part]
    if sorted(named) != list(range(layers)):
        raise ValueError(f"{key}: {per_stage} must name each of the {layers} layers (0 to {layers - 1}) once")
    return Pipeline(tuple(map(tuple, chunks)), mtp)


def _spread(offset: Any, stages: int, interleave: int) -> list[list[int]]:
    """Give the offset by chunk and stage."""
    rows = offset if isinstance(offset, Sequence) else [offset] * stages
    table = [list(row) if isinstance(row, Sequence) else None for row in rows]
    if all(row is None for row in table):
        table = [list(rows) for _ in range(interleave)]
    right = len(table) == interleave and all(row is not None and len(row) == stages for row in table)
    numbers = [number for row in table for number in row or ()]
    if not right or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ValueError(
            f"offset must be a whole number, a list with one per stage ({stages}), or {interleave} such lists, one per "
            f"interleave chunk, but got {offset!r}"
        )
    return [row for row in table if row is not None]


def _ranges(counts: list[list[int]]) -> tuple[tuple[range, ...], ...]:
    found, first = [], 0
    for row in counts:
        chunk = []
        for count in row:
            chunk.append(range(first, first + count))
            first += count
        found.append(tuple(chunk))
    return tuple(found)


def _parts(stages: int, interleave: int) -> str:
    return f"{stages} stages" + (f" of {interleave} chunks" if interleave > 1 else "")


def _one(offset: Offset) -> bool:
    return not isinstance(offset, Sequence) and bool(offset)
