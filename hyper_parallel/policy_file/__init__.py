"""Policy files: YAML (or a dict) to a validated plan, and the plan to policies on a net's cells."""

from hyper_parallel.graph.verify import verify_policy
from hyper_parallel.policy_file.plan import PolicyPlan, apply_policy, load_policy
from hyper_parallel.policy_file.resolve import PlanRow
from hyper_parallel.policy_file.rule import Rule
from hyper_parallel.policy_file.schema import PolicyFile, json_schema

__all__ = [
    "PlanRow",
    "PolicyFile",
    "PolicyPlan",
    "Rule",
    "apply_policy",
    "json_schema",
    "load_policy",
    "verify_policy",
]
