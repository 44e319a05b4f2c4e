"""`convert_mindformers`: from MindFormers' settings to a policy file, and what a reader must know about it."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.mindformers.decisions import decide, kept_operators
from hyper_parallel.policy_file.mindformers.graph import read_graph
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges, runs
from hyper_parallel.policy_file.mindformers.names import Names
from hyper_parallel.policy_file.mindformers.pipeline import Pipeline
from hyper_parallel.policy_file.mindformers.pynative import read_pynative
from hyper_parallel.policy_file.mindformers.settings import read_settings
from hyper_parallel.policy_file.mindformers.targets import Action, Dialect, Note, Reading
from hyper_parallel.policy_file.problems import policy_error

CONTAINER = "**.layers"
CONTAINER_BESIDE_MTP = "**.decoder.layers"
MTP_CONTAINER = "**.mtp.layers"


@dataclass(frozen=True)
class ConvertedRule:
    """One rule of a converted policy file, and where it is from."""

    stage: int
    """The pipeline stage whose layers it is about."""
    chunk: int
    """The interleave chunk."""
    layers: tuple[int, ...]
    """Global layer numbers."""
    rule: Mapping[str, Any]
    """The rule, as the policy file has it."""
    source: str
    """MindFormers' settings that it is from."""


@dataclass(frozen=True)
class Conversion:
    """A converted configuration."""

    source: str
    """Short name of the configuration."""
    dialect: Dialect
    pipeline: Pipeline
    rules: tuple[ConvertedRule, ...]
    notes: tuple[Note, ...]
    prefetch: tuple[Mapping[str, str], ...]
    """Layers that are loaded ahead, as the policy file has them."""
    per_chunk: bool
    """Whether the policy has one entry of `stages` per chunk, not one per stage."""

    @property
    def policy(self) -> dict[str, Any]:
        """The policy file, as a dict in the native format."""
        document: dict[str, Any] = {"version": 1, "default": "prefer_save"}
        prefetch = {"prefetch": [dict(pair) for pair in self.prefetch]} if self.prefetch else {}
        groups = [[dict(rule.rule) for rule in rules] for _, rules in self.groups()]
        if len(groups) == 1:
            return {**document, "rules": groups[0], **prefetch}
        return {**document, "stages": [{"rules": rules} for rules in groups], **prefetch}

    def groups(self) -> Iterator[tuple[str, list[ConvertedRule]]]:
        """Walk the entries of `stages`: a heading, and the rules."""
        pipeline = self.pipeline
        for chunk in range(pipeline.interleave if self.per_chunk else 1):
            for stage in range(pipeline.stages):
                of_chunk = chunk if self.per_chunk else None
                layers = in_ranges(pipeline.layers_of(stage, of_chunk)) or "none"
                heading = f"stage {stage}" + (f", chunk {chunk}" if self.per_chunk else "") + f": layers {layers}"
                yield heading, [r for r in self.rules if r.stage == stage and of_chunk in (None, r.chunk)]

    def as_json(self) -> dict[str, Any]:
        """Give all of it as plain values.

        Returns:
            The policy, the layers of each stage, the rules with their layers and sources, and the notes.
        """
        pipeline = self.pipeline
        return {
            "source": self.source,
            "dialect": self.dialect.value,
            "layers": pipeline.layers,
            "mtp_layers": pipeline.mtp,
            "stages": [pipeline.layers_of(stage) for stage in range(pipeline.stages)],
            "layers_by_chunk_and_stage": pipeline.counts,
            "rules": [asdict(rule) for rule in self.rules],
            "notes": [note._asdict() for note in self.notes],
            "policy": self.policy,
        }


