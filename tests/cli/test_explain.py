"""``hyper-parallel explain``: why a cell or an operator gets what it gets, and what that means in bytes."""

import json

import mindspore as ms
import numpy as np
import pytest
from click.testing import CliRunner

from hyper_parallel import SwapManager, activation_policy, apply_policy, presets
from hyper_parallel.cli.commands import command
from hyper_parallel.policy_file.loading import read_policy_file
from hyper_parallel.policy_file.resolve import resolve
from hyper_parallel.report.activation_bytes import Bytes, measure_bytes
from tests.cli.models import assert_refused, module_in
from tests.helpers import RECOMPUTE, Layer, Stack, gradients, numbers, on

POLICY = """\
version: 1
rules:
  - cells: layers.*
    preset: selective
    exclude: second
  - layers: 2
    policy: must_swap
swap: {min_bytes: 0}
"""

MODEL = """
import numpy as np
from mindspore import Tensor, nn, ops

class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        return x + self.second(ops.tanh(self.first(x)))

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Block() for _ in range(3)])
        self.head = nn.Dense(4, 1)

    def construct(self, x):
        print("running")
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

X = Tensor(np.ones((3, 4), np.float32))

def build():
    return Net()

def with_inputs():
    return Net(), (X,)

def with_wrong_inputs():
    return Net(), (X, X)
"""


@pytest.fixture
def explain(tmp_path, monkeypatch):
    """A function that runs the command in a folder with a policy file and a module."""
    module = module_in(tmp_path, MODEL, monkeypatch)
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.setenv("COLUMNS", "250")

    def run(*arguments, model="with_inputs"):
        return CliRunner().invoke(command, ["explain", "policy.yaml", "--model", f"{module}:{model}", *arguments])

    return run


def output(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


def of_cell(text):
    """The lines about a cell, by what they begin with."""
    return {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines()[1:]}


class TestCell:
    def test_which_rule_decided_which_it_overruled_and_what_happens(self, explain):
        assert of_cell(output(explain("layers.2"))) == {
            "policy": "must_swap",
            "decided": "rule 2 (layers 2): must_swap  [policy.yaml:6]",
            "overruled": "rule 1 (layers.*): must_recompute + preset selective + without second  [policy.yaml:3]",
            "forward": "runs once; what backward needs goes to host, but for what is small, a parameter, or owned "
            "outside",
            "backward": "loads it from host ahead of its use; nothing runs again",
            "bytes": "kept 0 B, on host 96 B, replayed 0 B (estimated from one forward)",
        }

    def test_a_replayed_cell(self, explain):
        found = of_cell(output(explain("layers.0")))
        assert found["decided"].startswith("rule 1 (layers.*)")
        assert "by the preset selective" in found["forward"]
        assert found["backward"].startswith("runs again, once, when something of it is first needed")

    def test_an_excluded_cell(self, explain):
        found = of_cell(output(explain("layers.0.second")))
        assert found["policy"] == "must_save"
        assert found["inside"] == "layers.0"
        assert found["backward"].endswith("the replay of layers.0 reads its output")

    def test_a_cell_that_nobody_names_in_a_region(self, explain):
        found = of_cell(output(explain("layers.0.first")))
        assert found["decided"] == "nobody: no rule and no decorator names it"
        assert "runs as part of layers.0, which is replayed" in found["forward"]
        assert found["bytes"].startswith("kept")

    def test_a_cell_that_nobody_names_outside_of_regions(self, explain):
        assert "runs as without the file (default: prefer_save)" in of_cell(output(explain("head")))["forward"]

    def test_without_inputs_bytes_need_them(self, explain):
        assert of_cell(output(explain("layers.2", model="build")))["bytes"].startswith("bytes need inputs: let the fac")

    def test_json(self, explain):
        found = json.loads(output(explain("layers.2", "--json")))
        assert found["cell"]["decided_by"] == [
            {"label": "rule 2", "where": "policy.yaml:6", "cells": "layers 2", "says": "must_swap"}
        ]
        assert [rule["label"] for rule in found["cell"]["overruled"]] == ["rule 1"]
        assert found["bytes"] == {"kept": 0, "host": 96, "replayed": 0}


class TestOperator:
    def test_each_region_that_runs_it_is_a_line(self, explain):
        lines = [line.split() for line in output(explain("MatMul")).splitlines() if "MatMul:" in line]
        assert [line[0] for line in lines] == [
            "layers.0",
            "layers.0.second",
            "layers.1",
            "layers.1.second",
            "layers.2",
            "(no",
        ]
        assert "MatMul: must_save" in " ".join(lines[0])
        assert " ".join(lines[0]).endswith("MatMul: 1 call, 48 B kept")
        assert " ".join(lines[4]).endswith("MatMul: 2 calls, 96 B on host")

    def test_an_operator_of_the_rest_is_replayed(self, explain):
        (line,) = [line for line in output(explain("Tanh")).splitlines() if line.startswith(" layers.0 ")]
        assert "*: prefer_recompute" in line
        assert line.rstrip().endswith("Tanh: 1 call, 48 B replayed")

    def test_a_random_operator_is_never_run_again(self, explain):
        found = json.loads(output(explain("Dropout", "--json", model="build")))
        assert found["measured"] is False
        assert found["regions"][0]["says"] == "it is random"
        assert found["regions"][0]["backward"] == "the replay reads the result"

    def test_an_operator_that_the_model_does_not_run(self, explain):
        assert "the model doesn't run Conv" in output(explain("Conv"))

    def test_json_has_what_was_measured(self, explain):
        found = json.loads(output(explain("MatMul", "--json")))
        assert found["regions"][0]["measured"][0]["fate"] == "kept"
        assert found["outside"][0]["output_bytes"] == 12


class TestAll:
    def test_every_decided_cell_is_a_line_with_its_bytes(self, explain):
        lines = {line.split()[0]: line.split() for line in output(explain()).splitlines() if " layers." in line}
        assert lines["layers.2"] == ["layers.2", "must_swap", "rule", "2", "rule", "1", "0", "B", "96", "B", "0", "B"]
        assert len(lines) == 5

    def test_the_caption_compares_with_the_plain_net(self, explain):
        assert "the net keeps 336 B for backward without policies; with them" in " ".join(output(explain()).split())

    def test_without_inputs_bytes_need_them(self, explain):
        assert "bytes need inputs" in output(explain(model="build"))

    def test_json(self, explain):
        found = json.loads(output(explain("--json")))
        assert found["bytes"]["plain"] == 336
        assert [cell["path"] for cell in found["cells"]] == [
            *("layers.0", "layers.0.second", "layers.1", "layers.1.second", "layers.2")
        ]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "layers.9.frist",
            "'layers.9.frist' is neither a cell of the model nor an operator; the net has `layers.[0-2].first`",
        ),
        ("MatMull", "is neither a cell of the model nor an operator; did you mean 'MatMul'"),
        ("gelu", "operator 'gelu'"),
    ],
)
def test_a_target_that_is_nothing_is_refused(explain, target, expected):
    assert_refused(explain(target, model="build"), expected)


