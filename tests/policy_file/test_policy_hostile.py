"""Files that are broken, huge or hostile: one clear message each, at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hyper_parallel import PolicyError, load_policy
from hyper_parallel.policy_file import yaml_text
from hyper_parallel.policy_file.regular import RegularExpression

Write = Callable[[str], Path]


@pytest.fixture(params=[yaml.SafeLoader, yaml.CSafeLoader], ids=["python", "libyaml"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parsers that PyYAML may have."""
    monkeypatch.setattr(yaml_text, "Parser", request.param)


def message(path: Path) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    return str(caught.value)


def laughs(levels: int) -> str:
    lines = [f"a0: &a0 [{', '.join(['lol'] * 9)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "version: 1\n" + "\n".join(lines) + "\n"


def test_a_billion_laughs_fail_at_once_where_they_become_too_many(write: Write) -> None:
    found = message(write(laughs(12)))
    assert "malformed YAML: it has too many values: more than 100,000 with aliases written out" in found
    assert found.startswith("policy.yaml:7:15:")


def test_a_billion_laughs_of_merge_keys_fail_at_once(write: Write) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    assert "too many values" in message(write("version: 1\n" + "\n".join(lines)))


def test_aliases_that_stand_for_little_are_fine(write: Write) -> None:
    rule = "{cells: head, policy: must_swap}"
    assert len(load_policy(write(f"version: 1\nrules: [&a {rule}, *a, *a]\n")).describe().splitlines()) == 5


def test_an_alias_for_what_contains_it_is_an_error(write: Write) -> None:
    found = message(write("version: 1\nrules: &a [x, *a]\n"))
    assert found.startswith("policy.yaml:2:15: malformed YAML: the alias *a stands for something that contains it")


def test_depth_that_aliases_add_up_to_counts(write: Write) -> None:
    deep = "[" * 30 + "]" * 30
    text = f"version: 1\na: &a {deep}\nb: {'[' * 30}*a{']' * 30}\n"
    assert ":3:34: malformed YAML: it is nested too deeply" in message(write(text))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(write: Write, opening: str) -> None:
    assert "nested too deeply" in message(write("version: 1\nrules:\n  " + opening * 900))


@pytest.mark.parametrize("alias", ["*b", "*a"])
def test_an_alias_without_its_anchor_is_an_error(write: Write, alias: str) -> None:
    assert f"no anchor &{alias[1:]} stands before this alias" in message(write(f"version: 1\nrules: [{alias}]\n"))


def test_a_second_anchor_of_a_name_is_an_error(write: Write) -> None:
    assert "the anchor &a is given twice" in message(write("version: &a 1\nrules: &a []\n"))


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system", "!!python/name:os.system", "!!python/module:os", "!!set", "!own", "!!binary"],
)
def test_a_tag_is_refused(write: Write, tag: str) -> None:
    for value in ("x", "[x]", "{x: y}"):
        assert f"the tag {tag} isn't allowed" in message(write(f"version: 1\nrules: {tag} {value}\n"))


def test_a_tag_runs_nothing(write: Write, tmp_path: Path) -> None:
    message(write(f"version: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n"))
    assert not (tmp_path / "made").exists()


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with path.open("wb") as file:
        file.truncate(50 * 2**20)
    assert message(path).endswith("it has 50.0 MiB, but a policy file has at most 1 MiB; is it another file?")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is no regular file (a device, pipe or socket)" in message(tmp_path / "pipe.yaml")
    assert "it is no regular file" in message(Path("/dev/zero"))