def convert_mindformers(
    settings: str | os.PathLike[str] | Mapping[str, Any],
    *,
    layers: int | None = None,
    stages: int | None = None,
    interleave: int | None = None,
    offset: Any = None,
    mtp: int | None = None,
    legacy: bool | None = None,
    container: str | None = None,
    mtp_container: str = MTP_CONTAINER,
    operators: Mapping[str, str | tuple[str, ...]] | None = None,
    leave_out: Collection[str] = (),
    per_chunk: bool | None = None,
) -> Conversion:
    """Convert MindFormers' recompute and swap settings, in any of its dialects, to a policy file.

    Args:
        settings: Path of a MindFormers configuration, or its content; the blocks alone are enough.
        layers: Layers of the decoder; by default what the configuration says.
        stages: Pipeline stages; by default what the configuration says, or 1.
        interleave: Chunks of a stage; by default what the configuration says, or 1.
        offset: Layers of each stage more or less than even; by default what the configuration says, or 0.
        mtp: Layers for multi-token prediction; by default what the configuration says, or 0.
        legacy: Whether the model is one of MindFormers' old ones; by default what `use_legacy` says, or True.
        container: Dotted pattern of the cell that holds the layers.
        mtp_container: The same for layers for multi-token prediction.
        operators: Attributes that hold an operator, and what it is called in a policy file; an empty tuple says that
            the attribute is a cell.
        leave_out: Keys to leave out, which can't be converted.
        per_chunk: Whether there is one entry of `stages` per interleave chunk, for nets that hold one chunk; by
            default so for PyNative mode, whose trainer builds one net per chunk.

    Returns:
        The policy file, where each rule is from, and notes.

    Raises:
        TypeError: An argument is of another type.
        PolicyError: The configuration has mistakes, or says what can't be converted; one line for each.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.mindformers import convert_mindformers
        >>> done = convert_mindformers({"recompute_config": {"recompute": [1, 0]}}, layers=4, stages=2)
        >>> done.policy["stages"]
        [{'rules': [{'cells': '**.layers.0', 'policy': 'must_recompute'}]}, {'rules': []}]
        >>> done.rules[0].source
        'recompute_config, recompute'
    """
    found = read_settings(
        settings,
        layers=layers,
        stages=stages,
        interleave=interleave,
        offset=offset,
        mtp=mtp,
        legacy=legacy,
        leave_out=leave_out,
    )
    reading = Reading(found.dialect, found.pipeline())
    for note in found.notes:
        reading.note(*note)
    is_graph = found.dialect is Dialect.GRAPH
    further = {name: (one,) if isinstance(one, str) else one for name, one in (operators or {}).items()}
    names = Names(further, split_on_escaped_dots=is_graph)
    (read_graph if is_graph else read_pynative)(found, reading, names)
    if reading.pipeline.mtp:
        container = container or CONTAINER_BESIDE_MTP
        _note_mtp(reading, is_graph, container, mtp_container)
    elif container is None:
        text = f"layers are {CONTAINER}.N, in every cell called layers at any depth; where a net has several, name one"
        reading.note("assumed", "container", text)
    container = container or CONTAINER
    rules = _rules(reading, names, container, mtp_container)
    prefetch = tuple(
        {"load": _layer(reading, container, mtp_container, load), "at": _layer(reading, container, mtp_container, at)}
        for load, at in reading.prefetch
    )
    if not found.trains:
        reading.note("inert", "run_mode", "it is predict: nothing is kept for backward, so the rules do nothing there")
    for key in sorted(set(leave_out) - found.left_out):
        reading.problem("leave_out", f"{key} isn't a key that can't be converted here; take it out")
    for name in sorted(names.unused):
        reading.problem("operators", f"no pattern ends in {name}; take it out")
    if reading.problems:
        raise policy_error(found.name, [found.problem(key, what) for key, what in reading.problems])
    if per_chunk is None:
        per_chunk = not is_graph
    per_chunk = per_chunk and reading.pipeline.interleave > 1
    done = Conversion(
        found.name, found.dialect, reading.pipeline, tuple(rules), tuple(reading.notes), prefetch, per_chunk
    )
    _validate(done)
    return done


