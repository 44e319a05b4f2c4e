"""What the other tests here run is MindFormers' own, and its absence is a failure."""

from pathlib import Path

import pytest

import hyper_parallel
from tests.mindformers.conftest import MindFormers, loaded, names_loaded, unpack


def test_the_module_comes_from_the_wheel_of_its_version(mindformers: MindFormers, unpacked: dict[str, Path]) -> None:
    folder = unpacked[mindformers.version]
    assert Path(mindformers.checkpointing.__file__).is_relative_to(folder)
    assert (folder / f"mindformers-{mindformers.version}.dist-info").is_dir()


def test_it_calls_this_package(mindformers: MindFormers) -> None:
    for name in ("checkpoint_wrapper", "swap_wrapper", "SwapManager", "CheckpointPolicy"):
        assert getattr(mindformers.checkpointing, name) is getattr(hyper_parallel, name)


def test_no_module_of_mindformers_is_left_behind(unpacked: dict[str, Path]) -> None:
    with loaded("2.1.0", unpacked["2.1.0"]):
        assert names_loaded()
    assert not names_loaded()


def test_without_a_package_index_it_fails_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"pip could not download mindformers==2.1.0, .*network"):
        unpack("2.1.0", tmp_path)
