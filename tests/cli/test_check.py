"""``hyper-parallel check``."""

import json

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.commands import command
from tests.cli.models import assert_refused, module_in

POLICY = """
version: 1
rules:
  - cells: "layers.*"
    policy: must_recompute
    swap_inputs: true
  - cells: "layers.0"
    policy: must_swap
"""

MODEL = """
from mindspore import Tensor, nn

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(2)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build():
    return Net()

def build_with_inputs():
    return Net(), (Tensor([1.0]),)

def build_number():
    return 3

def build_wrong_tuple():
    return Net(), Tensor([1.0])

def build_prints():
    print("building")
    return Net()

def build_exits():
    raise SystemExit(0)

def build_fails():
    raise KeyError("no such size")

class Holder:
    build = staticmethod(build)

size = 3
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A function that runs the command in a folder with a policy file and a module `{module}`."""
    module = module_in(tmp_path, MODEL, monkeypatch)
    (tmp_path / "policy.yaml").write_text(POLICY)

    def run(policy="policy.yaml", model="{module}:build", *options):
        return CliRunner().invoke(command, ["check", policy, "--model", model.format(module=module), *options])

    return run


@pytest.mark.parametrize("factory", ["build", "build_with_inputs", "Holder.build"])
def test_the_plan_is_printed_as_a_table(check, factory):
    result = check("policy.yaml", "{module}:" + factory)
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if "layers." in line}
    assert "must_swap" in lines["layers.0"]
    assert "rule 2" in lines["layers.0"]
    assert "must_recompute" in lines["layers.1"]


def test_json_has_the_rows_and_the_notes(check):
    result = check("policy.yaml", "{module}:build", "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert [(row["path"], row["policy"], row["swap_inputs"]) for row in plan["rows"]] == [
        ("layers.0", "must_swap", False),
        ("layers.1", "must_recompute", True),
    ]
    assert plan["notes"]


def test_what_a_factory_prints_does_not_get_into_the_json(check):
    result = check("policy.yaml", "{module}:build_prints", "--json")
    assert json.loads(result.stdout)["rows"]
    assert "building" in result.stderr


def test_nothing_is_attached_by_a_check(check):
    assert check().stdout == check().stdout


def test_an_unmatched_rule_is_named(check, tmp_path):
    (tmp_path / "policy.yaml").write_text('version: 1\nrules: [{cells: "blocks.*", policy: must_swap}]\n')
    assert_refused(check(), "rule 1", "blocks.*")


def test_an_unknown_key_is_named(check, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\nruless: []\n")
    assert_refused(check(), "ruless")


def test_malformed_yaml_is_refused(check, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: [1\n")
    assert_refused(check(), "policy.yaml")


def test_a_missing_policy_file_is_named(check):
    assert_refused(check("nowhere.yaml"), "nowhere.yaml")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{module}", "module:factory"),
        (":build", "module:factory"),
        ("{module}:", "module:factory"),
        ("there_is_no_such_model:build", "can't import there_is_no_such_model"),
        ("{module}_broken:build", "there_is_no_such_module"),
        ("..relative:build", "can't import"),
        ("{module}:rebuild", "has no rebuild"),
        ("{module}:size", "must be callable, but is a int"),
        ("{module}:build_number", "must return a Cell, or (Cell, tuple of inputs), but returned a int"),
        ("{module}:build_wrong_tuple", "but returned (Net, Tensor)"),
        ("{module}:build_exits", "build_exits() raised SystemExit: 0"),
        ("{module}:build_fails", "build_fails() raised KeyError: 'no such size'"),
    ],
)
def test_a_model_that_can_not_be_made_is_refused(check, model, expected):
    assert_refused(check("policy.yaml", model), expected)


def test_without_a_model_the_file_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICY)
    result = CliRunner().invoke(command, ["check", "policy.yaml"])
    assert result.exit_code == 0, result.stderr
    assert "rule 1   layers.*        must_recompute + swapped inputs" in result.stdout.splitlines()
    result = CliRunner().invoke(command, ["check", "policy.yaml", "--json"])
    assert json.loads(result.stdout)["policy"]["rules"][1] == {"cells": "layers.0", "policy": "must_swap"}


def test_the_stage_is_given_for_a_file_with_stages(check, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\nstages: [{}, {rules: [{cells: layers.1, policy: must_swap}]}]\n")
    assert "layers.1" in check("policy.yaml", "{module}:build", "--stage", "1").stdout
    assert_refused(check(), "policy.yaml has rules for 2 stages, 0 to 1, but no stage was given")
    assert_refused(check("policy.yaml", "{module}:build", "--stage", "2"), "but the stage is 2")
    assert_refused(check("policy.yaml", "{module}:build", "--stages", "1"), "2 stages, more than the pipeline, which h")


def test_mistakes_are_printed_as_json(check, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\ndefault: keep\nrules: [{cells: blocks.*, policy: must_swap}]\n")
    result = check("policy.yaml", "{module}:build", "--json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["file"], problem["line"], problem["column"]) == ("policy.yaml", 2, 10)
    assert problem["message"].startswith("default: got 'keep', expected one of must_save")


def test_rules_that_do_not_fit_the_model_are_printed_as_json(check, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\nrules: [{cells: blocks.*, policy: must_swap}]\n")
    result = check("policy.yaml", "{module}:build", "--json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["line"], problem["column"]) == (2, 17)


def test_help_says_that_code_is_executed():
    result = CliRunner().invoke(command, ["check", "--help"])
    assert result.exit_code == 0
    assert "executes" in result.stdout
