"""What `load_policy` accepts, and what it says about a file that is wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from hyper_parallel import CheckpointPolicy, PolicyError, load_policy
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.schema import PolicyFile
from tests.policy_file.valid_files import documents

Write = Callable[[str], Path]


def message(source: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)
    return str(caught.value)


def with_rule(**rule: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"cells": "a", "policy": "must_save"} | rule]}


@given(documents())
@settings(max_examples=50, deadline=None)
def test_only_the_swap_settings_that_are_given_count_as_given(document: dict[str, Any]) -> None:
    assert read_policy_file(document).file.swap.model_fields_set == set(document.get("swap", {}))


def test_the_smallest_file_has_a_version_alone(write: Write) -> None:
    assert read_policy_file(write("version: 1\n")).file.default is CheckpointPolicy.PREFER_SAVE


def test_a_dict_may_hold_members_of_the_enum() -> None:
    file = read_policy_file(with_rule(policy=CheckpointPolicy.MUST_SWAP)).file
    assert file.rules[0].policy is CheckpointPolicy.MUST_SWAP


def test_a_policy_may_be_written_in_any_case() -> None:
    assert read_policy_file(with_rule(policy="Must_RECOMPUTE")).file.rules[0].policy is CheckpointPolicy.MUST_RECOMPUTE


def test_a_path_may_be_given_as_a_str(write: Write) -> None:
    path = str(write("version: 1\n"))
    assert load_policy(path).source == path


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert load_policy(path).source == str(path)


def test_changing_the_dict_later_does_not_change_the_plan() -> None:
    document = with_rule()
    source = read_policy_file(document)
    document["rules"][0]["cells"] = "b"
    assert source.file.rules[0].cells == "a"


@pytest.mark.parametrize("source", [None, 3, b"policy.yaml", ["version"], PolicyFile(version=1)])
def test_a_source_of_another_type_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match=f"a path or a dict, but got {type(source).__name__}"):
        load_policy(source)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "no.yaml") == (
        f"policy file '{tmp_path}/no.yaml': it doesn't exist (a str is a path, not YAML)"
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert message(tmp_path) == f"policy file '{tmp_path}': it is a folder; give the path of a YAML file"


def test_a_path_that_the_system_refuses_is_an_error() -> None:
    assert "it can't be read: embedded null byte" in message("a\0b")


def test_a_name_that_is_too_long_is_quoted_in_short() -> None:
    text = message("a" * 5000)
    assert "can't be read: File name too long" in text
    assert len(text) < 500


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"version: 1\n# caf\xe9\n")
    assert message(path) == "policy.yaml:2:6: not UTF-8 (byte 0xe9)\n     2 | # caf\ufffd\n       |      ^"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be a mapping that begins with `version: 1`, but it is empty"),
        ("# nothing\n", "but it is empty"),
        ("- version\n", "but it holds ['version']"),
        ("version\n", "but it holds 'version'"),
        ("version: 1\nversion: 1\n", "2:1: malformed YAML: the key 'version' is given twice (first in line 1)"),
        (
            "version: 1\nswap:\n  tier: file\n  tier: host\n",
            "4:3: malformed YAML: the key 'tier' is given twice (first in line 3)",
        ),
        ("version: 1\nrules:\n  - cells: *\n", ":3:12: malformed YAML: while scanning an alias"),
        ("version: 1\nrules:\n  - cells: *.mlp\n", "a pattern that begins with * must be in quotes"),
        ("version: [1\n", "malformed YAML: while parsing a flow sequence"),
        ("version: 1\n\tdefault: must_save\n", "a tab before the text; lines are indented with spaces"),
        ("version: 1\n---\nversion: 1\n", ":2:1: malformed YAML: a file holds one document; a second one begins here"),
        ("version: 1\n? [a]\n: 1\n", ":2:3: malformed YAML: a key must be a string, but here is a list or mapping"),
        ("version: 1\nx: \x01\n", ":2:4: malformed YAML: the character 0x01 isn't allowed"),
        ("version: !!python/name:os.system\n", ":1:10: malformed YAML: the tag !!python/name:os.system isn't allowed"),
        ("version: 2026-99-99\n", "'2026-99-99' is no timestamp (month must be in 1..12); put it in quotes"),
        ("version: " + "[" * 3000, "malformed YAML: it is nested too deeply"),
    ],
)
def test_malformed_yaml_is_one_error_with_the_file_and_the_line(write: Write, text: str, expected: str) -> None:
    found = message(write(text))
    assert found.startswith("policy.yaml")
    assert expected in found
    assert found.count("policy.yaml") == 1


def test_a_merge_key_may_be_overridden(write: Write) -> None:
    text = "version: 1\nrules:\n- &a {cells: x, policy: must_save}\n- {<<: *a, cells: y}\n- {<<: *a, cells: z}\n"
    assert [rule.cells for rule in read_policy_file(write(text)).file.rules] == ["x", "y", "z"]


def test_yaml_runs_no_code(write: Write, tmp_path: Path) -> None:
    assert "malformed YAML" in message(write(f"version: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "version is missing, expected version: 1"),
        ({"version": 2}, "version: got 2, expected 1"),
        ({"version": True}, "version: got True, expected 1"),
        ({"version": 1.0}, "version: got 1.0, expected 1"),
        ({"version": "1"}, "version: got '1', expected 1"),
        ({"version": 1, "default": "must_keep"}, "default: got 'must_keep', expected one of must_save, prefer_save"),
        ({"version": 1, "default": None}, "default: got None, expected one of must_save"),
        ({"version": 1, "default": 2}, "default: got 2, expected one of must_save"),
        ({"version": 1, "rule": []}, "rule: unknown key (its value: []); did you mean 'rules' or 'rule_sets'?"),
        ({"version": 1, "planner": 3}, "planner: unknown key (its value: 3); known are version, mode, "),
        ({"version": 1, 2: 3}, "key 2: a key must be a string"),
        ({"version": 1, "rules": None}, "rules: got None, expected a list of rules"),
        ({"version": 1, "rules": {"cells": "a"}}, "rules: got {'cells': 'a'}, expected a list of rules"),
        ({"version": 1, "rules": ["a"]}, "rule 1: got 'a', expected a mapping with cells, class or layers, and policy"),
        ({"version": 1, "rules": [{"cells": "a"}]}, "rule 1, policy is missing, expected one of must_save"),
        ({"version": 1, "rules": [{"policy": "must_save"}]}, "rule 1: expected cells, class or layers"),
        ({"version": 1, "swap": None}, "swap: got None, expected a mapping with any of tier"),
        (with_rule(polcy="must_save"), "rule 1, polcy: unknown key (its value: 'must_save'); did you mean 'policy'?"),
        (with_rule(policy="must_recompute", ops={}), "rule 1, ops: a table of operators must name one, but got {}"),
        (with_rule(ops={"MatMul": "must_save"}), "but must_save replays nothing, so operators have no policies"),
        (
            with_rule(policy="must_recompute", ops={"Dropout": "must_recompute"}),
            "Dropout can't be MUST_RECOMPUTE: it is random, so that running it again would give other numbers",
        ),
        (with_rule(policy="must_recompute", ops={"BatchNorm": "must_recompute"}), "it updates moving statistics"),
        (with_rule(policy="must_recompute", ops={"Assign": "must_recompute"}), "it writes a parameter"),
        (with_rule(policy="must_recompute", ops={"Print": "must_recompute"}), "it prints"),
        (with_rule(determinism_check="all"), "determinism_check: got 'all', expected 'operators' or 'values'"),
        (
            with_rule(policy="must_swap", determinism_check="values"),
            "determinism_check: got 'values', expected a policy that replays",
        ),
        (with_rule(cells=["0-5"]), "rule 1, cells: got ['0-5'], expected a dotted path such as 'layers.*.mlp', in q"),
        (with_rule(cells="a..b"), "rule 1, cells: malformed pattern 'a..b': a segment is empty"),
        (with_rule(policy="must_recompue"), "did you mean 'must_recompute'"),
        (with_rule(policy="must-swap"), "did you mean 'must_swap'"),
        (with_rule(policy=4), "rule 1, policy: got 4, expected one of must_save"),
        (with_rule(policy=[]), "rule 1, policy: got [], expected one of must_save"),
        (with_rule(swap_inputs="yes"), "rule 1, swap_inputs: got 'yes', expected true or false"),
        (with_rule(swap_inputs=1), "rule 1, swap_inputs: got 1, expected true or false"),
        (
            with_rule(swap_inputs=True),
            "swap_inputs: got True, expected a policy that replays (must_recompute or prefer",
        ),
    ],
)
def test_a_wrong_entry_is_named_with_its_value_and_what_was_expected(document: dict[Any, Any], expected: str) -> None:
    found = message(document)
    assert found.startswith("dict: ")
    assert expected in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("window", "32MX", "got '32MX', unknown unit 'MX', expected a whole number of bytes or a string like '32MiB'"),
        ("window", "many", "got 'many', expected a whole number of bytes"),
        ("window", 0, "got 0, it should be greater than 0"),
        ("pending", -1, "got -1, expected a whole number of bytes"),
        ("min_bytes", 1.5, "got 1.5, a size is a whole number of bytes or a string like '32MiB'"),
        ("host_budget", True, "got True, a size is a whole number of bytes"),
        ("tier", "disk", "got 'disk', expected 'file' or 'host'"),
        ("folder", 3, "got 3, expected the path of a folder"),
        ("when_exhausted", "keep", "got 'keep', expected a list of recompute and keep"),
        ("when_exhausted", ["drop"], "item 1: got 'drop', expected 'recompute' or 'keep'"),
        ("windw", 1, "unknown key (its value: 1); did you mean 'window'?"),
    ],
)
def test_a_wrong_swap_setting_is_named_with_its_value_and_what_was_expected(
    key: str, value: Any, expected: str
) -> None:
    found = message({"version": 1, "swap": {key: value}})
    assert found.startswith(f"dict: swap, {key}")
    assert expected in found


def test_all_mistakes_of_a_file_are_reported_together_in_the_order_of_the_file(write: Write) -> None:
    found = message(
        write(
            "version: 2\n"
            "rules:\n"
            "  - cells: a..b\n"
            "    policy: must_swap\n"
            "    swap_inputs: true\n"
            "  - policy: keep\n"
            "swap: {window: 32MX}\n"
        )
    )
    assert re.findall(r"^policy.yaml:[0-9]+:[0-9]+: [\w ,]+(?=:| is)", found, re.M) == [
        "policy.yaml:1:10: version",
        "policy.yaml:3:12: rule 1, cells",
        "policy.yaml:5:18: rule 1, swap_inputs",
        "policy.yaml:6:5: rule 2",
        "policy.yaml:6:13: rule 2, policy",
        "policy.yaml:7:16: swap, window",
    ]
    assert found.startswith("policy.yaml has 6 errors:\n")


def test_a_mistake_is_shown_with_file_line_column_and_the_text(write: Write) -> None:
    assert message(write("version: 1\n\nswap:\n  tier: disk\n")) == (
        "policy.yaml:4:9: swap, tier: got 'disk', expected 'file' or 'host'\n"
        "     4 |   tier: disk\n"
        "       |         ^^^^"
    )


def test_a_huge_value_is_quoted_in_short() -> None:
    assert len(message({"version": 1, "rules": list(range(1000))}).splitlines()[1]) < 200
    assert len(message({"version": ["x" * 10**6]})) < 200


def test_a_value_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "version: got [[" in message({"version": loop})
