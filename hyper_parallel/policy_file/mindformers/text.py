"""A conversion as a policy file in which every rule says where it is from."""

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from hyper_parallel.policy_file.mindformers.conversion import Conversion, ConvertedRule
from hyper_parallel.policy_file.mindformers.layer_ranges import in_ranges

_WIDTH = 116


def as_yaml(done: Conversion) -> str:
    """Write a conversion as a policy file.

    Args:
        done: The conversion.

    Returns:
        YAML in the native format: the notes as comments on top, above each rule its layers and the settings that it is
        from.
    """
    lines = [*_heading(done), "version: 1", "default: prefer_save"]
    prefetch = _list("prefetch", done.policy.get("prefetch", []))
    groups = list(done.groups())
    if len(groups) == 1:
        lines += ["rules:", *_rules(groups[0][1], done, "  ")] if groups[0][1] else ["rules: []"]
        return "\n".join([*lines, *prefetch]) + "\n"
    lines.append("stages:")
    for heading, rules in groups:
        lines.append(f"  # {heading}")
        lines += ["  - rules:", *_rules(rules, done, "      ")] if rules else ["  - rules: []"]
    return "\n".join([*lines, *prefetch]) + "\n"


def _list(key: str, items: list[Any]) -> list[str]:
    return [f"{key}:", *(f"  - {{load: '{item['load']}', at: '{item['at']}'}}" for item in items)] if items else []


def _heading(done: Conversion) -> Iterator[str]:
    pipeline = done.pipeline
    yield f"# From {done.source}, MindFormers' settings for {done.dialect.value} mode, by `hyper-parallel convert`."
    parts = f"{pipeline.layers} layers"
    if pipeline.mtp:
        parts += f" and {pipeline.mtp} for multi-token prediction, numbered after them"
    if pipeline.stages * pipeline.interleave > 1:
        parts += f", in {pipeline.stages} stages" + (
            f" of {pipeline.interleave} chunks" if pipeline.interleave > 1 else ""
        )
    yield f"# {parts}."
    yield "# Layer numbers are global: in every stage they are those of the whole net, as MindFormers counts them."
    if len(list(done.groups())) > 1:
        entry = "chunk of a stage (chunk * stages + stage)" if done.per_chunk else "stage"
        yield f"# `stages` has one entry per {entry}: apply_policy(net, ..., stage=N)."
    for note in done.notes:
        yield from textwrap.wrap(str(note), _WIDTH, initial_indent="# - ", subsequent_indent="#   ")


def _rules(rules: list[ConvertedRule], done: Conversion, indent: str) -> Iterator[str]:
    for rule in rules:
        chunk = f", chunk {rule.chunk}" if done.pipeline.interleave > 1 and not done.per_chunk else ""
        one = "layer" if len(rule.layers) == 1 else "layers"
        yield f"{indent}# {one} {in_ranges(rule.layers)}{chunk}: {rule.source}"
        text = yaml.safe_dump([dict(rule.rule)], sort_keys=False, width=1000)
        yield from textwrap.indent(text.rstrip(), indent).splitlines()
