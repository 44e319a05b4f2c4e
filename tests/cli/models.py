"""Modules with models, which commands import, and what a refusal looks like."""

import textwrap
from pathlib import Path

import pytest


def module_in(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module, and a broken one, into a folder that becomes the current one; gives the module's name."""
    name = f"model_{abs(hash(folder))}"  # its own per test, since imported modules stay
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    (folder / f"{name}_broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def assert_refused(result, *expected):
    """Exit status 2, nothing on stdout, and a message without a traceback."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for text in expected:
        assert text in result.stderr
