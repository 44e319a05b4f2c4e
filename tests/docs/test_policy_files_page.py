"""The examples of `docs/policy_files.md` fit its net, and every key of the format is explained there."""

import re
from pathlib import Path
from typing import Any

import pytest
from mindspore import nn
from pydantic import BaseModel

from hyper_parallel import PolicyError, apply_policy, load_policy
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.rule import PRESET_NAMES, Rule, Tensors
from hyper_parallel.policy_file.schema import PolicyFile, Prefetch, Stage, Use

PAGE = (Path(__file__).parents[2] / "docs" / "policy_files.md").read_text("utf-8")
FILES = dict(re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S))


def keys(*models: type[BaseModel]) -> list[str]:
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


@pytest.fixture
def net() -> nn.Cell:
    (code,) = re.findall(r"^```python\n(import.*?)^net = Net\(\)", PAGE, re.M | re.S)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), names)
    return names["Net"]()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_every_yaml_example_has_a_name() -> None:
    assert len(FILES) == PAGE.count("```yaml\n") >= 8


@pytest.mark.parametrize("name", FILES)
def test_a_file_applies_to_the_net_of_the_page(net: nn.Cell, folder: Path, name: str) -> None:
    plan = apply_policy(net, folder / name, stage=0)
    plan.remove()
    assert plan.rows
    assert not [note for note in plan.notes if "has no effect" in note]


@pytest.mark.parametrize("key", keys(PolicyFile, Rule, Tensors, Use, Stage, Prefetch, SwapSettings))
def test_every_key_is_explained_and_has_an_example(key: str) -> None:
    assert f"`{key}`" in PAGE
    assert any(re.search(rf"(?<![\w.]){key}:", text) for text in FILES.values())


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_mistakes_look_as_the_page_shows_them(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(policy.yaml has .*?)^\.\.\.$", PAGE, re.M | re.S)
    path = tmp_path / "policy.yaml"
    path.write_text("rules:\n  - cells: head\n    polcy: must_swap\n  - layers: true\nversion: 2\n", encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert [line for line in shown.splitlines()[1:] if line not in str(caught.value).splitlines()] == []
