"""MindFormers' recompute and swap settings: from them to policy files, and back where they fit."""

from hyper_parallel.policy_file.mindformers.back import mindformers_of_policy
from hyper_parallel.policy_file.mindformers.conversion import (
    Conversion,
    ConvertedRule,
    convert_mindformers,
    policy_of_mindformers,
)
from hyper_parallel.policy_file.mindformers.text import as_yaml

__all__ = [
    "Conversion",
    "ConvertedRule",
    "as_yaml",
    "convert_mindformers",
    "mindformers_of_policy",
    "policy_of_mindformers",
]
