"""The `hyper-parallel` command as a process: light imports, friendly when its libraries are missing."""

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

import hyper_parallel
from hyper_parallel.cli.commands import command


def run_python(code):
    source = str(Path(hyper_parallel.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=dict(os.environ, PYTHONPATH=source),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_importing_the_library_imports_no_command_or_plotting_library():
    done = run_python("""
        import sys
        import hyper_parallel
        print(sorted({"click", "rich", "matplotlib", "jinja2"} & set(sys.modules)))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_libraries_the_command_says_how_to_get_them(missing):
    done = run_python(f"""
        import importlib.util
        import sys
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == {missing!r} else find_spec(name, package)
        from hyper_parallel.cli import main
        main()
    """)
    assert done.returncode == 2
    assert f"needs {missing}; install with: pip install 'hyper-parallel[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_distribution_s():
    result = CliRunner().invoke(command, ["--version"], prog_name="hyper-parallel")
    assert result.exit_code == 0
    assert result.stdout.strip() == f"hyper-parallel {metadata.version('hyper-parallel')}"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in command.commands), ["check", "-h"]])
def test_every_command_has_help(arguments):
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("name", list(command.commands))
def test_every_command_prints_json(name):
    assert "--json" in CliRunner().invoke(command, [name, "--help"]).stdout


def test_an_unknown_command_has_exit_status_2():
    result = CliRunner().invoke(command, ["trian"])
    assert result.exit_code == 2
    assert "trian" in result.stderr
