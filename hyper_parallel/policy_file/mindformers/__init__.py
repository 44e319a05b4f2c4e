"""MindFormers' recompute and swap settings: from them to policy files, and back where they fit."""

from hyper_parallel.policy_file.mindformers.conversion import (
    Conversion,
    ConvertedRule,
    convert_mindformers,
    policy_of_mindformers,
)

__all__ = ["Conversion", "ConvertedRule", "convert_mindformers", "policy_of_mindformers"]
