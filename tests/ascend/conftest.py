"""Programs of these tests run on the emulated Ascend device, each in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

collect_ignore_glob = ["*_program.py"]  # they run on the emulated device only, and hold no doctests

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "scripts" / "ascend_emulator"


@dataclass
class Result:
    """What a program did on the emulated device."""

    returncode: int
    stdout: str
    stderr: str
    races: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    folder: Path = Path()

    def check(self) -> "Result":
        """Fail with the program's own words unless it ended well, without a race."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout[-3000:]}\n{self.stderr[-5000:]}"
        assert not self.races, "\n".join(race["text"] for race in self.races)
        return self

    def json(self) -> Any:
        """The last line of the program's output, as JSON."""
        return json.loads(self.check().stdout.strip().splitlines()[-1])


Emulated = Callable[..., Result]


def load_build() -> ModuleType:
    """`scripts/ascend_emulator/build.py`, which isn't in a package."""
    spec = importlib.util.spec_from_file_location("ascend_emulator_build", EMULATOR / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulator_environment() -> dict[str, str]:
    """The environment of the built emulator. Workers at the same time wait for one build, which later sessions find."""
    before = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ASCSIM_") or name == "ASCSIM_BUILD_DIR"
    }
    quiet = {name: value for name, value in before.items() if name not in ("GLOG_v", "MS_SIMULATION_LEVEL")}
    return quiet | load_build().build() | {"GLOG_v": "4"}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """A trace in the order of the calls; lines are written as the calls are done."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["index"])


@pytest.fixture(scope="session")
def emulated(emulator_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """`emulated(program, *args, seed=None, env=None, timeout=120, trace=False) -> Result`.

    `program` is the text of a Python program, or the path of one. It runs in a new folder, with the repository on its
    path. `seed` makes the schedule random; `trace=True` keeps every ACL call; `env` adds variables, also ASCSIM_* ones.
    """

    def run(
        program: str | Path,
        *args: object,
        seed: int | None = None,
        env: dict[str, object] | None = None,
        timeout: float = 120,
        trace: bool = False,
    ) -> Result:
        folder = tmp_path_factory.mktemp("emulated")
        if not isinstance(program, Path):
            text = textwrap.dedent(program)
            program = folder / "program.py"
            program.write_text(text)
        races, counters, calls = folder / "races.json", folder / "counters.json", folder / "trace.jsonl"
        variables = emulator_environment | {"ASCSIM_RACES_FILE": str(races), "ASCSIM_COUNTERS_FILE": str(counters)}
        variables["PYTHONPATH"] = f"{ROOT}:{variables['PYTHONPATH']}"
        if trace:
            variables["ASCSIM_TRACE_FILE"] = str(calls)
        if seed is not None:
            variables["ASCSIM_SEED"] = str(seed)
        variables |= {name: str(value) for name, value in (env or {}).items()}
        done = subprocess.run(
            [sys.executable, str(program), *map(str, args)],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Result(
            done.returncode,
            done.stdout,
            done.stderr,
            json.loads(races.read_text()) if races.exists() else [],
            json.loads(counters.read_text()) if counters.exists() else {},
            read_lines(calls) if trace and calls.exists() else [],
            folder,
        )

    return run
