"""How much memory a container has, and how many ranks share it."""

import os
from pathlib import Path

import pytest

from ms_ops import memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    files = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(memory, "_LIMIT_FILES", files)
    return files


def test_without_limit_files_it_is_the_memory_of_the_machine(limits: tuple[Path, Path]) -> None:
    assert memory.container_bytes() == MACHINE


def test_max_means_no_limit(limits: tuple[Path, Path]) -> None:
    limits[0].write_text("max\n")
    assert memory.container_bytes() == MACHINE


def test_the_limit_of_the_control_group_counts(limits: tuple[Path, Path]) -> None:
    limits[0].write_text("4096\n")
    assert memory.container_bytes() == 4096


def test_a_limit_above_the_machine_is_no_limit(limits: tuple[Path, Path]) -> None:
    limits[0].write_text(str(2 * MACHINE))
    assert memory.container_bytes() == MACHINE


def test_the_older_file_is_read_when_the_newer_one_says_nothing(limits: tuple[Path, Path]) -> None:
    limits[0].write_text("max")
    limits[1].write_text("8192")
    assert memory.container_bytes() == 8192


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MS_LOCAL_WORKER_NUM", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(no_ranks: pytest.MonkeyPatch) -> None:
    assert memory.ranks_on_this_host() == 1


@pytest.mark.parametrize("name", ["MS_LOCAL_WORKER_NUM", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_each_variable_of_a_launcher_is_read(no_ranks: pytest.MonkeyPatch, name: str) -> None:
    no_ranks.setenv(name, "8")
    assert memory.ranks_on_this_host() == 8


@pytest.mark.parametrize("value", ["", "0", "-2", "many"])
def test_a_variable_that_is_no_count_is_passed_over(no_ranks: pytest.MonkeyPatch, value: str) -> None:
    no_ranks.setenv("MS_LOCAL_WORKER_NUM", value)
    no_ranks.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert memory.ranks_on_this_host() == 2
