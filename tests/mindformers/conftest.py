"""MindFormers' own activation checkpointing, from its wheels, alone and unchanged."""

import importlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hyper_parallel import SwapManager
from tests.exactness.conftest import everything_is_swapped as everything_is_swapped

VERSIONS = ("2.0.0", "2.1.0")

_PACKAGES = (
    "mindformers",
    "mindformers.pynative",
    "mindformers.pynative.config",
    "mindformers.pynative.distributed",
    "mindformers.tools",
)


@dataclass(frozen=True)
class MindFormers:
    """The modules of one version."""

    version: str
    checkpointing: Any
    """`mindformers.pynative.distributed.activation_checkpoint`."""
    config: Any
    """`mindformers.pynative.config.config`."""


class Unpacked(dict[str, Path]):
    """The unpacked wheel of each version, from when it is asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, version: str) -> Path:
        self[version] = unpack(version, self._folders.mktemp(f"mindformers-{version}"))
        return self[version]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels; without them nothing is tested, which is a failure."""
    return Unpacked(tmp_path_factory)


def unpack(version: str, folder: Path) -> Path:
    """Download a version into a folder and unpack it there."""
    requirement = f"mindformers=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("mindformers-*.whl"))
    if done.returncode or len(wheels) != 1:
        pytest.fail(
            f"pip could not download {requirement}, which these tests run unchanged; they need a network or a "
            f"configured package index. pip said: {done.stderr.strip() or 'nothing'}",
            pytrace=False,
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return folder


# one worker has all tests of a version: what one of them has measured others compare with
@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.xdist_group(f"MindFormers {each}")) for each in VERSIONS])
def mindformers(request: pytest.FixtureRequest, unpacked: dict[str, Path]) -> Iterator[MindFormers]:
    """Activation checkpointing of one version of MindFormers."""
    with loaded(request.param, unpacked[request.param]) as modules:
        yield modules


@contextmanager
def loaded(version: str, folder: Path) -> Iterator[MindFormers]:
    """The modules of a version, which are gone afterwards."""
    assert not names_loaded(), "MindFormers was imported before"
    try:
        yield _load(version, folder)
    finally:
        for name in names_loaded():
            del sys.modules[name]


def names_loaded() -> list[str]:
    """The modules of MindFormers that are imported."""
    return [name for name in sys.modules if name == "mindformers" or name.startswith("mindformers.")]


def _load(version: str, folder: Path) -> MindFormers:
    for name in _PACKAGES:  # empty: their __init__ would import all of MindFormers
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    log = ModuleType("mindformers.tools.logger")
    log.logger = logging.getLogger("mindformers")  # type: ignore[attr-defined]
    sys.modules[log.__name__] = log
    checkpointing = importlib.import_module("mindformers.pynative.distributed.activation_checkpoint")
    config = importlib.import_module("mindformers.pynative.config.config")
    assert Path(checkpointing.__file__).is_relative_to(folder)
    return MindFormers(version, checkpointing, config)


@pytest.fixture(autouse=True)
def in_memory(everything_is_swapped: None) -> None:
    """Swap to host memory, which needs no folder."""
    SwapManager().configure(min_bytes=0, tier="host")
