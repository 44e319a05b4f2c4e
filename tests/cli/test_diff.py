"""``hyper-parallel diff`` and ``schema``."""

import json

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.commands import command
from hyper_parallel.policy_file import json_schema
from tests.cli.models import assert_refused, module_in

MODEL = """
from mindspore import nn

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(3)])

def build():
    return Net()
"""
A = """\
version: 1
rules:
  - {cells: layers.*, policy: must_recompute}
swap: {window: 4MiB}
"""


@pytest.fixture
def diff(tmp_path, monkeypatch):
    """A function that compares `A` with another text."""
    module = module_in(tmp_path, MODEL, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "a.yaml").write_text(A)

    def run(other, *options):
        (tmp_path / "b.yaml").write_text(other)
        return CliRunner().invoke(command, ["diff", "a.yaml", "b.yaml", "--model", f"{module}:build", *options])

    return run


def test_files_that_do_the_same_in_other_words_do_not_differ(diff):
    result = diff(A.replace("cells: layers.*", "layers: 0-2").replace("4MiB", "4096KiB"))
    assert result.exit_code == 0
    assert result.stdout.startswith("a.yaml and b.yaml do the same to")


def test_cells_that_differ_are_listed_with_both(diff):
    result = diff(A.replace("swap:", "  - {cells: layers.1, policy: must_swap}\nswap:"))
    assert result.exit_code == 1, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "layers." in line]
    assert line.split()[:4] == ["layers.1", "must_recompute", "(rule", "1):"]
    assert "must_swap (rule 2): saved tensors >= 1.0 MiB on host" in line


def test_a_cell_that_only_one_decides_about_is_listed(diff):
    result = diff(A.replace("layers.*", "'layers.[0-1]'"))
    (line,) = [line for line in result.stdout.splitlines() if "layers." in line]
    assert line.split()[0] == "layers.2"
    assert line.rstrip().endswith("nobody decides")


def test_settings_that_differ_are_listed(diff):
    result = diff(A.replace("4MiB", "8MiB, when_exhausted: [keep]") + "prefetch: [{load: layers.0, at: layers.2}]\n")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "swap.window: 4194304 in A, 8388608 in B",
        "swap.when_exhausted: nothing in A, keep in B",
        "prefetch: only B loads layers.0 when backward reaches layers.2",
    ]


def test_json_has_both_rows(diff):
    result = diff(A.replace("layers.*", "'layers.[0-1]'"), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    (cell,) = found["cells"]
    assert (cell["path"], cell["before"]["policy"], cell["after"]) == ("layers.2", "must_recompute", None)
    assert found["settings"] == []


def test_a_file_with_mistakes_is_refused(diff):
    assert_refused(diff("version: 2\n"), "b.yaml:1:10: version: got 2, expected 1")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_schema_is_printed(options):
    result = CliRunner().invoke(command, ["schema", *options])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json_schema()
