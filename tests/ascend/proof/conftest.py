"""Scripts of the proofs, and how their processes are run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
FIGURES = Path(__file__).with_name("figures_program.py")

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def script(emulator_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Script:
    """`script(name, *arguments, **variables)`: a script of the repository on the emulated device."""

    def run(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = emulator_environment | variables
        environment["PYTHONPATH"] = f"{SCRIPTS.parent}:{environment['PYTHONPATH']}"
        return subprocess.run(
            [sys.executable, str(SCRIPTS / name), *map(str, arguments)],
            env=environment,
            cwd=tmp_path_factory.mktemp("script"),
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def figures(emulated: Any) -> dict[str, Any]:
    """What one process has found out about calls, peaks and limits of memory."""
    return emulated(FIGURES, timeout=280).json()
