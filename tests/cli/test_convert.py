"""``hyper-parallel convert``."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from hyper_parallel import load_policy
from hyper_parallel.cli.commands import command

GRAPH = "use_legacy: False\nrecompute_config:\n  recompute: [1, 0]\n  mp_comm_recompute: True\n"
PYNATIVE = "recompute: {mode: full, full_recompute_layer: [0-2]}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GRAPH)
    return path


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(command, ["convert", *map(str, arguments)], terminal_width=200)


def test_the_policy_is_printed_with_the_origin_of_every_rule(config: Path) -> None:
    result = convert(config, "--layers", 4, "--stages", 2)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["stages"][0]["rules"] == [{"cells": "**.layers.0", "policy": "must_recompute"}]
    assert "# layer 0: recompute_config, recompute" in result.stdout


def test_a_written_policy_is_read_again_and_a_table_says_what_it_has(config: Path, tmp_path: Path) -> None:
    output = tmp_path / "policy.yaml"
    result = convert(config, "--layers", 4, "--stages", 2, "-o", output)
    assert result.exit_code == 0, result.output
    assert load_policy(output, stage=0).describe()
    assert "must_recompute" in result.stdout
    assert "layer numbers are global" in result.stdout
    assert "note: inert: recompute_config, mp_comm_recompute" in result.stdout


def test_json_has_stages_rules_with_layers_and_sources_notes_and_the_policy(config: Path) -> None:
    result = convert(config, "--layers", 5, "--stages", 2, "--offset", "[1, 0]", "--json")
    found = json.loads(result.stdout)
    assert found["stages"] == [[0, 1, 2], [3, 4]]
    assert found["rules"] == [
        {
            "stage": 0,
            "chunk": 0,
            "layers": [0],
            "rule": {"cells": "**.layers.0", "policy": "must_recompute"},
            "source": "recompute_config, recompute",
        }
    ]
    assert {"kind", "key", "text"} == found["notes"][0].keys()
    assert found["policy"]["version"] == 1


def test_a_user_says_what_an_attribute_is_where_the_layers_are_and_what_to_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "recompute_config:\n"
        "  recompute: False\n"
        "  select_recompute: {'mlp\\.act': True, 'mlp\\.norm': True}\n"
        "  recompute_slice_activation: True\n"
    )
    result = convert(
        *(path, "--layers", 2, "--mcore", "--container", "blocks", "--operator", "act=SiLU", "--cell", "norm"),
        *("--leave-out", "recompute_slice_activation"),
    )
    assert result.exit_code == 0, result.output
    rules = yaml.safe_load(result.stdout)["rules"]
    assert [rule["cells"] for rule in rules] == ["blocks.[0-1].mlp", "blocks.[0-1].mlp.norm"]
    assert rules[0]["ops"] == {"SiLU": "must_recompute", "*": "prefer_save"}
    assert "left out: recompute_config, recompute_slice_activation" in result.stdout


def test_a_policy_file_goes_back_where_it_fits(config: Path, tmp_path: Path) -> None:
    config.write_text(PYNATIVE)
    policy, back = tmp_path / "policy.yaml", tmp_path / "back.yaml"
    convert(config, "--layers", 4, "-o", policy)
    result = convert(policy, "--to", "mindformers", "--layers", 4, "-o", back)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(back.read_text()) == {"recompute": {"mode": "full", "full_recompute_layer": ["0-2"]}}
    assert yaml.safe_load(convert(policy, "--to", "mindformers", "--layers", 4).stdout) == yaml.safe_load(
        back.read_text()
    )


def test_it_goes_back_to_graph_mode_by_stages(config: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    convert(config, "--layers", 4, "--stages", 2, "-o", policy)
    result = convert(policy, "--to", "mindformers", "--dialect", "graph", "--layers", 4, "--stages", 2)
    assert yaml.safe_load(result.stdout) == {"recompute_config": {"recompute": [1, 0]}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give layers= (--layers N)"),
        (["--layers", 4, "--stages", 1], "is about 2 stages, but there is 1"),
        (["--layers", 4, "--stages", 2, "--offset", "1,0"], "--offset must be a number or a list"),
        (["--layers", 4, "--operator", "act"], "--operator must be NAME=OPERATOR"),
        (["--to", "mindformers"], "--to mindformers needs --layers"),
        (["--to", "mindformers", "--layers", 4], "version"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(config: Path, arguments: list[object], message: str) -> None:
    result = convert(config, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_file_that_is_converted_is_never_overwritten(config: Path) -> None:
    result = convert(config, "--layers", 4, "--stages", 2, "-o", config)
    assert result.exit_code == 2
    assert config.read_text() == GRAPH


def test_a_place_that_cannot_be_written_is_told(config: Path, tmp_path: Path) -> None:
    result = convert(config, "--layers", 4, "--stages", 2, "-o", tmp_path)
    assert result.exit_code == 2
    assert "can't be written" in result.stderr


def test_mistakes_are_json_with_their_places_where_json_is_asked_for(config: Path) -> None:
    result = convert(config, "--layers", 4, "--json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["line"], problem["column"]) == (3, 14)
    assert "is about 2 stages" in problem["message"]


def test_settings_are_json_where_json_is_asked_for(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nrules:\n  - cells: layers.0\n    policy: must_recompute\n")
    result = convert(policy, "--to", "mindformers", "--layers", 4, "--json")
    assert json.loads(result.stdout) == {"recompute": {"mode": "full", "full_recompute_layer": ["0"]}}


def test_the_command_has_help() -> None:
    result = convert("--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_a_file_that_does_not_exist_is_told(tmp_path: Path) -> None:
    result = convert(tmp_path / "none.yaml", "--layers", 4)
    assert result.exit_code == 2
    assert "doesn't exist" in result.stderr
