"""``hyper-parallel verify``."""

import json
from pathlib import Path

import mindspore as ms
import pytest
from click.testing import CliRunner, Result

from hyper_parallel.cli.commands import command
from tests.cli.models import assert_refused, module_in

MODEL = """
import numpy as np
from mindspore import Tensor, nn, ops

class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 4)

    def construct(self, x):
        return self.down(self.act(ops.sigmoid(self.up(x))))

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Block(), Block()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build():
    print("building")
    return Net(), (Tensor(np.ones((2, 4), np.float32)),)

def build_without_inputs():
    return Net()

def build_with_wrong_inputs():
    return Net(), (Tensor(np.ones((2, 3), np.float32)),)
"""

RECOMPUTE = 'version: 1\nrules: [{cells: "layers.*", policy: must_recompute}]\n'
NOT_HONOURED = """
version: 1
rules: [{cells: layers.0, policy: must_recompute}, {cells: layers.1, ops: {Sigmoid: must_save}}]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return module_in(tmp_path, MODEL, monkeypatch)


def verify(policy: str, *arguments: str) -> Result:
    Path("policy.yaml").write_text(policy)
    result = CliRunner().invoke(command, ["verify", "--policy", "policy.yaml", *arguments])
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
    return result


def test_every_cell_has_a_verdict_and_its_copies(model: str) -> None:
    result = verify(RECOMPUTE, "--model", f"{model}:build")
    assert result.exit_code == 0, result.output
    assert "building" not in result.stdout
    assert result.stdout.count("honoured") == 2
    assert "recomputed in all: BiasAdd 2, MatMul 2, Sigmoid 2, Tanh 2; gates: 2" in result.stdout


def test_json_has_the_rows_of_the_plan(model: str) -> None:
    result = verify(RECOMPUTE, "--model", f"{model}:build", "--json", "--jit", "--jit-level", "O1")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["policy_file"], found["honoured"], found["gates"]) == ("policy.yaml", True, 2)
    assert found["recomputed"] == found["planned"] == {"BiasAdd": 2, "MatMul": 2, "Sigmoid": 2, "Tanh": 2}
    row = found["rows"][0]
    assert (row["plan"]["path"], row["plan"]["policy"], row["verdict"]) == ("layers.0", "must_recompute", "honoured")
    tanh = next(each for each in row["operators"] if each["name"] == "Tanh")
    assert tanh == {"name": "Tanh", "runs": 1, "planned": 1, "recomputed": 1, "kept": 0}


def test_what_is_not_as_planned_exits_with_1(model: str) -> None:
    result = verify(NOT_HONOURED, "--model", f"{model}:build", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [row["verdict"] for row in found["rows"]] == ["not honoured", "honoured"]
    assert found["rows"][0]["reason"].startswith("kept though: Sigmoid (1)")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{model}:build_without_inputs"], "verifying needs inputs; let the factory return (Cell, tuple of inputs)"),
        (["{model}:build_with_wrong_inputs"], "compiling it raised ValueError"),
        (["{model}:build", "--jit-level", "O9"], "jit_level: got 'O9', expected O0 or O1"),
    ],
)
def test_mistakes_are_refused(model: str, arguments: list[str], expected: str) -> None:
    reference, *others = arguments
    assert_refused(verify(RECOMPUTE, "--model", reference.format(model=model), *others), expected)


def test_a_policy_that_graph_mode_cannot_honour_is_refused(model: str) -> None:
    policy = 'version: 1\nrules: [{cells: "layers.*", policy: must_swap}]\n'
    assert_refused(verify(policy, "--model", f"{model}:build"), "must_swap isn't honoured here")