def test_a_byte_order_mark_inside_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"version: 1\n\xef\xbb\xbfdefault: must_save\n")
    assert "policy.yaml:2:1: malformed YAML: a byte-order mark inside the file; delete it" in message(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes("version: 1\n".encode(encoding))
    assert ("UTF-16, by its byte-order mark" if encoding == "utf-16" else "the character 0x00 isn't") in message(path)


def test_lines_may_end_in_any_way(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for end in (b"\n", b"\r\n", b"\r"):
        path.write_bytes(end.join([b"version: 1", b"# two", b"default: keep", b""]))
        assert message(path).startswith("policy.yaml:3:10: default: got 'keep'")


def test_a_tab_is_named_where_it_stands(write: Write) -> None:
    found = message(write("version: 1\nrules:\n  - cells: a\n\tpolicy: must_save\n"))
    assert "malformed YAML: a tab before the text; lines are indented with spaces" in found
    assert "policy: must_save" in found


def test_every_key_that_is_given_twice_is_named(write: Write) -> None:
    text = "version: 1\nswap:\n  tier: file\n  tier: host\nrules:\n  - {cells: a, cells: b, policy: must_save}\n"
    found = message(write(text))
    assert "policy.yaml:4:3: malformed YAML: the key 'tier' is given twice (first in line 3)" in found
    assert "policy.yaml:6:16: malformed YAML: the key 'cells' is given twice (first in line 6)" in found


@pytest.mark.parametrize(
    ("key", "kind"), [("1", "int"), ("no", "bool"), ("~", "null"), ("1.5", "float"), ("2026-01-01", "timestamp")]
)
def test_a_key_that_yaml_reads_as_something_else_is_named(write: Write, key: str, kind: str) -> None:
    assert f"a key must be a string, but YAML reads '{key}' as {kind}; put it in quotes" in message(
        write(f"version: 1\n{key}: x\n")
    )


def test_a_number_to_the_base_of_60_is_refused(write: Write) -> None:
    found = message(write("version: 1\nrules: [{layers: 1:30, policy: must_save}]\n"))
    assert "YAML reads '1:30' as a number to the base of 60; put it in quotes" in found


@pytest.mark.parametrize("value", ["2026-99-99", "!!int x", "!!float y", "!!bool z", "9" * 5000, "!!timestamp now"])
def test_a_value_that_is_not_what_it_looks_like_is_one_error(write: Write, value: str) -> None:
    found = message(write(f"version: 1\ndefault: {value}\n"))
    assert "; put it in quotes" in found
    assert "has 2 errors" not in found


@pytest.mark.parametrize(
    "text",
    [r"(a*)*b", r"(a|a)*b", r"(a+)+$", r"(.*)*x", r"(\w+\s?)*$", r"(a?){30}", ".*.*.*.*.*x"],
)
def test_an_expression_that_backtracking_would_take_years_for_is_matched(text: str) -> None:
    RegularExpression(text).matches("a" * 5000 + "!")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(", "unclosed group"),
        ("a)|(b", "unopened group"),
        ("(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("(?x)a #", "unclosed group"),
        ("a" * 251, "it has 251 characters, expected at most 250"),
        ("a{101}", "repeat a part 101 times, expected at most 100"),
        ("(a{50}){50}", "repeat a part 2500 times, expected at most 100"),
        ("a{1,99999999999999999999}", "expected at most 100"),
        ("*", "repetition operator missing expression"),
    ],
)
def test_an_expression_that_is_refused_says_why(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected.replace("(", r"\(")):
        RegularExpression(text)


def test_an_expression_describes_the_whole_path() -> None:
    expression = RegularExpression("a|b")
    assert expression.matches("a")
    assert not expression.matches("ab")
    assert not expression.matches("a\n")


def test_expressions_that_take_long_to_compile_are_refused_together(write: Write) -> None:
    rules = "".join(rf"  - {{cells: 're:\w{{100}}{n}', policy: must_swap}}" + "\n" for n in range(100))
    assert message(write(f"version: 1\nrules:\n{rules}")) == (
        "policy.yaml: it has too many regular expressions; use layers, [a-b] or {a,b}"
    )


def test_many_plain_expressions_are_fine(write: Write) -> None:
    rules = "".join(rf"  - {{cells: 're:layers\.\d+\.part{n}', policy: must_swap}}" + "\n" for n in range(500))
    assert "rule 500" in load_policy(write(f"version: 1\nrules:\n{rules}")).describe()


def test_environment_variables_are_left_as_they_are(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILL", "/somewhere")
    plan = load_policy(write("version: 1\nswap: {folder: $SPILL/x}\n"))
    assert plan.to_plain_values()["swap"] == {"folder": "$SPILL/x"}


def test_of_thousands_of_mistakes_the_first_are_told(write: Write) -> None:
    found = message(write("version: 1\n" + "".join(f"key{n}: 1\n" for n in range(3000))))
    assert "policy.yaml has 3000 mistakes; here are the first 1000" in found
    assert "policy.yaml:1001:1: key999: unknown key" in found
    assert "key1000" not in found


def test_closest_names_are_offered_for_some_unknown_operators_and_not_for_thousands(write: Write) -> None:
    rules = "".join(f"  - {{cells: a, ops: {{MatMull{n}: must_save}}}}\n" for n in range(30))
    found = message(write(f"version: 1\nrules:\n{rules}"))
    assert found.count("MindSpore dispatches no such operator") == 30
    assert found.count("did you mean") == 20
