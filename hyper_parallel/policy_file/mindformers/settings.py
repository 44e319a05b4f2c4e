"""A MindFormers configuration: which blocks are ours, in which dialect, and what it says about layers and stages."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.document import DICT_SOURCE, text_of
from hyper_parallel.policy_file.mindformers.pipeline import Pipeline, graph_pipeline, pynative_pipeline
from hyper_parallel.policy_file.mindformers.targets import Dialect, Reading
from hyper_parallel.policy_file.problems import Problem, policy_error
from hyper_parallel.policy_file.yaml_text import YamlText

GRAPH_BLOCKS = ("recompute_config", "swap_config")
PYNATIVE_BLOCKS = ("recompute", "recompute_comm", "swap")

_LAYER_KEYS = ("num_layers", "num_hidden_layers", "n_layer")
_MTP_KEYS = ("mtp_num_layers", "num_nextn_predict_layers", "mtp_depth")
_BOUNDS = {"layers": (1, 10_000), "stages": (1, 1_000), "interleave": (1, 100), "mtp": (0, 100)}
"""Least and most of each number: a file can't keep a reader busy for long."""
_OF_PYNATIVE = {"mode", "full_recompute_layer", "select_module", "exclude_op"}
_OF_RECOMPUTE = {
    "select_recompute",
    "select_comm_recompute",
    "select_recompute_exclude",
    "select_comm_recompute_exclude",
    "recompute_slice_activation",
    "mp_comm_recompute",
    "parallel_optimizer_comm_recompute",
}
_OF_SWAP = {"cpu_offloading", "default_prefetch", "layer_swap", "cpu_offloading_num_layers", "op_swap"}


@dataclass
class Settings:
    """The blocks of a configuration, and what else it says that matters for them."""

    name: str
    """Short name for messages: the file's name, or `dict`."""
    dialect: Dialect
    blocks: Mapping[str, Any]
    layers: int | None
    stages: int
    interleave: int
    offset: Any
    per_stage: Any
    zero_bubble_v: bool
    mtp: int
    legacy: bool
    """Whether the model is one of the old ones (`use_legacy`); graph mode's default patterns depend on it."""
    trains: bool
    """Whether the configuration trains at all."""
    leave_out: Collection[str] = ()
    """Keys that the user wants left out, since they can't be converted."""
    left_out: set[str] = field(default_factory=set)
    """Those of them that were."""
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    text: YamlText | None = None
    """The file's text, with the places of the values in it."""

    def pipeline(self) -> Pipeline:
        """Split the layers into stages.

        Returns:
            The layers of every chunk of every stage.

        Raises:
            PolicyError: The number of layers isn't known, or they can't be split.
        """
        if self.layers is None:
            raise PolicyError(f"{self.name}: it says nowhere how many layers the model has; give layers= (--layers N)")
        try:
            if self.dialect is Dialect.PYNATIVE:
                return pynative_pipeline(self.layers, self.stages, self.interleave, self.per_stage, mtp=self.mtp)
            return graph_pipeline(
                self.layers,
                self.stages,
                self.interleave,
                self.offset,
                zero_bubble_v=self.zero_bubble_v,
                mtp=self.mtp,
            )
        except ValueError as error:
            raise PolicyError(f"{self.name}: {error}") from None

    def problem(self, key: str, what: str) -> Problem:
        """Say what is wrong, and where in the file.

        Args:
            key: The key with its place, such as ``swap_config, op_swap, entry 0, layers``.
            what: What is wrong with it.

        Returns:
            The problem; without a position where the source is a dict, or the key isn't in it.
        """
        loc = [_part(each) for each in key.split(", ")]
        if self.text is not None and loc[0] not in self.text.content:
            del loc[0]  # the content of one block was given
        inside = self.text is not None and bool(loc) and loc[0] in self.text.content
        return Problem(f"{key}: {what}", self.text.position(tuple(loc)) if self.text is not None and inside else None)

    def refuse(self, reading: Reading, name: str, key: str, why: str) -> None:
        """Say that a key can't be converted: a problem, or a note if the user has it left out.

        Args:
            reading: Gets the problem or the note.
            name: The key, as the user would name it.
            key: The key with its place, for messages.
            why: Why it can't be converted.
        """
        if name in self.leave_out:
            self.left_out.add(name)
            reading.note("left out", key, why)
        else:
            reading.problem(key, f"{why}; to convert the rest without it, give leave_out={name} (--leave-out {name})")


