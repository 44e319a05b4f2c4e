"""`Run`: a trace that `SwapManager().trace()` wrote, read and checked."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from hyper_parallel.core.activation_memory.swap_trace import PRODUCER, VERSION

_EXPECTED = "expected the file that SwapManager().trace(FILE) writes when it is stopped"
_MOST_ERRORS = 3


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True)


class About(_Read):
    """The name of a track, or where it stands."""

    ph: Literal["M"]
    name: str
    tid: int
    args: dict[str, Any]


class SpanDetails(_Read):
    """What is known of a span; a field that doesn't belong to its kind is empty."""

    bytes: int = Field(default=0, ge=0)
    cell: str = ""


class Span(_Read):
    """Something that took a while; times in microseconds since the trace began."""

    ph: Literal["X"]
    cat: Literal["compute", "wait", "offload", "load"]
    name: str
    tid: int
    ts: float = Field(ge=0)
    dur: float = Field(ge=0)
    args: SpanDetails

    @property
    def begin(self) -> float:
        """Seconds since the trace began."""
        return self.ts / 1e6

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.dur / 1e6


class Places(_Read):
    """Bytes of swapped tensors in every place."""

    resident: int
    pending: int
    window: int
    host: int


class Levels(_Read):
    """How much lay where from a moment on."""

    ph: Literal["C"]
    ts: float = Field(ge=0)
    args: Places

    @property
    def at(self) -> float:
        """Seconds since the trace began."""
        return self.ts / 1e6


class _Other(_Read):
    producer: Literal["hyper_parallel"]
    version: Literal[1]
    seconds: float = Field(ge=0)
    settings: SwapSettings
    limit: int
    stats: SwapStats | None


Event = Annotated[About | Span | Levels, Field(discriminator="ph")]


class _File(_Read):
    traceEvents: list[Event]  # the format's name, as the next
    otherData: _Other

    @model_validator(mode="after")
    def _names_every_track(self) -> "_File":
        abouts = [event for event in self.traceEvents if isinstance(event, About)]
        named = {event.tid for event in abouts if event.name == "thread_name"}
        unnamed = sorted({event.tid for event in self.traceEvents if isinstance(event, Span)} - named)
        if unnamed:
            raise ValueError(f"the tracks {unnamed} have spans, but no name (an event with ph 'M')")
        return self


@dataclass(frozen=True)
class Run:
    """What happened while a trace was recorded."""

    begin: float
    """Seconds since the trace began."""
    seconds: float
    spans: list[Span]
    levels: list[Levels]
    tracks: dict[int, str]
    """The names of the tracks, by their `tid`, from top to bottom."""
    settings: SwapSettings
    limits: dict[str, int]
    """Most bytes in a place; `resident` has no limit of its own."""
    stats: SwapStats | None
    """Counters since `SwapManager().reset()`; None if a failed operator made it impossible to read them."""

    def of(self, track: str) -> list[Span]:
        """The spans of a kind.

        Args:
            track: ``compute``, ``wait``, ``offload`` or ``load``.
        """
        return [span for span in self.spans if span.cat == track]

    def between(self, begin: float, end: float) -> "Run":
        """The part of the run between two moments; `stats` stays that of the whole.

        Args:
            begin: Seconds since the trace began.
            end: Seconds since the trace began.

        Returns:
            What had not ended by `begin` and has begun by `end`.

        Raises:
            ValueError: The run has no such part.
        """
        if not 0 <= begin < end or begin >= self.seconds:
            raise ValueError(
                f"the trace lasts from 0 to {self.seconds:.3f} seconds and has no part from {begin} to {end}"
            )
        end = min(end, self.seconds)
        before = [levels for levels in self.levels if levels.at < begin][-1:]
        return replace(
            self,
            begin=begin,
            seconds=end - begin,
            spans=[span for span in self.spans if span.begin + span.seconds >= begin and span.begin <= end],
            levels=[*before, *(levels for levels in self.levels if begin <= levels.at <= end)],
        )


def read_run(file: "str | os.PathLike[str]") -> Run:
    """Read a trace and check it.

    Args:
        file: What `SwapManager().trace(file)` wrote.

    Returns:
        The run.

    Raises:
        ValueError: It can't be read, or is something else; the message names the file and what was expected.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import pathlib, tempfile
        >>> from hyper_parallel import SwapManager
        >>> from hyper_parallel.report.run import read_run
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> with SwapManager().trace(file):
        ...     pass  # training steps
        >>> read_run(file).limits["window"]
        25165824
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from error
    if not content.strip():
        raise ValueError(f"{file}: is empty, as a trace is until it is stopped; {_EXPECTED}")
    try:
        found = json.loads(content)
    except ValueError as error:  # no UTF-8, too
        raise ValueError(f"{file}: is no JSON: {error}; {_EXPECTED}") from error
    other = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(other, dict) or other.get("producer") != PRODUCER:
        kind = "a trace of something else" if _is_a_trace(found) else "no trace"
        raise ValueError(f"{file}: is {kind}: it has no otherData of {PRODUCER}'s; {_EXPECTED}")
    if other.get("version") != VERSION:
        raise ValueError(
            f"{file}: is a trace of version {other.get('version')!r}, but this hyper_parallel reads {VERSION}; use the "
            f"hyper_parallel that wrote it"
        )
    try:
        return _run_of(_File.model_validate(found))
    except ValidationError as error:
        raise ValueError(
            f"{file}: is damaged, or written by another hyper_parallel: {_in_words(error)}; {_EXPECTED}"
        ) from error


def _run_of(file: _File) -> Run:
    events, other = file.traceEvents, file.otherData
    names = [event for event in events if isinstance(event, About) and event.name == "thread_name"]
    return Run(
        begin=0.0,
        seconds=other.seconds,
        spans=[event for event in events if isinstance(event, Span)],
        levels=[event for event in events if isinstance(event, Levels)],
        tracks={event.tid: str(event.args.get("name", event.tid)) for event in names},
        settings=other.settings,
        limits={"pending": other.settings.pending, "window": other.settings.window, "host": other.limit},
        stats=other.stats,
    )


def _is_a_trace(found: Any) -> bool:
    events = found.get("traceEvents") if isinstance(found, dict) else found
    return isinstance(events, list) and any(isinstance(event, dict) and "ph" in event for event in events)


def _in_words(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    shown = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors[:_MOST_ERRORS]]
    rest = len(errors) - len(shown)
    return "; ".join(shown) + (f"; {rest} more" if rest else "")