def test_a_forward_that_fails_is_refused(explain):
    assert_refused(explain(model="with_wrong_inputs"), "the forward with the factory's inputs raised TypeError")


def test_a_policy_that_does_not_fit_is_refused(explain, tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\nrules:\n  - {cells: blocks.*, policy: must_swap}\n")
    assert_refused(explain(model="build"), "policy.yaml:3:13: rule 1: `blocks.*` matches nothing; the net has")


def test_help_says_that_code_is_executed():
    result = CliRunner().invoke(command, ["explain", "--help"])
    assert "Only this imports code: it executes the module and the factory" in " ".join(result.stdout.split())


class TestMeasured:
    """Estimates against what the engine really does."""

    X = numbers(8, 4)

    def measured(self, net, *rules):
        source = read_policy_file({"version": 1, "rules": list(rules), "swap": {"min_bytes": 0, "tier": "host"}})
        return measure_bytes(net, (self.X,), resolve(source, net, source.file.swap).regions, source.file.swap)

    def net(self):
        return Stack([Layer(seed=seed) for seed in range(3)])

    def test_bytes_on_host_are_those_that_are_offloaded(self):
        net, rule = self.net(), {"cells": "layers.*", "policy": "must_swap"}
        found = self.measured(net, rule)
        plan = apply_policy(net, {"version": 1, "rules": [rule], "swap": {"min_bytes": 0, "tier": "host"}})
        SwapManager().reset()
        gradients(net, self.X, wait=True)
        stats = SwapManager().stats()
        plan.remove()
        # the net's input is held by the caller, so that it needn't move
        assert found.under_plan.host == stats.offloaded_bytes + stats.held_bytes
        assert stats.held_bytes == self.X.nbytes

    def test_without_a_plan_everything_is_kept(self):
        found = self.measured(self.net())
        assert found.under_plan == Bytes(kept=found.plain_bytes)

    def test_what_is_kept_and_replayed_adds_up(self):
        net = self.net()
        found = self.measured(net, {"cells": "layers.*", "policy": "must_recompute"})
        assert found.by_cell["layers.1"].kept == self.X.nbytes
        assert found.under_plan.kept + found.under_plan.replayed == found.plain_bytes

    def test_the_engine_runs_operators_again_that_are_estimated_as_replayed(self):
        found = self.measured(self.net(), {"cells": "layers.*", **{"preset": "selective"}})
        fates = {(one.dispatch_name, one.fate) for one in found.operators if one.in_region}
        assert ("MatMul", "kept") in fates
        assert ("Tanh", "replayed") in fates

    def test_a_decorated_net_is_measured_as_if_it_were_plain(self):
        net = self.net()
        plain = self.measured(net).plain_bytes
        on(net.layers[0], RECOMPUTE)
        activation_policy(**presets.selective())(net.layers[1])
        found = self.measured(net)
        assert found.plain_bytes == plain
        assert found.by_cell["layers.0"].replayed > 0
        assert gradients(net, self.X)  # and its policies are back
        assert net.layers[0].calls > net.layers[2].calls

    def test_a_net_without_weights_is_measured(self):
        source = read_policy_file({"version": 1})
        tanh = ms.nn.Tanh()
        found = measure_bytes(
            tanh,
            (ms.Tensor(np.ones(4, np.float32)),),
            resolve(source, tanh, source.file.swap).regions,
            source.file.swap,
        )
        assert found.plain_bytes == 16
