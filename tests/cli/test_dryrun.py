"""``hyper-parallel dryrun``: mistakes, on a machine without an Ascend backend. What it reports: tests/ascend/dryrun."""

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.commands import command
from hyper_parallel.cli.dryrun_worker import run
from hyper_parallel.cli.errors import UserError
from hyper_parallel.core.errors import PolicyError
from tests.cli.models import assert_refused, module_in

MODEL = """
import numpy as np
from mindspore import Tensor, nn

def alone():
    return nn.Dense(2, 2)

def build():
    return nn.SequentialCell(nn.Dense(2, 2)), (Tensor(np.ones((2, 3), np.float32)),)

def frozen():
    return nn.ReLU(), (Tensor(np.ones((2, 3), np.float32)),)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """What a worker is asked to do with a factory of the module."""
    module = module_in(tmp_path, MODEL, monkeypatch)
    (tmp_path / "wrong.yaml").write_text("version: 1\nrules: [{cells: layers.*, policy: must_recompute}]\n")
    return lambda factory, fits=(): {
        "mode": "plain",
        "model": f"{module}:{factory}",
        "policy": None,
        "fits": list(fits),
        "optimizer": "sgd",
    }


@pytest.fixture
def dryrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("LD_LIBRARY_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(command, ["dryrun", "--model", "a:b", *arguments])


def test_without_an_ascend_backend_it_says_how_to_be_started(dryrun):
    assert_refused(
        dryrun(), "needs MindSpore's Ascend backend", "bash scripts/ascend_emulator/run.sh hyper-parallel dryrun"
    )


def test_a_wrong_policy_file_is_refused_before_anything_runs(dryrun, tmp_path):
    (tmp_path / "bad.yaml").write_text("version: 2\n")
    assert_refused(dryrun("--policy", "bad.yaml"), "bad.yaml", "expected 1")


def test_an_unknown_optimizer_is_refused(dryrun):
    assert_refused(dryrun("--optimizer", "lion"), "'lion' is not one of", "adamw")


def test_a_factory_without_inputs_is_refused(task):
    with pytest.raises(UserError, match="must return \\(Cell, tuple of inputs\\), but it returned a Cell alone"):
        run(task("alone"))


def test_a_policy_that_does_not_fit_is_refused_before_the_first_step(task):
    with pytest.raises(PolicyError, match=r"wrong\.yaml.*matches nothing"):
        run(task("build", ["wrong.yaml"]))


def test_what_a_step_raises_is_told_in_a_line(task):
    with pytest.raises(UserError, match="a training step raised ValueError"):
        run(task("build"))


def test_a_net_without_weights_is_refused(task):
    with pytest.raises(UserError, match="no trainable parameter"):
        run(task("frozen"))
