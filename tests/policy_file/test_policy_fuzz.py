"""Mutated files: each gives a plan or a PolicyError, whatever was done to it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hyper_parallel import PolicyError, load_policy
from hyper_parallel.policy_file import yaml_text

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
        "re:\\w{100}",
        "[5-2]",
        "[0-999999999]",
        "{a,b}",
        "**",
        "$HOME",
    ),
    *("[" * 60, "{a: " * 60, "include: policy.yaml\n", "rule_sets: {a: [{use: a}]}\n", "version: 2\n"),
]


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Change the file in one to six places: insert, delete, repeat, swap, cut off, flip bytes."""
    drawn = random.Random(seed)
    for _ in range(count):
        text = FILE
        for _ in range(drawn.choice((1, 1, 2, 3, 6))):
            at, to = sorted(drawn.randrange(len(text) + 1) for _ in range(2))
            to = min(to, at + drawn.choice((1, 3, 10, 80)))
            how = drawn.randrange(6)
            if how <= 1:
                text = text[:at] + drawn.choice(PIECES) + text[at:]
            elif how == 2:
                text = text[:at] + text[to:]
            elif how == 3:
                text = text[:to] + text[at:to] * drawn.choice((1, 2, 5)) + text[to:]
            elif how == 4:
                lines = text.split("\n")
                one, other = drawn.randrange(len(lines)), drawn.randrange(len(lines))
                lines[one], lines[other] = lines[other], lines[one]
                text = "\n".join(lines)
            else:
                text = text[:at] + drawn.choice(PIECES) + text[to:]
        data = text.encode("utf-8", "surrogatepass")
        if drawn.random() < 0.05:
            at = drawn.randrange(len(data) + 1)
            data = data[:at] + bytes([drawn.randrange(256)]) + data[at + 1 :]
        yield data


def assert_only_plans_and_policy_errors(path: Path, seed: int, count: int) -> None:
    plans = errors = 0
    for data in mutations(seed, count):
        path.write_bytes(data)
        try:
            plan = load_policy(path)
        except PolicyError as error:
            errors += 1
            text = str(error)
            assert text and "Traceback" not in text, data
            assert len(text) < 100_000, data
        else:
            plans += 1
            assert load_policy(yaml.safe_load(plan.to_yaml())).to_yaml() == plan.to_yaml(), data
            plan.describe()
    assert plans and errors  # neither is all that happens


def test_the_file_is_valid_to_begin_with(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FILE, encoding="utf-8")
    assert "set attention, rule 1" in load_policy(path).describe()


@pytest.mark.parametrize("parser", [yaml.SafeLoader, yaml.CSafeLoader], ids=["python", "libyaml"])
def test_mutated_files_give_plans_or_policy_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: type
) -> None:
    monkeypatch.setattr(yaml_text, "Parser", parser)
    assert_only_plans_and_policy_errors(tmp_path / "policy.yaml", seed=1, count=300)


@pytest.mark.slow
def test_20000_mutated_files_give_plans_or_policy_errors(tmp_path: Path) -> None:
    assert_only_plans_and_policy_errors(tmp_path / "policy.yaml", seed=2, count=20_000)
