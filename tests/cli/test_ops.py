"""``hyper-parallel ops``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import pytest
from click.testing import CliRunner
from mindspore import nn
from mindspore import ops as operators

import hyper_parallel
from hyper_parallel.cli.commands import command
from hyper_parallel.report.operators import measure_operators
from ms_ops.catalogue import dispatch_names
from ms_ops.dispatch import Interception
from tests.cli.models import assert_refused, module_in
from tests.helpers import Layer, Stack, numbers

MODEL = """
import numpy as np
from mindspore import Tensor, nn, ops

class Half(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x):
        return ops.tanh(self.dense(x))

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Half() for _ in range(5)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.T + 1.0

class Constant(nn.Cell):
    def construct(self):
        return ops.exp(Tensor([1.0]))

class Breaks(nn.Cell):
    def construct(self, x):
        raise KeyError("no such token")

class Leaves(nn.Cell):
    def construct(self, x):
        raise SystemExit(0)

class Talks(nn.Cell):
    def construct(self, x):
        print("running")
        return ops.exp(x)

made = []
X = Tensor(np.ones((3, 4), np.float32))

def build():
    made.append(1)
    assert len(made) == 1
    return Net(), (X,)

def build_constant():
    return Constant()

def build_without_inputs():
    return Net()

def build_too_many_inputs():
    return Net(), (X, X)

def build_wrong_shape():
    return Net(), (Tensor(np.ones((3, 5), np.float32)),)

def build_breaks():
    return Breaks(), (X,)

def build_leaves():
    return Leaves(), (X,)

def build_talks():
    print("building")
    return Talks(), (X,)

def build_number():
    return 3

def build_wrong_tuple():
    return Net(), X

def build_exits():
    raise SystemExit(0)

def build_fails():
    raise KeyError("no such size")

class Holder:
    build = staticmethod(build)

