"""Another distribution may own the same top-level package: apart it stays importable, in one folder it is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel import _beside

OUR_FOLDER = Path(hyper_parallel.__file__).parent


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a stand-in for the neighbouring project."""
    root = tmp_path / "other"
    for package, text in {
        "hyper_parallel": "whose = 'theirs'",
        "hyper_parallel/platform": "whose = 'theirs'",
        "hyper_parallel/core": "",
        "hyper_parallel/core/dtensor": "class DTensor: pass",
        "hyper_parallel/core/activation_checkpoint": "whose = 'theirs'",
    }.items():
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(text + "\n")
    info = root / "their_parallel-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parallel\nVersion: 1.0.0\n")
    files = "".join(f"{path.relative_to(root)},,\n" for path in sorted(root.rglob("*.py")))
    (info / "RECORD").write_text(files)
    return root


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process with these folders first on the path."""
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path, "GLOG_v": "3"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_in_front_of_the_other_ours_is_in_place_and_theirs_stays_importable(other: Path) -> None:
    code = (
        "from hyper_parallel import activation_policy\n"
        "from hyper_parallel.core.dtensor import DTensor\n"
        "from hyper_parallel.platform import whose\n"
        "from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper\n"
        "print(activation_policy.__module__, whose, checkpoint_wrapper.__module__)"
    )
    done = run(code, OUR_FOLDER.parent, other)
    assert done.stdout.split()[-3:] == [
        "hyper_parallel.core.activation_memory.decorator",
        "theirs",
        "hyper_parallel.core.activation_memory.wrappers",
    ], done.stderr


def test_installed_over_the_other_the_import_names_it_and_the_remedy(other: Path) -> None:
    for name in ("hyper_parallel", "ms_ops"):
        shutil.copytree(OUR_FOLDER.parent / name, other / name, dirs_exist_ok=True)
    done = run("import hyper_parallel", other)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: hyper_parallel was installed over another distribution (their-parallel 1.0")
    assert "holds platform, core/dtensor of it" in message
    assert "pip install --target DIR hyper-parallel, with DIR first on PYTHONPATH" in message


def test_behind_the_other_theirs_is_found(other: Path) -> None:
    """Python finds the first one; ours can't say anything then."""
    done = run("import hyper_parallel; print(hyper_parallel.whose)", other, OUR_FOLDER.parent)
    assert done.stdout.split()[-1:] == ["theirs"], done.stderr


def test_the_packages_that_are_ours_are_listed() -> None:
    assert {path.parent.name for path in OUR_FOLDER.glob("*/__init__.py")} == _beside.OURS
    assert {path.parent.name for path in (OUR_FOLDER / "core").glob("*/__init__.py")} == _beside.OURS_IN_CORE