def policy_of_mindformers(settings: str | os.PathLike[str] | Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Convert MindFormers' settings to a policy in the native format.

    Args:
        settings: Path of a MindFormers configuration, or its content.
        **options: As `convert_mindformers` has them: `layers`, `stages`, `interleave`, `offset`, ...

    Returns:
        The policy, as `load_policy` and `apply_policy` take it.

    Raises:
        TypeError: An argument is of another type.
        PolicyError: The configuration has mistakes, or says what can't be converted.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.mindformers import policy_of_mindformers
        >>> policy_of_mindformers({"recompute": {"mode": "full", "full_recompute_layer": ["0-2"]}}, layers=4)
        {'version': 1, 'default': 'prefer_save', 'rules': [{'cells': '**.layers.[0-2]', 'policy': 'must_recompute'}]}
    """
    return convert_mindformers(settings, **options).policy


def _note_mtp(reading: Reading, is_graph: bool, container: str, mtp_container: str) -> None:
    pipeline = reading.pipeline
    text = f"the decoder's layers are {container}.N, those for multi-token prediction {mtp_container}.N"
    reading.note("assumed", "mtp", text)
    if not is_graph:
        return
    for number, target in enumerate(reading.targets):
        if target.pattern is None and pipeline.layers - 1 in target.layers:
            more = target.layers | frozenset(range(pipeline.layers, pipeline.total))
            reading.targets[number] = type(target)(target.action, None, more, target.source)
            reading.note("different", target.source, "layers for multi-token prediction get what the last layer gets")


def _rules(reading: Reading, names: Names, container: str, mtp_container: str) -> list[ConvertedRule]:
    decisions = decide(reading, names)
    kept = kept_operators(reading)
    around = {
        layer: action for action in (Action.SWAP, Action.RECOMPUTE) for layer in reading.layers_of(action, pattern=None)
    }
    pipeline = reading.pipeline
    found = []
    for cells, by_layer in decisions.items():
        groups: dict[Any, list[int]] = {}
        rules = {}
        for layer, decision in by_layer.items():
            rule = decision.rule(around.get(layer) if cells else None, kept)
            if not rule or (set(rule) == {"policy"} and not decision.whole):
                continue
            key = pipeline.place_of(layer), repr(rule), tuple(decision.sources), layer >= pipeline.layers
            groups.setdefault(key, []).append(layer)
            rules[key] = rule
        for key, layers in groups.items():
            (chunk, stage), _, sources, is_mtp = key
            for run in runs(layers):
                first = pipeline.layers if is_mtp else 0
                place = f"{mtp_container if is_mtp else container}.{_index(run, first)}"
                rule = {"cells": _cells(place, cells), **rules[key]}
                found.append(ConvertedRule(stage, chunk, tuple(run), rule, " and ".join(sources)))
    return sorted(found, key=lambda rule: (rule.stage, rule.chunk))


def _layer(reading: Reading, container: str, mtp_container: str, layer: int) -> str:
    first = reading.pipeline.layers
    return f"{container}.{layer}" if layer < first else f"{mtp_container}.{layer - first}"


def _index(run: range, first: int) -> str:
    low, high = run[0] - first, run[-1] - first
    return str(low) if low == high else f"[{low}-{high}]"


def _cells(place: str, cells: str) -> str:
    if not cells:
        return place
    if not cells.startswith("re:"):
        return f"{place}.{cells}"
    return f"re:{_as_regex(place)}\\.(?:{cells.removeprefix('re:')})"


def _as_regex(place: str) -> str:
    parts = []
    for segment in place.split("."):
        if segment == "**":
            parts.append(r"(?:.*\.)?")
            continue
        if segment.startswith("["):
            low, _, high = segment[1:-1].partition("-")
            segment = _as_regex_of_numbers(int(low), int(high))
        parts.append(segment.replace("*", r"[^.]*") + r"\.")
    return "".join(parts).removesuffix(r"\.")


def _as_regex_of_numbers(low: int, high: int) -> str:
    """Write a range of numbers, ten at a time."""
    found = []
    for tens in range(low // 10, high // 10 + 1):
        first, last = max(low - 10 * tens, 0), min(high - 10 * tens, 9)
        found.append(f"{tens or ''}[{first}-{last}]")
    return f"(?:{'|'.join(found)})"


def _validate(done: Conversion) -> None:
    """Have the native format check what was made."""
    try:
        read_policy_file(done.policy)
    except PolicyError as error:
        raise PolicyError(f"{done.source}: what it asks for can't be done here: {error}") from None