def read_settings(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    layers: int | None = None,
    stages: int | None = None,
    interleave: int | None = None,
    offset: Any = None,
    mtp: int | None = None,
    legacy: bool | None = None,
    leave_out: Collection[str] = (),
) -> Settings:
    """Find MindFormers' settings in a configuration.

    What is given here goes before what the configuration says.

    Args:
        source: Path of a YAML file, or its content; the whole configuration, or only the blocks, or what is in one.
        layers: Layers of the decoder.
        stages: Pipeline stages.
        interleave: Chunks of a stage.
        offset: Layers of each stage more or less than even.
        mtp: Layers for multi-token prediction.
        legacy: Whether the model is one of the old ones.
        leave_out: Keys to leave out if they can't be converted.

    Returns:
        The settings.

    Raises:
        TypeError: The source is neither a path nor a mapping, or a number is none.
        PolicyError: The file can't be read, or holds no such settings, or those of two dialects.
    """
    name, content, text = _content_of(source)
    blocks, dialect = _blocks(name, content)
    model = _below(content, "model", "model_config") or _below(content, "model")
    parallel = _below(content, "parallel_config")
    pynative = _below(content, "parallelism")
    schedule = _below(content, "parallel", "pipeline_config")
    found = Settings(
        name=name,
        dialect=dialect,
        blocks=blocks,
        layers=_first(model, _LAYER_KEYS),
        stages=1,
        interleave=1,
        offset=model.get("offset", 0),
        per_stage=pynative.get("pipeline_parallel_layers_per_stage"),
        zero_bubble_v=schedule.get("pipeline_scheduler") == "zero_bubble_v",
        mtp=_first(model, _MTP_KEYS) or 0,
        legacy=content.get("use_legacy", True) if legacy is None else legacy,
        trains=content.get("run_mode") != "predict",
        leave_out=leave_out,
        text=text,
    )
    if dialect is Dialect.PYNATIVE:
        found.stages = pynative.get("pipeline_parallel") or 1
        found.interleave = pynative.get("pipeline_parallel_interleave_num") or 1
    else:
        found.stages = parallel.get("pipeline_stage") or 1
        wanted = model.get("pp_interleave_num") or 1
        if schedule.get("pipeline_interleave"):
            found.interleave = wanted
        elif wanted != 1 and interleave is None:
            why = f"{wanted} counts only if parallel.pipeline_config.pipeline_interleave is true; it isn't, so 1 is"
            found.notes.append(("inert", "pp_interleave_num", why))
    for key, value in (("layers", layers), ("stages", stages), ("interleave", interleave), ("mtp", mtp)):
        if value is not None:
            before = getattr(found, key)
            if key == "layers" and before not in (None, value):
                found.notes.append(("assumed", key, f"{value}, as given; the file says {before}"))
            setattr(found, key, value)
        require_number(name, key, getattr(found, key))
    if dialect is Dialect.PYNATIVE and (offset is not None or legacy is not None):
        what = "offset" if offset is not None else "legacy"
        where = "; which layers are in which stage stands in parallelism, pipeline_parallel_layers_per_stage"
        raise PolicyError(f"{name}: {what} is for graph mode, but this is PyNative mode{where if offset else ''}")
    if offset is not None:
        found.offset = offset
    if "use_legacy" not in content and legacy is None and "recompute_config" in blocks:
        found.notes.append(("assumed", "use_legacy", "true, MindFormers' default: the file doesn't say"))
    if _below(content, "optimizer").get("swap"):
        found.notes.append(
            ("different", "optimizer, swap", "it is about the optimizer's state, and stays MindFormers'")
        )
    return found


