"""The other way: from a policy file to MindFormers' settings, where they can say the same."""

import os
from typing import Any

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.mindformers.layer_policies import LayerPolicies
from hyper_parallel.policy_file.mindformers.pipeline import graph_pipeline
from hyper_parallel.policy_file.mindformers.settings import require_number
from hyper_parallel.policy_file.mindformers.targets import Dialect
from hyper_parallel.policy_file.mindformers.to_graph import graph_blocks
from hyper_parallel.policy_file.mindformers.to_pynative import pynative_blocks
from hyper_parallel.policy_file.problems import Problem, policy_error


def mindformers_of_policy(
    source: str | os.PathLike[str] | dict[str, Any],
    *,
    layers: int,
    dialect: str = "pynative",
    stages: int = 1,
    interleave: int = 1,
    offset: Any = 0,
    mtp: int = 0,
    prefetch: int = 1,
    container: str = "layers",
) -> dict[str, Any]:
    """Write a policy file as MindFormers' settings.

    Args:
        source: Path of a policy file in the native format, or its content.
        layers: Layers of the decoder.
        dialect: ``pynative`` for `recompute` and `swap`, ``graph`` for `recompute_config` and `swap_config`.
        stages: Pipeline stages; in graph mode layers are counted in each.
        interleave: Chunks of a stage.
        offset: Layers of each stage more or less than even.
        mtp: Layers for multi-token prediction, which MindFormers numbers after the decoder's.
        prefetch: How far ahead MindFormers loads, where the file has no pairs of its own.
        container: Name of the cell that holds the layers.

    Returns:
        The blocks, as a MindFormers configuration has them.

    Raises:
        TypeError: The source is neither a path nor a dict.
        ValueError: There is no such dialect.
        PolicyError: The file has mistakes, or says what MindFormers' settings can't; one line for each.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.policy_file.mindformers import mindformers_of_policy
        >>> rule = {"cells": "layers.[0-2].mlp", "policy": "must_recompute"}
        >>> mindformers_of_policy({"version": 1, "rules": [rule]}, layers=4)
        {'recompute': {'mode': 'select', 'select_module': {'mlp': ['0-2']}}}
        >>> mindformers_of_policy({"version": 1, "rules": [rule]}, layers=4, dialect="graph", stages=2)
        {'recompute_config': {'select_recompute': {'mlp': [2, 1]}}}
    """
    to = Dialect(dialect)
    read = read_policy_file(source)
    for key, value in (("layers", layers), ("stages", stages), ("interleave", interleave), ("mtp", mtp)):
        require_number(read.name, key, value)
    policies = LayerPolicies(read, layers, mtp, container)
    if to is Dialect.PYNATIVE:
        blocks = pynative_blocks(policies, prefetch)
    else:
        try:
            pipeline = graph_pipeline(layers, stages, interleave, offset, mtp=mtp)
        except ValueError as error:
            raise PolicyError(f"{read.name}: {error}") from None
        blocks = graph_blocks(policies, pipeline, prefetch)
    if policies.problems:
        raise policy_error(read.name, map(Problem, policies.problems))
    return blocks
