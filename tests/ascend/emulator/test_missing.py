"""What the emulator doesn't have fails by its name; what it can't be built with is told plainly."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EMULATOR = Path(__file__).resolve().parents[3] / "scripts" / "ascend_emulator"


def run_build(env, out, script=EMULATOR / "build.py"):
    return subprocess.run(
        [sys.executable, str(script), "--out", str(out)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_wheel(folder, version, plugin=False):
    (folder / "mindspore" / "lib" / "plugin").mkdir(parents=True)
    (folder / "mindspore" / "__init__.py").touch()
    if plugin:
        (folder / "mindspore" / "lib" / "plugin" / "libmindspore_ascend.so.2").touch()
    (folder / f"mindspore-{version}.dist-info").mkdir()
    (folder / f"mindspore-{version}.dist-info" / "METADATA").write_text(f"Name: mindspore\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def test_every_collective_call_fails_by_its_name(emulated, emulator_environment):
    library = emulator_environment["ASCSIM_LIBRARY"]
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = sorted(line.split()[-1] for line in listed.splitlines() if line.split()[-1].startswith("Hccl"))
    assert "HcclAllReduce" in names
    assert "HcclCommInitRootInfo" in names
    done = emulated(
        """
        import ctypes, os, sys

        library = ctypes.CDLL(os.environ["ASCSIM_LIBRARY"])
        for name in sys.argv[1:]:
            print(name, getattr(library, name)())
        """,
        *names,
    )
    answers = dict(line.split() for line in done.check().stdout.splitlines())
    # A setting, which MindSpore makes at every start.
    assert answers.pop("HcclSetConfig") == "0"
    for name, answer in answers.items():
        assert answer != "0", name
        assert f"{name} is not emulated" in done.stderr


def test_a_setting_that_does_not_exist_is_refused(emulated):
    done = emulated(
        """
        import ctypes, os
        ctypes.CDLL(os.environ["ASCSIM_LIBRARY"]).aclInit(None)
        """,
        env={"ASCSIM_COPY_DELAY": 5},
    )
    assert done.returncode == 2
    assert "there is no setting ASCSIM_COPY_DELAY" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("ASCSIM_HBM_MB", "much", "a number of at least 0, not 'much'"), ("ASCSIM_RACES", "yes", "raise, report or off")],
)
def test_a_setting_of_another_kind_is_refused(emulated, name, value, words):
    done = emulated(
        """
        import ctypes, os
        ctypes.CDLL(os.environ["ASCSIM_LIBRARY"]).aclInit(None)
        """,
        env={name: value},
    )
    assert done.returncode == 2
    assert words in done.stderr


def test_an_unknown_wheel_is_refused_by_its_version(tmp_path):
    done = run_build(fake_wheel(tmp_path, "2.7.1", plugin=True), tmp_path / "out")
    assert done.returncode == 1
    assert "the wheel of MindSpore 2.7.1 is unknown" in done.stderr
    assert "2.10.0" in done.stderr


def test_a_wheel_without_the_plugin_is_refused(tmp_path):
    done = run_build(fake_wheel(tmp_path, "2.10.0"), tmp_path / "out")
    assert done.returncode == 1
    assert "has no Ascend plugin" in done.stderr


def test_a_missing_compiler_is_named(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("nm", "readelf"):
        (tools / tool).symlink_to(shutil.which(tool))
    done = run_build({"PATH": str(tools)}, tmp_path / "out")
    assert done.returncode == 1
    assert "g++ can't be found" in done.stderr


def test_run_sh_says_how_it_is_called():
    done = subprocess.run(["bash", str(EMULATOR / "run.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_run_sh_ends_as_the_program_ends(emulator_environment):
    program = "import os, sys; print(os.environ['ASCEND_HOME_PATH']); sys.exit(7)"
    command = ["bash", str(EMULATOR / "run.sh"), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert done.stdout.strip() == emulator_environment["ASCEND_HOME_PATH"]


@pytest.fixture(scope="module")
def built(emulator_environment, tmp_path_factory):
    """A checkout, the folder of its builds, and what three callers at the same time got.

    The sources are replaced by two small ones, so that the build is quick.
    """
    checkout, builds = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("builds")
    (checkout / "src").mkdir()
    shutil.copy(EMULATOR / "build.py", checkout)
    # The stubs call these two.
    (checkout / "src" / "tiny.cc").write_text(
        'extern "C" int ascsim_launch() { return 0; } extern "C" int ascsim_missing() { return 0; }'
    )
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run_build({}, builds, checkout / "build.py"), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], done[0].stderr
    return checkout, builds, [one.stdout for one in done]


@pytest.mark.xdist_group("small build")
def test_callers_at_the_same_time_get_one_build(built):
    _, builds, printed = built
    assert len(set(printed)) == 1
    version = importlib.metadata.version("mindspore")
    lock, made = sorted(builds.iterdir(), key=lambda f: f.is_dir())
    assert lock.name == "lock"
    assert made.name.startswith(version)


@pytest.mark.xdist_group("small build")
def test_a_build_does_not_lead_back_into_the_checkout_that_made_it(built, tmp_path):
    checkout, builds, _ = built
    other = tmp_path / "other"
    shutil.copytree(checkout, other)
    done = run_build({}, builds, other / "build.py")
    assert len([made for made in builds.iterdir() if made.is_dir()]) == 1, "it was found"
    assert str(other / "python") in done.stdout
    assert str(checkout) not in done.stdout
