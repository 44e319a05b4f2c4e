"""Processes that fork, end or are killed while tensors are swapped: no hang, no file left, the parent goes on."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.core.swap_nets import files_in

PROGRAM = """
import os, sys, threading, time
import mindspore as ms
import numpy as np
from pathlib import Path
from hyper_parallel import SwapManager, SwapStateError
from tests.core.swap_nets import X, KINDS, files_in, net
from tests.helpers import assert_same, gradients, mean_square, settled

folder = Path(sys.argv[1])
SwapManager().configure(min_bytes=0, folder=folder)
swapping = net(**KINDS["swap"])


def in_child(work):
    "The exit code of a child that does this."
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"
"""


def start(folder: Path, program: str) -> "subprocess.Popen[str]":
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(program), str(folder)],
        env={**os.environ, "PYTHONPATH": root, "GLOG_v": "3"},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "spill"
    made.mkdir()
    return made


def test_children_that_fork_swap_for_themselves_and_the_parent_goes_on(folder: Path) -> None:
    """As dataset workers: MindSpore 2.10 runs no operator in a child that is forked after its parent's first one."""
    program = """
        def trains():
            first, second = gradients(swapping, X, wait=True), gradients(net(), X)
            assert_same(first, second)
            assert SwapManager().stats().offloaded_bytes > 0

        SwapManager().engine  # the parent has a tier and a lock already
        assert in_child(trains) == 0, "before the parent's first operator"

        def forward(*args):
            value = settled(mean_square(swapping(*args)))
            engine = SwapManager().engine

            def reads():
                assert SwapManager().stats().live_bytes == 0
                assert files_in(folder) == 0, "the parent's files are open in the child"
                try:
                    engine.fetch(None)
                except SwapStateError as error:
                    assert "was forked after the forward" in str(error)
                    return
                raise AssertionError("read a tensor of the parent's")

            with engine._lock:  # as if the copy thread had it when the parent forks
                assert in_child(reads) == 0, "in mid-step"
            assert files_in(folder) > 0
            return value

        weights = swapping.trainable_params()
        got = ms.value_and_grad(forward, 0, weights)(X)
        want = ms.value_and_grad(lambda x: mean_square(net()(x)), 0)(X)
        assert np.array_equal(got[1][0].asnumpy(), want[1].asnumpy())
        del got, want
        assert SwapManager().stats().live_bytes == 0
        print("done")
    """
    output, _ = start(folder, program).communicate(timeout=240)
    assert output.endswith("done\n"), output


def test_an_exit_in_mid_step_ends_at_once_with_its_own_code(folder: Path) -> None:
    program = """
        def forward(x):
            value = settled(mean_square(swapping(x)))
            sys.exit(7)

        try:
            ms.grad(forward)(X)
        finally:
            print(threading.active_count(), files_in(folder) > 0)
    """
    process = start(folder, program)
    output, _ = process.communicate(timeout=240)
    assert (process.returncode, output) == (7, "2 True\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_in_mid_step_leaves_no_file(folder: Path, number: signal.Signals) -> None:
    program = """
        def forward(x):
            value = settled(mean_square(swapping(x)))
            print("ready", flush=True)
            time.sleep(100)
            return value

        ms.grad(forward)(X)
    """
    process = start(folder, program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert sum(1 for _ in slabs_of(process.pid, folder)) == 1
    process.send_signal(number)
    begin = time.monotonic()
    process.communicate(timeout=240)
    assert process.returncode != 0
    assert time.monotonic() - begin < 60, "it was the signal, not the end of the sleep"
    assert files_in(folder) == 0


def slabs_of(process: int, folder: Path) -> list[str]:
    links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    return [link for link in links if link.startswith(f"{folder}/")]
