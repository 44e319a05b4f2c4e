"""What every test needs: MindSpore quiet, and a working directory that may be littered."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before MindSpore is imported: only errors are logged.
os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(scope="session", autouse=True)
def littered_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """MindSpore leaves rank_0 and kernel_meta in the working directory: give it one of its own."""
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("work")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def what_is_imported_stays() -> None:
    """MindSpore and all tests are some 200,000 objects: `gc.collect()` and collections by themselves leave them out."""
    gc.collect()
    gc.freeze()
