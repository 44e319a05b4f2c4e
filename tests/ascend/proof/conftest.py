"""Scripts of the proofs, and how their processes are run."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

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


def marked(lines: str, mark: str) -> Sequence[str]:
    """What stands behind a mark, line by line."""
    return [line.removeprefix(mark) for line in lines.splitlines() if line.startswith(mark)]