def _part(text: str) -> int | str:
    """Read a part of a place: a key, `entry 3` of a list, or a pattern in quotes."""
    if text.startswith("entry "):
        return int(text.removeprefix("entry "))
    return text[1:-1] if text[:1] == text[-1:] == "'" else text.split(" ")[0]


def _content_of(source: Any) -> tuple[str, Mapping[str, Any], YamlText | None]:
    if isinstance(source, Mapping):
        return DICT_SOURCE, source, None
    if not isinstance(source, (str, os.PathLike)) or not isinstance(os.fspath(source), str):
        raise TypeError(f"a configuration is given as a path or a dict, but got {type(source).__name__}")
    path = Path(source)
    text = YamlText(text_of(path, path.name), path.name)
    if text.problems:
        raise policy_error(path.name, text.problems)
    if not isinstance(text.content, dict):
        what = "it is empty" if text.content is None else f"it holds a {type(text.content).__name__}"
        raise PolicyError(f"{path.name} must be a mapping, as MindFormers' configurations are, but {what}")
    return path.name, text.content, text


def _blocks(name: str, content: Mapping[str, Any]) -> tuple[dict[str, Any], Dialect]:
    """Find the blocks; where only the content of one is given, name it."""
    graph = {key: content[key] for key in GRAPH_BLOCKS if key in content}
    pynative = {key: content[key] for key in PYNATIVE_BLOCKS if isinstance(content.get(key), Mapping)}
    bare = _bare(content)
    found = [blocks for blocks in (graph, pynative, bare) if blocks]
    if not found:
        known = ", ".join((*GRAPH_BLOCKS, *PYNATIVE_BLOCKS))
        raise PolicyError(f"{name}: there is nothing to convert; expected one of the blocks {known}")
    if len(found) > 1:
        raise PolicyError(
            f"{name}: {', '.join(found[0])} and {', '.join(found[1])} are two dialects, for graph mode and for "
            f"PyNative mode; convert one at a time"
        )
    for key, block in found[0].items():
        if block is not None and not isinstance(block, Mapping):
            raise PolicyError(f"{name}: {key} must be a mapping, but is {block!r}")
    is_pynative = bool(pynative) or bool(set(bare) & set(PYNATIVE_BLOCKS))
    return found[0], Dialect.PYNATIVE if is_pynative else Dialect.GRAPH


def _bare(content: Mapping[str, Any]) -> dict[str, Any]:
    if set(content) & _OF_PYNATIVE:
        return {"recompute": content}
    recompute = {key for key in ("recompute",) if key in content and not isinstance(content[key], Mapping)}
    recompute |= set(content) & _OF_RECOMPUTE
    swap = {key for key in ("swap",) if key in content and not isinstance(content[key], Mapping)}
    swap |= set(content) & _OF_SWAP
    parts = {"recompute_config": recompute, "swap_config": swap}
    return {block: {key: content[key] for key in content if key in keys} for block, keys in parts.items() if keys}


def _below(content: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for key in path:
        below = content.get(key)
        content = below if isinstance(below, Mapping) else {}
    return content


def _first(model: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((model[key] for key in keys if model.get(key) is not None), None)


def require_number(name: str, key: str, value: Any) -> None:
    """Check a number of layers, stages, chunks, or layers for multi-token prediction.

    Args:
        name: The file, for messages.
        key: `layers`, `stages`, `interleave` or `mtp`.
        value: The number; None: it isn't known.

    Raises:
        TypeError: It is no whole number.
        PolicyError: It is too small, or larger than any net has.
    """
    if value is None:
        return
    least, most = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {key} must be a whole number, but is {value!r}")
    if not least <= value <= most:
        raise PolicyError(f"{name}: {key} must be at least {least} and at most {most:,}, but is {value}")
