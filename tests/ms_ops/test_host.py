"""The tiers: slots, limits, files, failures."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_ops.file_tier import SLAB_BYTES, FileTier
from ms_ops.host import HostTier, Tier, TierFull

PAGE = 4096


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@pytest.fixture(params=["file", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = FileTier(tmp_path, 2**30) if request.param == "file" else HostTier(2**30)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, 2**30)
    yield made
    made.close()


ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a number": np.array(7, np.int64),
    "bool": np.array([True, False, True]),
    "float16": np.arange(3, dtype=np.float16),
    "many pages": np.random.RandomState(0).rand(5000),
    "not contiguous": np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_what_was_written_is_read(tier: Tier, kind: str) -> None:
    array = ARRAYS[kind]
    slot = tier.take(array.nbytes)
    tier.write(slot, [raw(array)])
    back = np.empty(array.nbytes, np.uint8)
    tier.read(slot, back)
    assert np.array_equal(back, raw(array))


def test_slots_do_not_overlap(tier: Tier) -> None:
    arrays = [np.full(size, index, np.uint8) for index, size in enumerate((1, PAGE, PAGE + 1, 3 * PAGE))]
    slots = [tier.take(array.nbytes) for array in arrays]
    for slot, array in zip(slots, arrays, strict=True):
        tier.write(slot, [raw(array)])
    for slot, array in zip(slots, arrays, strict=True):
        back = np.empty_like(array)
        tier.read(slot, back)
        assert np.array_equal(back, array)


@pytest.mark.parametrize(("asked", "given"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_slots_are_whole_pages(tier: Tier, asked: int, given: int) -> None:
    slot = tier.take(asked)
    assert (slot.nbytes, tier.used) == (given, given)


def test_a_slot_that_was_given_back_is_the_next_of_its_size(tier: Tier) -> None:
    first = tier.take(100)
    tier.take(PAGE + 1)
    tier.give_back(first)
    assert tier.used == 2 * PAGE
    allocated = tier.allocated
    assert tier.take(2000) is first
    assert tier.allocated == allocated


def test_a_full_tier_says_limit_allocated_and_needed(tmp_path: Path) -> None:
    for tier in (HostTier(3 * PAGE), FileTier(tmp_path, 3 * PAGE)):
        slots = [tier.take(2 * PAGE)]
        with pytest.raises(TierFull) as caught:
            slots.append(tier.take(2 * PAGE))
        expected = "host_budget is 12288 bytes, 8192 of them are allocated, and 8192 more are needed"
        assert caught.value.reason == str(caught.value) == expected
        assert tier.used == 2 * PAGE
        tier.close()


def test_free_slots_of_other_sizes_make_room(tier: Tier) -> None:
    tier.limit = 4 * PAGE
    slots = [tier.take(PAGE) for _ in range(4)]
    for slot in slots:
        tier.give_back(slot)
    assert tier.take(4 * PAGE).nbytes == 4 * PAGE
    assert tier.allocated == 4 * PAGE


def test_the_host_tier_makes_room_while_others_are_in_use() -> None:
    tier = HostTier(4 * PAGE)
    kept, free = tier.take(PAGE), tier.take(PAGE)
    tier.give_back(free)
    assert tier.take(3 * PAGE).nbytes == 3 * PAGE
    assert (tier.used, tier.allocated, kept.nbytes) == (4 * PAGE, 4 * PAGE, PAGE)


def test_trim_gives_back_what_is_free(tier: Tier) -> None:
    tier.give_back(tier.take(PAGE))
    tier.trim()
    assert (tier.allocated, tier.used) == (0, 0)


def test_trim_keeps_what_is_in_use(tier: Tier) -> None:
    array = np.arange(10)
    slot = tier.take(array.nbytes)
    tier.write(slot, [raw(array)])
    tier.trim()
    back = np.empty(array.nbytes, np.uint8)
    tier.read(slot, back)
    assert np.array_equal(back, raw(array))


def test_steps_of_ever_other_sizes_do_not_take_ever_more(tmp_path: Path) -> None:
    """As with sequences of other lengths in every step."""
    sizes = np.random.RandomState(0).randint(1, 40 * PAGE, (100, 6))
    for tier in (HostTier(2**30), FileTier(tmp_path, 2**30, 128 * PAGE)):
        for step in sizes:
            for slot in [tier.take(int(nbytes)) for nbytes in step]:
                tier.give_back(slot)
        assert tier.allocated <= 2 * sizes.sum(axis=1).max() + 128 * PAGE
        tier.close()


def test_a_hundred_steps_that_take_and_give_back_in_any_order_take_what_one_does(tmp_path: Path) -> None:
    draw = np.random.RandomState(0)
    sizes = draw.randint(10 * PAGE, 40 * PAGE, 50) | 1
    for tier, slab in ((HostTier(2**30), 0), (FileTier(tmp_path, 2**30, 512 * PAGE), 512 * PAGE)):
        for _ in range(100):
            slots = [tier.take(int(nbytes)) for nbytes in draw.permutation(sizes)]
            for index in draw.permutation(len(slots)):
                tier.give_back(slots[index])
        assert tier.allocated <= 1.1 * sizes.sum() + slab
        tier.close()


@pytest.mark.parametrize("nbytes", [int(2.08 * 2**20), 3 * 2**20 + 1, 999_999])
def test_what_is_allocated_is_hardly_more_than_what_was_asked_for(tmp_path: Path, nbytes: int) -> None:
    for tier in (HostTier(2**30), FileTier(tmp_path, 2**30, 2**20)):
        for _ in range(20):
            tier.take(nbytes)
        assert tier.allocated <= 1.1 * 20 * nbytes
        tier.close()


# ---- files


def test_a_slab_serves_many_slots(files: FileTier) -> None:
    slots = [files.take(PAGE) for _ in range(8)]
    assert files.allocated == SLAB_BYTES
    assert len({slot.place for slot in slots}) == 1
    assert sorted(slot.offset for slot in slots) == [PAGE * index for index in range(8)]


def test_the_last_bytes_of_a_budget_are_handed_out_exactly(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 5 * PAGE)
    assert [tier.take(PAGE).nbytes for _ in range(5)] == [PAGE] * 5
    assert tier.allocated == 5 * PAGE
    tier.close()


def test_a_file_has_no_name_and_is_for_its_owner_only(files: FileTier, tmp_path: Path) -> None:
    slot = files.take(PAGE)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(slot.place)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_size == SLAB_BYTES


def test_close_closes_the_files(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 2**30)
    slot = tier.take(PAGE)
    tier.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slot.place)
    assert tier.allocated == 0


def test_without_a_folder_it_is_the_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert FileTier(None, 1).folder == tmp_path


def test_what_is_no_folder_is_refused_when_the_tier_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="not a folder"):
        FileTier(tmp_path / "missing", 1)


def test_a_full_disk_names_folder_bytes_and_reason_and_closes_the_file(
    files: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def full(fd: int, offset: int, size: int) -> None:
        opened.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFull) as caught:
        files.take(PAGE)
    texts = (str(tmp_path), f"another {SLAB_BYTES} bytes", "No space left on device", "0 bytes are allocated")
    assert all(text in caught.value.reason for text in texts)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert (files.allocated, files.used) == (0, 0)


def test_writes_and_reads_that_stop_half_way_go_on(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, [views[0][:1000]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:700]], offset))
    array = np.random.RandomState(0).rand(1000)
    slot = files.take(array.nbytes)
    files.write(slot, [raw(array)])
    back = np.empty(array.nbytes, np.uint8)
    files.read(slot, back)
    assert np.array_equal(back, raw(array))


def test_a_disk_that_takes_nothing_more_is_an_error(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = files.take(PAGE)
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 0)
    with pytest.raises(OSError, match="the disk took 0 of 4096 bytes, and no more"):
        files.write(slot, [np.zeros(PAGE, np.uint8)])


def test_a_file_that_ends_too_early_is_an_error(files: FileTier) -> None:
    array = np.zeros(PAGE, np.uint8)
    slot = files.take(array.nbytes)
    files.write(slot, [raw(array)])
    os.ftruncate(slot.place, 100)
    with pytest.raises(OSError, match=r"came back short: 100 of 4096 bytes"):
        files.read(slot, array)


def test_an_error_of_the_disk_reaches_the_caller(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    slot = files.take(PAGE)
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(OSError, match="Input/output error"):
        files.write(slot, [raw(np.zeros(4, np.uint8))])
