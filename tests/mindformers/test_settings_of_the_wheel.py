"""Every recompute and swap block of the configurations inside MindFormers' wheel converts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyper_parallel import load_policy
from hyper_parallel.policy_file.mindformers import Conversion, convert_mindformers

BLOCKS = ("recompute_config", "swap_config", "recompute", "recompute_comm", "swap")

SAYS_NO_LAYERS = 64
"""For configurations that leave the number of layers to another file."""

GIVEN: dict[str, dict[str, Any]] = {
    # 61 layers, as that model has; the file has the offset for them
    "finetune_deepseek3_671b.yaml": {"layers": 61},
    # 45 layers in 8 stages without an offset: MindFormers refuses the file as it is
    "pretrain_telechat3_105b_a4b_4k.yaml": {"offset": [1, 1, 1, 1, 1, 0, 0, 0]},
}


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations that have one of the blocks, by name."""
    found = {}
    for path in sorted((folder / "configs").rglob("*.yaml")):
        content = yaml.safe_load(path.read_text("utf-8"))
        if content and any(block in content for block in BLOCKS):
            found[str(path)] = content
    return found


@pytest.fixture(scope="module")
def conversions(unpacked: dict[str, Path]) -> dict[str, tuple[dict[str, Any], Conversion]]:
    """All of 2.1.0, each with its content."""
    found = {}
    for path, content in configurations(unpacked["2.1.0"]).items():
        options = dict(GIVEN.get(Path(path).name, {}))
        model = content["model"].get("model_config", content["model"])
        if not {"num_layers", "num_hidden_layers"} & model.keys():
            options.setdefault("layers", SAYS_NO_LAYERS)
        found[Path(path).name] = content, convert_mindformers(path, **options)
    return found


def test_the_wheel_has_both_dialects(conversions: dict[str, tuple[dict[str, Any], Conversion]]) -> None:
    assert len(conversions) == 20
    assert {done.dialect.value for _, done in conversions.values()} == {"graph", "pynative"}


def test_every_layer_is_recomputed_where_all_are_meant(
    conversions: dict[str, tuple[dict[str, Any], Conversion]],
) -> None:
    names = [name for name, (content, _) in conversions.items() if _recompute(content) is True]
    assert len(names) == 9
    for name in names:
        done = conversions[name][1]
        assert sorted(layer for rule in done.rules for layer in rule.layers) == list(range(done.pipeline.total)), name


def test_no_rule_is_made_where_nothing_is_asked_for(
    conversions: dict[str, tuple[dict[str, Any], Conversion]],
) -> None:
    names = [name for name, (content, _) in conversions.items() if _recompute(content) is False]
    assert len(names) == 5
    assert not any(conversions[name][1].rules for name in names)


def test_counts_by_stage_are_the_first_layers_of_each(
    conversions: dict[str, tuple[dict[str, Any], Conversion]],
) -> None:
    layers = {
        name: [rule.layers for rule in conversions[name][1].rules]
        for name in ("finetune_glm4_9b.yaml", "pretrain_telechat3_36b.yaml")
    }
    assert [(group[0], len(group)) for group in layers["finetune_glm4_9b.yaml"]] == [(0, 6), (9, 3), (19, 2), (31, 3)]
    assert [(group[0], len(group)) for group in layers["pretrain_telechat3_36b.yaml"]] == [
        (0, 14),
        (32, 14),
        (16, 14),
        (48, 14),
    ]


@pytest.mark.parametrize("name", ["pro", "flash", "pro_reduction", "flash_reduction"])
def test_ranges_of_layers_are_read(conversions: dict[str, tuple[dict[str, Any], Conversion]], name: str) -> None:
    content, done = conversions[f"pretrain_deepseek4_{name}.yaml"]
    assert [rule.layers for rule in done.rules] == [tuple(range(content["model"]["num_hidden_layers"]))]


def test_every_policy_of_a_stage_is_a_valid_policy_file(
    conversions: dict[str, tuple[dict[str, Any], Conversion]],
) -> None:
    for _, done in conversions.values():
        for entry in done.policy.get("stages", [done.policy]):
            assert load_policy({"version": 1, "rules": entry["rules"]}).describe()


def _recompute(content: dict[str, Any]) -> Any:
    return content.get("recompute_config", {}).get("recompute")
