"""What MindFormers' settings ask for, in one form for all dialects: an action, a pattern inside a layer, and layers."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hyper_parallel.policy_file.mindformers.pipeline import Pipeline


class Action(enum.Enum):
    """What happens to what a target names."""

    RECOMPUTE = "recompute"
    RECOMPUTE_COMMUNICATION = "recompute communication"
    SWAP = "swap"
    EXCLUDE = "don't recompute"
    EXCLUDE_COMMUNICATION = "don't recompute communication"


class Dialect(enum.Enum):
    """A way in which MindFormers' settings are written."""

    GRAPH = "graph"
    """`recompute_config` and `swap_config`, with counts per stage."""
    PYNATIVE = "pynative"
    """`recompute`, `recompute_comm` and `swap`, with layer numbers."""


@dataclass(frozen=True)
class Target:
    """One setting, worked out to layers."""

    action: Action
    pattern: str | None
    """Regular expression for what is meant inside a layer, as the setting has it; None is the layer itself."""
    layers: frozenset[int]
    """Global numbers; never empty."""
    source: str
    """The setting, for messages: `recompute_config, select_recompute`."""


class Note(NamedTuple):
    """What a reader must know beside the rules."""

    kind: str
    """`inert`: the key has no effect in MindFormers; `meaning`: it means something else beside another key;
    `unapplied`: MindFormers reads it and applies it nowhere; `different`: it is not quite the same here; `assumed`:
    what the file leaves open, and how it was read."""
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.key}: {self.text}"


@dataclass
class Reading:
    """What was read of a file: targets, notes and problems, in the order of the settings."""

    dialect: Dialect
    pipeline: Pipeline
    targets: list[Target] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """The key with its place, and what is wrong with it."""
    prefetch: list[tuple[int, int]] = field(default_factory=list)
    """Layers that are loaded ahead, and the later layers that backward has reached by then."""
    kept_substrings: tuple[str, ...] = ()
    """`exclude_op` of MindFormers 2.0: operators whose names contain one of these aren't recomputed anywhere."""

    def add(self, action: Action, pattern: str | None, layers: Iterable[int], source: str) -> None:
        """Add a target, unless it is about no layer."""
        chosen = frozenset(layers)
        if chosen:
            self.targets.append(Target(action, pattern, chosen, source))

    def note(self, kind: str, key: str, text: str) -> None:
        """Add a note, once."""
        note = Note(kind, key, text)
        if note not in self.notes:
            self.notes.append(note)

    def problem(self, key: str, text: str) -> None:
        """Add what is wrong with a key."""
        self.problems.append((key, text))

    def layers_of(self, *actions: Action, pattern: Any = ...) -> frozenset[int]:
        """Give the layers of all targets with one of these actions; of one pattern, if it is given."""
        chosen = [t.layers for t in self.targets if t.action in actions and pattern in (..., t.pattern)]
        return frozenset().union(*chosen)
