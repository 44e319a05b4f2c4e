"""Random valid files: they are described, written and read again as the same plan, and the schema knows them."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from hyper_parallel import load_policy
from hyper_parallel.policy_file.schema import json_schema
from tests.policy_file.valid_files import documents

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "policies").glob("*.yaml"))


@given(documents())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_valid_file_is_described_written_and_read_as_the_same_plan(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    plan = load_policy(document)
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(plan.to_yaml(), encoding="utf-8")
    again = load_policy(path)
    assert again.to_plain_values() == plan.to_plain_values()
    assert again.describe().splitlines()[1:] == plan.describe().splitlines()[1:]
    assert load_policy(yaml.safe_load(again.to_yaml())).to_yaml() == plan.to_yaml()


@given(documents())
@settings(max_examples=100, deadline=None)
def test_the_schema_accepts_what_is_written(document: dict[str, Any]) -> None:
    VALIDATOR.validate(load_policy(document).to_plain_values())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def described(schema: dict[str, Any]) -> bool:
    return all("description" in each or "$ref" in each or "const" in each for each in schema["properties"].values())


def test_the_schema_describes_every_key() -> None:
    assert described(SCHEMA)
    for name, part in SCHEMA["$defs"].items():
        assert described(part), name


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2},
        {"version": 1, "planner": 3},
        {"version": 1, "mode": "fast"},
        {"version": 1, "default": "keep"},
        {"version": 1, "rules": {"cells": "a"}},
        {"version": 1, "rules": [{"policy": "must_save"}]},
        {"version": 1, "rules": [{"cells": "a"}]},
        {"version": 1, "rules": [{"cells": "a", "policy": "keep"}]},
        {"version": 1, "rules": [{"cells": "a", "policy": "must_save", "polcy": 1}]},
        {"version": 1, "rules": [{"layers": True, "policy": "must_save"}]},
        {"version": 1, "rules": [{"layers": "all", "policy": "must_save"}]},
        {"version": 1, "rules": [{"cells": "a", "preset": "selectiv"}]},
        {"version": 1, "rules": [{"cells": "a", "policy": "must_swap", "tensors": {"dtype": "half"}}]},
        {"version": 1, "rules": [{"use": 3}]},
        {"version": 1, "rules": [{"use": "a", "policy": "must_save"}]},
        {"version": 1, "stages": []},
        {"version": 1, "prefetch": [{"load": "a"}]},
        {"version": 1, "swap": {"tier": "disk"}},
        {"version": 1, "swap": {"window": 1.5}},
    ],
)
def test_the_schema_refuses_what_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (what it says is tested elsewhere)
        load_policy(document)
    assert not VALIDATOR.is_valid(document)
