"""Values of `recompute_config`: how many layers of each stage, or which layers, by MindFormers' rules."""

from collections.abc import Sequence
from typing import Any

from hyper_parallel.policy_file.mindformers.targets import Reading


def counted_layers(reading: Reading, value: Any, key: str, *, zero_bubble_v: bool = False) -> frozenset[int]:
    """Give the layers that a value of `recompute_config` means without swapping: the first ones of each stage.

    Args:
        reading: Has the pipeline; gets notes and problems.
        value: A bool; a list of counts (or bools) per stage; or such lists per interleave chunk.
        key: The setting, for messages.
        zero_bubble_v: Whether this is the schedule that reads lists per chunk only.

    Returns:
        The layers; none where the value is wrong, which is a problem of the reading then.
    """
    pipeline = reading.pipeline
    sizes = pipeline.counts
    if isinstance(value, bool):
        chosen = sizes if value else [[0] * len(row) for row in sizes]
    elif not isinstance(value, (list, tuple)):
        reading.problem(key, f"got {value!r}, expected true, false, or a list of counts per stage")
        return frozenset()
    elif all(isinstance(item, int) for item in value):
        if zero_bubble_v and value:
            reading.problem(key, f"got {list(value)}, but zero_bubble_v takes one list per interleave chunk")
        chosen = _dealt(reading, value, key)
    else:
        chosen = _by_chunk(reading, value, key)
    return frozenset(
        layer
        for counts, chunk in zip(chosen, pipeline.chunks, strict=False)
        for count, part in zip(counts, chunk, strict=False)
        for layer in part[:count]
    )


def _dealt(reading: Reading, value: Sequence[int], key: str) -> list[list[int]]:
    """Deal the counts of each stage to its chunks, one layer after the other."""
    pipeline = reading.pipeline
    dealt = [[0] * pipeline.stages for _ in range(pipeline.interleave)]
    if len(value) > pipeline.stages:
        reading.problem(key, f"{list(value)} is about {len(value)} stages, but there {_are(pipeline.stages)}")
        return dealt
    if len(value) < pipeline.stages and value:
        reading.note("assumed", key, f"stages {len(value)} to {pipeline.stages - 1} aren't in the list and get none")
    for stage, wanted in enumerate(value):
        room = [row[stage] for row in pipeline.counts]
        left = sum(room) if wanted is True else _checked(reading, wanted, sum(room), key, f"stage {stage}")
        while left:
            for chunk, size in enumerate(room):
                if left and dealt[chunk][stage] < size:
                    dealt[chunk][stage] += 1
                    left -= 1
    return dealt


def _by_chunk(reading: Reading, value: Sequence[Any], key: str) -> list[list[int]]:
    pipeline = reading.pipeline
    if len(value) != pipeline.interleave:
        hint = "" if pipeline.interleave > 1 else " (several need pipeline_interleave, or --interleave)"
        reading.problem(
            key, f"{list(value)} is about {len(value)} interleave chunks, but there {_are(pipeline.interleave)}{hint}"
        )
        return []
    found = []
    for chunk, (row, sizes) in enumerate(zip(value, pipeline.counts, strict=True)):
        where = f"chunk {chunk}"
        if isinstance(row, bool):
            found.append(sizes if row else [0] * len(sizes))
        elif not isinstance(row, (list, tuple)) or not all(isinstance(item, int) for item in row):
            reading.problem(key, f"{where} is {row!r}, expected true, false, or a list of counts per stage")
        elif len(row) != pipeline.stages:
            reading.problem(key, f"{where}: {list(row)} is about {len(row)} stages, but there {_are(pipeline.stages)}")
        else:
            found.append(
                [
                    (size if item else 0)
                    if isinstance(item, bool)
                    else _checked(reading, item, size, key, f"{where}, stage {stage}")
                    for stage, (item, size) in enumerate(zip(row, sizes, strict=True))
                ]
            )
    return found


def _checked(reading: Reading, count: int, most: int, key: str, where: str) -> int:
    if count < 0:
        reading.problem(key, f"{where} has {count}, expected a count of layers from 0 on")
        return 0
    if count > most:
        reading.note("different", key, f"{where} has {count}, but only {most} layers; MindFormers takes all {most}")
    return min(int(count), most)


def listed_layers(reading: Reading, value: Any, key: str) -> frozenset[int]:
    """Give the layers that a value means where swapping is on: those with these numbers.

    Args:
        reading: Has the pipeline; gets problems.
        value: A bool, or a list of global layer numbers.
        key: The setting, for messages.

    Returns:
        The layers; none where the value is wrong, which is a problem of the reading then.
    """
    layers = reading.pipeline.layers
    if isinstance(value, bool):
        return frozenset(range(layers)) if value else frozenset()
    if not isinstance(value, (list, tuple)):
        reading.problem(key, f"got {value!r}, expected true, false, or a list of layer numbers")
        return frozenset()
    for item in value:
        if isinstance(item, bool):
            reading.problem(
                key,
                f"{list(value)} has {str(item).lower()} where a layer number is meant: with swap on, a list names "
                f"layers (0 to {layers - 1}), and MindFormers would take {str(item).lower()} for layer {int(item)}",
            )
            return frozenset()
        if not isinstance(item, int):
            reading.problem(key, f"{list(value)} has {item!r}, expected layer numbers from 0 to {layers - 1}")
            return frozenset()
        if not 0 <= item < layers:
            reading.problem(key, f"layer {item} isn't there: the net has {layers} layers, 0 to {layers - 1}")
            return frozenset()
    return frozenset(value)


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"