size = 3
"""


@pytest.fixture
def ops(tmp_path, monkeypatch):
    """A function that runs the command in a folder with a module `{module}`."""
    module = module_in(tmp_path, MODEL, monkeypatch)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("mindspore.runtime.launch_blocking", lambda: None)  # it can't be taken back

    def run(model="{module}:build", *options):
        return CliRunner().invoke(command, ["ops", "--model", model.format(module=module), *options])

    return run


def rows_of(result):
    assert result.exit_code == 0, result.stderr
    return {row["dispatch_name"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.mark.parametrize("factory", ["build", "Holder.build"])
def test_the_operators_are_printed_as_a_table(ops, factory):
    result = ops("{module}:" + factory)
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "Tanh" in line]
    assert line.split()[:4] == ["Tanh", "Tanh", "5", "240"]
    assert "layers.0, layers.1, layers.2, 2 more" in line
    (line,) = [line for line in result.stdout.splitlines() if "Transpose" in line]
    assert line.split()[0] == "View"
    assert "(the net)" in line
    assert "fastest of 5 forwards" in result.stdout


def test_json_has_what_was_asked_and_a_row_per_operator(ops):
    result = ops("{module}:build", "--json", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found) == ["model", "steps", "sort", "rows"]
    assert found["model"].endswith(":build")
    assert (found["steps"], found["sort"]) == (2, "bytes")
    keys = ["name", "dispatch_name", "calls", "output_bytes", "seconds", "cells"]
    assert [list(row) for row in found["rows"]] == [keys] * len(found["rows"])


def test_calls_bytes_and_cells_are_those_of_one_forward(ops):
    rows = rows_of(ops("{module}:build", "--json"))
    assert {name: (row["name"], row["calls"], row["output_bytes"]) for name, row in rows.items()} == {
        "MatMul": ("MatMul", 5, 5 * 48),
        "BiasAdd": ("BiasAdd", 5, 5 * 48),
        "Tanh": ("Tanh", 5, 5 * 48),
        "Transpose": ("View", 1, 0),
        "AddExt": ("Add", 1, 48),
    }
    assert rows["MatMul"]["cells"] == [f"layers.{index}.dense" for index in range(5)]
    assert rows["Tanh"]["cells"] == [f"layers.{index}" for index in range(5)]
    assert rows["AddExt"]["cells"] == [""]
    assert all(row["seconds"] > 0 for row in rows.values())


def test_every_name_can_be_used_in_a_rule(ops):
    for dispatch_name, row in rows_of(ops("{module}:build", "--json")).items():
        assert dispatch_name in dispatch_names(row["name"])


def test_the_command_has_operators_run_at_once_before_the_model_is_made(ops, monkeypatch):
    asked = []
    monkeypatch.setattr("mindspore.runtime.launch_blocking", lambda: asked.append("at once"))
    monkeypatch.setattr("hyper_parallel.cli.ops.load_model_and_inputs", lambda model: asked.append(model) or 1 / 0)
    ops("a:b")
    assert asked == ["at once", "a:b"]


def test_the_command_runs_as_a_process(ops, tmp_path):
    (module,) = tmp_path.glob("model_*[0-9].py")
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", "ops", "--model", f"{module.stem}:build", "--json"],
        env=dict(os.environ, PYTHONPATH=str(Path(hyper_parallel.__file__).parent.parent)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 5


@pytest.mark.parametrize(("sort", "key"), [("bytes", "output_bytes"), ("time", "seconds"), ("count", "calls")])
def test_the_largest_come_first(ops, sort, key):
    result = ops("{module}:build", "--json", "--sort", sort)
    values = [row[key] for row in json.loads(result.stdout)["rows"]]
    assert values == sorted(values, reverse=True)


def test_a_cell_without_inputs_is_called_without_inputs(ops):
    assert rows_of(ops("{module}:build_constant", "--json"))["Exp"]["calls"] == 1


def test_what_the_model_prints_does_not_get_into_the_json(ops):
    result = ops("{module}:build_talks", "--json")
    assert rows_of(result)["Exp"]["calls"] == 1
    assert "building" in result.stderr
    assert "running" in result.stderr


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{module}", "module:factory"),
        (":build", "module:factory"),
        ("{module}:", "module:factory"),
        ("there_is_no_such_model:build", "can't import there_is_no_such_model"),
        ("{module}_broken:build", "there_is_no_such_module"),
        ("..relative:build", "can't import"),
        ("{module}:rebuild", "has no rebuild"),
        ("{module}:size", "must be callable, but is a int"),
        ("{module}:build_number", "must return a Cell, or (Cell, tuple of inputs), but returned a int"),
        ("{module}:build_wrong_tuple", "but returned (Net, Tensor)"),
        ("{module}:build_exits", "build_exits() raised SystemExit: 0"),
        ("{module}:build_fails", "build_fails() raised KeyError: 'no such size'"),
        ("{module}:build_without_inputs", "gives inputs by returning (Cell, tuple of inputs)"),
        ("{module}:build_too_many_inputs", "the forward with the factory's 2 inputs raised TypeError"),
        ("{module}:build_wrong_shape", "the forward with the factory's 1 input raised ValueError"),
        ("{module}:build_breaks", "raised KeyError: 'no such token'"),
        ("{module}:build_leaves", "raised SystemExit: 0"),
    ],
)
def test_a_model_that_can_not_be_made_or_run_is_refused(ops, model, expected):
    assert_refused(ops(model), expected)


@pytest.mark.parametrize("options", [["--steps", "0"], ["--steps", "many"], ["--sort", "name"]])
def test_a_wrong_option_is_refused(ops, options):
    assert_refused(ops("{module}:build", *options), options[0])


def test_help_says_that_code_is_executed():
    result = CliRunner().invoke(command, ["ops", "--help"])
    assert result.exit_code == 0
    assert "executes" in result.stdout


def test_python_that_mindspore_computes_with_is_no_operator():
    x = numbers(2, 4)
    seen = []
    with Interception(lambda name, run, args: seen.append(name) or run(*args)):
        operators.swapaxes(x, 0, 1)
    assert seen == ["make_range", "Transpose"]

    class Swaps(nn.Cell):
        def construct(self, x):
            return operators.swapaxes(x, 0, 1)

    assert [row.dispatch_name for row in measure_operators(Swaps(), (x,))] == ["Transpose"]


def test_operators_on_results_and_on_new_tensors_alone_are_seen():
    class FromNothing(nn.Cell):
        def construct(self, x):
            return operators.exp(x) + operators.tanh(operators.ones((2, 2)))

    rows = measure_operators(FromNothing(), (operators.ones((2, 2)),))
    assert [row.dispatch_name for row in rows] == ["Exp", "Ones", "Tanh", "AddExt"]


def test_a_model_that_takes_gradients_is_measured():
    class Trains(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def construct(self, x):
            return ms.grad(lambda x: self.layer(x).sum())(x)

    names = {row.dispatch_name for row in measure_operators(Trains(), (numbers(2, 4),))}
    assert names > {"MatMul", "Tanh", "SumExt"}


def test_an_operator_that_no_timed_forward_runs_took_no_time():
    class Changes(nn.Cell):
        calls = 0

        def construct(self, x):
            self.calls += 1
            return {2: operators.exp, 3: operators.sin}.get(self.calls, operators.tanh)(x)

    rows = measure_operators(Changes(), (numbers(2, 4),))
    assert [(row.name, row.calls, row.seconds) for row in rows] == [("Exp", 1, 0.0)]


def test_a_shared_cell_goes_by_its_first_path():
    layer = Layer()
    rows = measure_operators(Stack([layer, layer]), (numbers(2, 4),))
    (tanh,) = [row for row in rows if row.name == "Tanh"]
    assert (tanh.calls, tanh.cells) == (2, ("layers.0",))


def test_a_model_runs_once_to_warm_up_once_to_be_counted_and_steps_times_to_be_timed():
    layer = Layer()
    measure_operators(layer, (numbers(2, 4),), steps=3)
    assert layer.calls == 5


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        measure_operators(Layer(), (numbers(2, 4),), steps=0)
