"""Steps that meet a fault: the right exception or the ladder, nothing left, and a retry gives plain's numbers."""

import contextlib
import errno
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import nn

from hyper_parallel import HostMemoryError, SwapManager
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from ms_ops.file_tier import FileTier
from tests.core.swap_fakes import FakeTier, engine_with, group_of, on_host, tensor_of, value_of, wait_for
from tests.core.swap_nets import BYTES, DEPTH, KINDS, X, assert_clean, files_in, net
from tests.helpers import SWAP, Record, assert_same, gradients


@pytest.fixture(scope="module")
def plain() -> Record:
    return gradients(net(), X)


@pytest.fixture(params=KINDS)
def swapping(request: pytest.FixtureRequest) -> nn.Cell:
    return net(**KINDS[request.param])


# ---- the disk


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def test_no_space_while_writing_ends_in_the_ladder_and_is_counted_once(
    manager: SwapManager, plain: Record, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.configure(min_bytes=0, when_exhausted=["keep"])
    monkeypatch.setattr(os, "pwritev", refusing(errno.ENOSPC))
    assert_same(gradients(swapping, X, wait=True), plain)
    stats = manager.stats()
    assert stats.kept_bytes >= (DEPTH - 1) * BYTES
    assert (stats.offloaded_bytes, stats.cancelled_bytes) == (0, 0)
    assert_clean(manager)


def test_all_copies_of_a_step_fail_and_its_retry_does_not_hear_of_them() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.failure = OSError(errno.EIO, "disk on fire")
        handles = group_of(engine, tensor_of(1), tensor_of(2), tensor_of(3))
        tier.gate.clear()
        engine.region_begins()
        wait_for(lambda: handles[0].entry.busy)
        tier.gate.set()
        wait_for(lambda: engine._offloads.failure is not None)
        tier.gate.clear()
        with pytest.raises(HostMemoryError, match="disk on fire"):
            engine.region_begins()
        tier.gate.set()
        wait_for(lambda: engine._offloads.backlog == 0)
        tier.failure = None
        retried = group_of(engine, tensor_of(4))  # a late failure would be raised here, or when the region begins
        engine.region_begins()
        on_host(retried)
        assert [value_of(handle) for handle in (*handles, *retried)] == [1, 2, 3, 4]


def test_a_thread_hears_of_its_own_failures_only() -> None:
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.failure = OSError(errno.EIO, "disk on fire")
        handles = group_of(engine, tensor_of(1))
        engine.region_begins()
        wait_for(lambda: engine._offloads.failure is not None)
        other = threading.Thread(target=engine.region_begins)
        other.start()
        other.join(10)
        with pytest.raises(HostMemoryError, match="disk on fire"):
            engine.region_begins()
        assert value_of(handles[0]) == 1


def test_a_copy_that_finds_no_room_leaves_those_before_it_on_their_way() -> None:
    tier = FakeTier(limit=4096)
    with engine_with(tier) as engine:
        first, second = group_of(engine, tensor_of(1)), tensor_of(2)
        group = engine.open_group("layer")
        group.passes(second)  # held, so that its room is asked for when it is launched
        with group:
            late = [group.add(second)]
        del second
        with pytest.raises(HostMemoryError, match="no room on host"):
            engine.region_begins()
        on_host(first)
        assert [value_of(handle) for handle in (*late, *first)] == [2, 1]


def let_go_after_its_region(engine: SwapEngine) -> list[SwapHandle]:
    """A tensor that other code held until its region had ended: room is asked for when it is launched."""
    held = tensor_of(1)
    group = engine.open_group("layer")
    group.passes(held)
    with group:
        return [group.add(held)]


def test_a_pause_before_backward_asks_for_no_more_room() -> None:
    """What the last region was given or gives is launched in a slow step only."""
    with engine_with(FakeTier()) as engine:
        handles = let_go_after_its_region(engine)
        allocated = engine.tier.allocated
        with engine.back_end.lock:
            engine._offloads._launch_all_held()
        on_host(handles)
        assert engine.tier.allocated == allocated > 0


def test_a_thread_does_not_hear_that_another_one_finds_no_room() -> None:
    heard: list[BaseException] = []

    def begin() -> None:
        try:
            engine.region_begins()
        except HostMemoryError as error:
            heard.append(error)

    with engine_with(FakeTier(limit=1)) as engine:
        group = engine.open_group("layer")
        held = tensor_of(1)
        group.passes(held)
        with group:
            handles = [group.add(held)]
        engine.region_begins()  # it is held still
        del held
        other = threading.Thread(target=begin)
        other.start()
        other.join(10)
        assert heard == []
        begin()
        assert "no room on host" in str(heard[0])
        assert value_of(handles[0]) == 1


def test_a_file_that_ends_too_early_names_the_tensor(manager: SwapManager, plain: Record, swapping: nn.Cell) -> None:
    def cut(cell: nn.Cell, grad_input: Any, grad_output: Any) -> None:
        for slab in manager.engine.tier._slabs:  # type: ignore[attr-defined]
            os.ftruncate(slab, 0)

    manager.configure(min_bytes=0, window=1)
    handle = swapping.layers[-1].register_backward_hook(cut)
    with pytest.raises(HostMemoryError, match=r"a saved tensor of Layer, shape \(8, 8\).*came back short: 0 of 256"):
        gradients(swapping, X, wait=True)
    handle.remove()
    gc.collect()
    manager.reset()  # the slabs that were cut are given back
    assert_same(gradients(swapping, X, wait=True), plain)
    assert_clean(manager)


def test_a_byte_that_changes_on_host_is_found_by_verify(manager: SwapManager, plain: Record, swapping: nn.Cell) -> None:
    def flip(cell: nn.Cell, grad_input: Any, grad_output: Any) -> None:
        slab = next(iter(manager.engine.tier._slabs))  # type: ignore[attr-defined]
        for page in range(DEPTH * 2):
            byte = os.pread(slab, 1, page * 4096 + 100)
            os.pwrite(slab, bytes([byte[0] ^ 4]), page * 4096 + 100)

    manager.configure(min_bytes=0, window=1, verify=True)
    assert_same(gradients(swapping, X, wait=True), plain)
    handle = swapping.layers[-1].register_backward_hook(flip)
    with pytest.raises(HostMemoryError, match=r"a saved tensor of Layer, shape \(8, 8\).*aren't those that left"):
        gradients(swapping, X, wait=True)
    handle.remove()
    assert_same(gradients(swapping, X, wait=True), plain)
    assert_clean(manager)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write into the folder: root gives up its rights for that."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    folder.rmdir()
    yield
    folder.mkdir()


@contextmanager
def full(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    yield
    filler.unlink()


@pytest.fixture(params=["removed", "read-only", "full"])
def failing_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Any, str]]:
    """A folder, what makes it fail, and what the message says then."""
    folder = tmp_path / "spill"
    folder.mkdir()
    if request.param == "removed":
        yield folder, removed, "takes no file of another .* bytes (No such file or directory)"
    elif request.param == "read-only":
        yield folder, read_only, "takes no file of another .* bytes (Permission denied)"
    else:
        command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small tmpfs can only be mounted by root, where the container allows it")
        yield folder, full, "has no room for another .* bytes (No space left on device)"
        SwapManager().configure()  # closes the files, so that it can be unmounted
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_fails_while_it_runs_raises_and_the_retry_is_right(
    manager: SwapManager, plain: Record, swapping: nn.Cell, failing_folder: tuple[Path, Any, str]
) -> None:
    folder, fails, message = failing_folder
    manager.configure(min_bytes=0, folder=folder, slab=4096)
    assert manager.engine.tier.allocated == 0
    with fails(folder):
        with pytest.raises(HostMemoryError) as caught:
            gradients(swapping, X, wait=True)
        before, after = message.split(".*")
        assert before in str(caught.value) and after in str(caught.value) and str(folder) in str(caught.value)
        assert "give the file tier another folder" in str(caught.value)
        caught = None  # type: ignore[assignment]
    assert_same(gradients(swapping, X, wait=True), plain)
    assert manager.stats().offloaded_bytes > 0
    assert_clean(manager)
    manager.reset()
    assert files_in(folder) == 0


