"""Mutated files: each gives a plan or a PolicyError, whatever was done to it."""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn

from hyper_parallel import PolicyError, PolicyPlan, load_policy
from hyper_parallel.policy_file import document, yaml_text

FILE = """\
version: 1
mode: auto
default: prefer_save
rule_sets:
  attention: &attention
    - {cells: "layers.*.attention", policy: must_swap, tensors: {min_bytes: 4MiB, dtype: [float16, bfloat16]}}
rules:
  - cells: "layers.[0-5].{attention,mlp}"
    policy: must_recompute
    swap_inputs: true
    exclude: ["*.norm", router]
  - {layers: 0-3, 5, class: Block, container: layers, preset: [selective, inputs_on_host]}
  - cells: 're:layers\\.\\d+\\.(mlp|norm[12])'
    ops: {MatMul: must_save, "*": prefer_recompute}
    determinism_check: values
    keep_collectives: true
  - use: attention
  - <<: &more {policy: must_save}
    cells: '**.head'
stages:
  - rules: [{layers: 1, policy: must_swap}]
  - {rules: *attention}
prefetch: [{load: layers.0, at: layers.2}]
swap: {tier: file, host_budget: 8GiB, window: 32MiB, min_bytes: 1MiB, when_exhausted: [recompute, keep]}
"""
FILE = FILE.replace("layers: 0-3, 5,", "layers: '0-3, 5',")

PIECES = [
    *"[]{}:,-*&!|>'\"#%@`?~\n\t \\.=<",
    *(
        "  ",
        "\n- ",
        ": ",
        "- ",
        "<<: ",
        "*attention",
        "&attention",
        "!!python/name:os.system",
        "!!set",
        "---\n",
        "...\n",
    ),
    *("null", "true", "no", "1e400", "-1", "0x1F", ".inf", "1:30", "2026-99-99", "9" * 50, "é", "\u2028", "\x85", "\0"),
    *(
        "\ufeff",
        "\U0001f600",
        "\ud7ff",
        "re:(a*)*b",
        "re:(",
        "re:\\w{20}",
        "[5-2]",
        "[0-999999999]",
        "{a,b}",
        "**",
        "$HOME",
    ),
    *("[" * 60, "{a: " * 60, "include: policy.yaml\n", "rule_sets: {a: [{use: a}]}\n", "version: 2\n"),
]


COUNT = {"ci": 5000, "full": 20_000}[os.environ.get("HYPOTHESIS_PROFILE", "ci")]
"""As in the random nets: the full number takes `scripts/test_full.sh`."""

WORD = re.compile(r"[A-Za-z0-9_.*$]+")
WORDS = [match[0] for match in WORD.finditer(FILE)]


def mutated(text: str, drawn: random.Random) -> str:
    """Change one place: a word for another, or insert, delete, repeat, swap lines, overwrite."""
    how = drawn.randrange(10)
    at, to = sorted(drawn.randrange(len(text) + 1) for _ in range(2))
    to = min(to, at + drawn.choice((1, 3, 10, 80)))
    if how <= 4 and (found := WORD.search(text, at)):
        return (
            text[: found.start()]
            + drawn.choice((*WORDS, "null", "-1", "1.5", "[]", "{}", "'re:('"))
            + text[found.end() :]
        )
    if how <= 6:
        return text[:at] + drawn.choice(PIECES) + text[at if how == 5 else to :]
    if how == 7:
        return text[:at] + text[to:]
    if how == 8:
        return text[:to] + text[at:to] * drawn.choice((1, 2, 5)) + text[to:]
    lines = text.split("\n")
    one, other = drawn.randrange(len(lines)), drawn.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return "\n".join(lines)


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Give the file, changed in one to five places, and now and then a byte that is no UTF-8."""
    drawn = random.Random(seed)
    for _ in range(count):
        text = FILE
        for _ in range(drawn.choice((1, 1, 2, 3, 5))):
            text = mutated(text, drawn)
        data = text.encode("utf-8", "surrogatepass")
        if drawn.random() < 0.05:
            at = drawn.randrange(len(data) + 1)
            data = data[:at] + bytes([drawn.randrange(256)]) + data[at + 1 :]
        yield data


def assert_only_plans_and_policy_errors(
    net: nn.Cell, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    path.write_text(FILE, encoding="utf-8")
    content = b""
    monkeypatch.setattr(document, "_first_bytes", lambda path: content)  # writing all files would take the most time
    told = {PolicyError: 0, PolicyPlan: 0}
    for content in mutations(seed, count):
        try:
            plan = load_policy(path)
        except PolicyError as error:
            told[PolicyError] += 1
            text = str(error)
            assert text, content
            assert "Traceback" not in text, content
            assert len(text) < 100_000, content
        else:
            told[PolicyPlan] += 1
            values = plan.to_plain_values()
            assert load_policy(values).to_plain_values() == values, content
            assert plan.describe(), content
            with contextlib.suppress(PolicyError):
                assert load_policy(path, stage=0).describe(net), content
    assert min(told.values()) > count // 50  # neither is all that happens


def test_the_file_is_valid_to_begin_with(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FILE, encoding="utf-8")
    assert "set attention, rule 1" in load_policy(path).describe()


@pytest.mark.parametrize("parser", [yaml.SafeLoader, yaml.CSafeLoader], ids=["python", "libyaml"])
def test_mutated_files_give_plans_or_policy_errors(
    gpt: nn.Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: type
) -> None:
    monkeypatch.setattr(yaml_text, "Parser", parser)
    assert_only_plans_and_policy_errors(gpt, tmp_path / "policy.yaml", monkeypatch, seed=1, count=300)


@pytest.mark.no_cover  # tracing takes as long as what is traced
@pytest.mark.slow
def test_thousands_of_mutated_files_give_plans_or_policy_errors(
    gpt: nn.Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_only_plans_and_policy_errors(gpt, tmp_path / "policy.yaml", monkeypatch, seed=2, count=COUNT)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*WORDS, b"x", 1j]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(WORDS), anything, max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_dict_gives_a_plan_or_a_policy_error(content: dict) -> None:
    with contextlib.suppress(PolicyError):
        assert load_policy({"version": 1, **content}).describe()
