"""The examples in `examples/train` run, and give the numbers of the plain net."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mindspore import set_seed

from hyper_parallel import SwapManager, load_policy
from hyper_parallel.train.mindformers import FOLDER as CALLBACK_FOLDER

FOLDER = Path(__file__).parents[2] / "examples" / "train"
KEEP = "version: 1\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("net", None)  # which the examples import from their folder


def run(name: str, policy: Path) -> Any:
    """What an example's `main` gives."""
    set_seed(1)
    return runpy.run_path(str(FOLDER / name))["main"](str(policy))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A policy that keeps everything."""
    path = tmp_path / "keep.yaml"
    path.write_text(KEEP)
    return path


def test_a_loop_of_ones_own_gives_the_losses_of_the_plain_net(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SwapManager().configure(min_bytes=1)
    try:
        losses = run("custom_loop.py", FOLDER / "policy.yaml")
    finally:
        SwapManager().configure()
    assert losses == run("custom_loop.py", plain)
    assert losses[-1] < losses[0]
    assert "layers.1       Block  must_recompute" in capsys.readouterr().out


def test_model_train_prints_the_plan_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    run("model_train.py", FOLDER / "policy.yaml")
    out = capsys.readouterr().out
    assert "layers.0" in out
    assert "must_swap" in out
    assert "loss is" in out


def test_the_policy_of_the_examples_has_no_rule_without_effect() -> None:
    net = runpy.run_path(str(FOLDER / "net.py"))["Net"]()
    assert "has no effect" not in load_policy(FOLDER / "policy.yaml").describe(net)


def test_the_configuration_for_mindformers_names_a_file_and_a_class_that_exist() -> None:
    (callback,) = yaml.safe_load((FOLDER / "mindformers" / "train.yaml").read_text())["callbacks"]
    module, name = callback["auto_register"].split(".")
    assert name == callback["type"]
    assert f"class {name}(" in (CALLBACK_FOLDER / f"{module}.py").read_text()
