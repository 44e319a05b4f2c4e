"""Two real processes with MindSpore's own collectives (MCCL on CPU): numbers, and what a replay communicates."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("two ranks")  # one launch serves them all
KEPT = ("kept collectives", "kept by a table", "swapped by a table")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    tools = Path(sys.executable).parent  # the launcher starts `python`
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOG_v": "3",
    }
    run = subprocess.run(
        [
            str(tools / "msrun"),
            *("--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"),
            f"--log_dir={folder}",
            str(Path(__file__).parent / "two_ranks.py"),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = [file.read_text() for file in sorted(folder.glob("worker_*.log"))]
    assert run.returncode == 0, "\n".join([run.stderr[-2000:], *(log[-2000:] for log in logs)])
    return [
        json.loads(line.removeprefix("found "))
        for log in logs
        for line in log.splitlines()
        if line.startswith("found ")
    ]


def test_both_ranks_ran(ranks: list[dict[str, Any]]) -> None:
    assert sorted(found["rank"] for found in ranks) == [0, 1]
    assert {found["ranks"] for found in ranks} == {2}


def test_loss_and_gradients_are_plains_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [found["same"] for found in ranks] == [dict.fromkeys(found["same"], True) for found in ranks]


def test_a_kept_collective_is_not_communicated_again(ranks: list[dict[str, Any]]) -> None:
    assert [[found["again"][name] for name in KEPT] for found in ranks] == [[0, 0, 0]] * 2


def test_a_replay_communicates_again_where_nothing_says_otherwise(ranks: list[dict[str, Any]]) -> None:
    assert [found["again"]["recompute"] for found in ranks] == [1, 1]


def test_a_collective_that_writes_into_its_argument_is_kept_and_repeated_exactly(ranks: list[dict[str, Any]]) -> None:
    assert [found["wrong in place"] for found in ranks] == [[], []]


def test_nothing_is_left(ranks: list[dict[str, Any]]) -> None:
    assert [found["live"] for found in ranks] == [0, 0]
