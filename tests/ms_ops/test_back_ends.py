"""Which back end a device target gets, and what a device without one is told."""

from types import SimpleNamespace

import mindspore as ms
import pytest

from ms_ops import back_ends
from ms_ops.ascend import backend as ascend
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