@pytest.mark.parametrize("ladder", [("keep",), ("recompute", "keep")])
def test_a_folder_that_fails_while_it_runs_ends_in_the_ladder(
    manager: SwapManager, plain: Record, failing_folder: tuple[Path, Any, str], ladder: tuple[str, ...]
) -> None:
    folder, fails, _ = failing_folder
    swapping = net(policy=SWAP)
    manager.configure(min_bytes=0, folder=folder, slab=4096, when_exhausted=ladder)
    assert manager.engine.tier.allocated == 0
    with fails(folder):
        assert_same(gradients(swapping, X, wait=True), plain)
        assert manager.stats().kept_bytes > 0
    assert_same(gradients(swapping, X, wait=True), plain)
    assert manager.stats().offloaded_bytes > 0
    assert_clean(manager)


def test_slabs_in_use_outlive_their_folder(
    manager: SwapManager, plain: Record, swapping: nn.Cell, tmp_path: Path
) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    manager.configure(min_bytes=0, folder=folder)
    gradients(swapping, X, wait=True)
    folder.rmdir()
    assert_same(gradients(swapping, X, wait=True), plain)


def test_a_slab_has_no_name_at_any_moment_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a process that is killed leaves no file, whenever that is."""
    names: list[str] = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: names.extend(os.listdir(tmp_path)) or fallocate(*args))
    monkeypatch.setattr("tempfile._mkstemp_inner", lambda *args: pytest.fail("made with a name"))
    tier = FileTier(tmp_path, 2**20, 4096)
    slot = tier.take(1)
    status = os.fstat(slot.place)
    assert (status.st_mode & 0o777, status.st_nlink, names) == (0o600, 0, [])
    tier.close()


def test_ram_that_is_exhausted_is_a_full_tier(manager: SwapManager, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.configure(min_bytes=0, tier="host")
    swapping, empty = net(policy=SWAP), np.empty

    def no_ram(size: Any, kind: Any) -> Any:
        if kind is np.uint8 and threading.current_thread() is threading.main_thread():
            raise MemoryError
        return empty(size, kind)

    with monkeypatch.context() as patch:
        patch.setattr("ms_ops.host.np.empty", no_ram)
        with pytest.raises(HostMemoryError, match="there is no RAM for another 4096 bytes"):
            gradients(swapping, X)
    assert_clean(manager)


def test_a_copy_thread_that_can_not_be_started_is_told_and_the_retry_is_right(
    manager: SwapManager, plain: Record, swapping: nn.Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "hyper_parallel-copy":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            gradients(swapping, X)
    assert_same(gradients(swapping, X, wait=True), plain)
    assert_clean(manager)
