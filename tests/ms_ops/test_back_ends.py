"""Which back end a device target gets, and what a device without one is told."""

import threading
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from ms_ops import back_ends
from ms_ops.ascend import backend as ascend
from ms_ops.ascend.file_below import AscendFileBackEnd
from ms_ops.ascend.pinned import PinnedTier
from ms_ops.back_ends import back_end_for
from ms_ops.backend import NotSupported
from ms_ops.cpu import CpuBackEnd
from ms_ops.host import HostTier, TierFull


def test_a_cpu_copies_by_a_thread() -> None:
    back_end = back_end_for(2**20, False, lambda: HostTier(2**20), wants_file=False)
    assert isinstance(back_end, CpuBackEnd)
    back_end.close()


def test_another_device_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_ends, "device_target", lambda: "GPU")
    with pytest.raises(NotSupported, match=r"runtime\.Stream, Event, StreamCtx.*device target is 'GPU'"):
        back_end_for(2**20, False, lambda: HostTier(2**20), wants_file=False)


def test_a_mindspore_that_lacks_calls_is_told_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_ends, "device_target", lambda: "Ascend")
    monkeypatch.setattr(ascend, "ms", SimpleNamespace(__version__="2.6.0", runtime=SimpleNamespace(Stream=1, Event=1)))
    with pytest.raises(NotSupported, match=r"MindSpore 2\.6\.0 lacks .*mindspore\.runtime\.StreamCtx"):
        back_end_for(2**20, False, lambda: HostTier(2**20), wants_file=False)


def test_more_pinned_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(TierFull, match="bytes of pinned memory, but this machine"):
        PinnedTier(2**60, lambda: None)


def test_the_device_target_is_mindspores() -> None:
    assert back_ends.device_target() == ms.get_context("device_target")


@pytest.fixture
def pinning_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have pinned memory; what they get isn't pinned, as there is no device."""
    threads: list[threading.Thread] = []

    def pin(tier: Any, nbytes: int) -> None:
        threads.append(threading.current_thread())
        tier._chunks.append(SimpleNamespace(array=np.empty(nbytes, np.uint8), nbytes=nbytes, given=0))
        tier.allocated += nbytes

    monkeypatch.setattr(PinnedTier, "_pin", pin)
    return threads


def test_what_is_not_pinned_is_not_taken_as_pinned(pinning_threads: list[threading.Thread]) -> None:
    tier = PinnedTier(2**20, lambda: None)
    with pytest.raises(TierFull, match="no 8192 are free"):
        tier.take_pinned(8192)
    tier.give_back(tier.take(8192))
    assert tier.take_pinned(8192).nbytes == 8192


class _FilesOnly(AscendFileBackEnd):
    """Reads files into pinned memory, and has no device to load it to."""

    def _load_staged(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            transfer.found = bytes(self._pinned(transfer).place[0][: transfer.span])


def _read_two(pinned: int) -> tuple[list[Any], list[Any]]:
    """Transfers that a file back end has read, on which the calling thread waits; and those it had no room for."""
    file = HostTier(2**20)
    back_end = _FilesOnly(file, pinned)
    refused: list[Any] = []
    back_end.arrived = lambda transfer, loaded, error, begin: refused.append(error)
    transfers = []
    for number in (1, 2):
        slot = file.take(8192)
        file.write(slot, [bytes([number]) * 8192])
        transfers.append(SimpleNamespace(span=8192, slot=slot, is_needed=True, busy=False, found=b""))
    with back_end.lock:
        back_end.load(transfers)
        back_end.wait(lambda: all(transfer.found for transfer in transfers) or bool(refused))
    back_end.close()
    return transfers, refused


def test_memory_for_what_is_read_is_pinned_on_the_thread_that_trains(pinning_threads: list[threading.Thread]) -> None:
    transfers, _ = _read_two(2**20)
    assert [transfer.found[:1] for transfer in transfers] == [b"\x01", b"\x02"]
    assert set(pinning_threads) == {threading.current_thread()}


def test_what_never_fits_into_pinned_memory_is_refused(pinning_threads: list[threading.Thread]) -> None:
    _, refused = _read_two(4096)
    assert "there is no room for 8192 bytes in pinned memory" in str(refused[0])


def test_a_fork_gives_the_files_back() -> None:
    file = HostTier(2**20)
    file.take(8192)
    AscendFileBackEnd(file, 2**20).leave_to_the_parent()
    assert file.allocated == 0
