"""Bytes of every type and layout to pinned memory and back, through `AscendBackEnd` alone; prints what was found."""

import json
from types import SimpleNamespace
from typing import Any

import ascsim  # the emulator's own module
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_ops.ascend import pinned
from ms_ops.ascend.backend import AscendBackEnd
from ms_ops.autograd import wait_for_operators

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
TYPES = ["float16", "bfloat16", "float32", "float64", "bool_", "int8", "uint8", "int16", "int32", "int64", "complex64"]
found: dict[str, Any] = {}


def made(kind: Any) -> Tensor:
    values = Tensor((np.arange(48) % 5).reshape(6, 8).astype(np.float32))
    if kind == ms.complex64:
        return mint.empty((6, 8), dtype=kind).copy_(Tensor(np.arange(48).reshape(6, 8).astype(np.complex64) * (1 + 2j)))
    return values.astype(kind) if kind != ms.float32 else values * 2


def cases() -> dict[str, Tensor]:
    base = Tensor(np.arange(48).reshape(6, 8).astype(np.float32))
    return {
        **{name: made(getattr(ms, name)) for name in TYPES},
        "0-d": (base * 2).sum(),
        "transposed": (base * 2).T,
        "slice": (base * 2)[1:4, 2:7],
        "row": (base * 2)[3],
        "broadcast": (base * 2)[0:1].broadcast_to((5, 8)),
        "permuted": (base * 2).reshape(2, 3, 8).permute(2, 0, 1),
        "offset": (base * 2).reshape(48)[1:].view(47),
    }


def values_of(tensor: Tensor) -> np.ndarray:
    return (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy().copy()


def transfer(back_end: AscendBackEnd, *tensors: Tensor) -> SimpleNamespace:
    pieces, layouts, end = [], [], 0
    for tensor in tensors:
        storage = back_end.storage_of(tensor, *back_end.ask([tensor]))
        begin = -(-end // 64) * 64
        pieces.append(SimpleNamespace(storage=storage, nbytes=storage.nbytes, offset=begin))
        layouts.append(storage.layout)
        end = begin + storage.nbytes
    return SimpleNamespace(
        pieces=pieces,
        layouts=layouts,
        first=layouts[0],
        span=end,
        nbytes=sum(piece.nbytes for piece in pieces),
        slot=back_end.tier.take(end),
        busy=False,
        checksum=None,
        ready=None,
        is_needed=True,
        is_sent=False,
        loaded=None,
        error=None,
    )


def new_back_end(limit: int = 2**24, verify: bool = False) -> AscendBackEnd:
    back_end = AscendBackEnd(limit, verify)

    def sent(transfer: Any, error: Any, begin: float) -> None:
        transfer.is_sent = True
        for piece in transfer.pieces:
            piece.storage = None

    def arrived(transfer: Any, loaded: Any, error: Any, begin: float) -> None:
        transfer.loaded, transfer.error = loaded, error

    back_end.sent, back_end.arrived = sent, arrived
    return back_end


def there_and_back(name: str, fuse: bool, chunk: int, verify: bool) -> None:
    pinned.CHUNK_BYTES = chunk
    back_end, tensors = new_back_end(verify=verify), cases()
    want = {case: values_of(tensor) for case, tensor in tensors.items()}
    groups = [list(tensors)] if fuse else [[case] for case in tensors]
    transfers = [transfer(back_end, *(tensors[case] for case in group)) for group in groups]
    wrong = []
    for group, one in zip(groups, transfers, strict=True):
        for case, piece, layout in zip(group, one.pieces, one.layouts, strict=True):
            if not np.array_equal(values_of(piece.storage.tensor(layout)), want[case]):
                wrong.append(f"{case} on the device")
    ready = back_end.ready()
    for one in transfers:
        one.ready = ready
    back_end.send(transfers)
    tensors.clear()
    back_end.advance(lambda: all(one.is_sent for one in transfers))
    junk = [mint.ones((6, 8), dtype=ms.float32) for _ in range(60)]
    back_end.load(transfers)
    back_end.advance(lambda: True, *transfers)
    del junk
    for group, one in zip(groups, transfers, strict=True):
        if one.busy or one.error is not None:
            wrong.append(f"{group}: {one.busy}, {one.error}")
        for case, piece, layout in zip(group, one.pieces, one.layouts, strict=True):
            back = one.loaded.tensor(layout, piece)
            lies = layout.strides is None or tuple(back.stride()) == layout.strides
            if back.dtype != layout.dtype or back.shape != layout.shape or not lies or back.device == "CPU":
                wrong.append(f"{case} lies {back.shape} {back.dtype} {back.stride()} {back.device}")
            if not np.array_equal(values_of(back), want[case]):
                wrong.append(case)
        wrong += [f"{group}: a host tensor moved" for each in one.slot._tensors.values() if each.device != "CPU"]
        back_end.tier.give_back(one.slot)
    back_end.close()
    found[name] = wrong


def memory_is_given_back_bit_by_bit() -> None:
    pinned.CHUNK_BYTES = 2**28
    back_end = new_back_end(2**28)
    ms.runtime.synchronize()
    before = ms.runtime.memory_allocated()
    tensors = [mint.rand((256, 256)) for _ in range(8)]
    transfers = [transfer(back_end, tensor) for tensor in tensors]
    tensors.clear()
    ready = back_end.ready()
    for one in transfers:
        one.ready = ready
    back_end.send(transfers)
    levels = []
    for index in (None, 1, 7):
        if index is not None:
            back_end.advance(lambda index=index: transfers[index].is_sent)
        wait_for_operators()
        levels.append(ms.runtime.memory_allocated() - before)
    found["memory"] = levels
    found["handles"] = before


def sources_may_go_under_their_copies() -> None:
    """Nobody holds what is copied; other tensors take all the memory that there is, and more is asked for."""
    pinned.CHUNK_BYTES = 2**28
    back_end = new_back_end(2**28)
    tensors = [mint.rand((256, 1024)) for _ in range(8)]
    want = [values_of(tensor) for tensor in tensors]
    transfers = [transfer(back_end, tensor) for tensor in tensors]
    tensors.clear()
    ready = back_end.ready()
    others: list[Tensor] = []
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 5_000)
    ascsim.set_knob("ASCSIM_HBM_MB", ascsim.counters()["device_used"] / 2**20)
    try:
        for one in transfers:
            one.ready = ready
        back_end.send(transfers)
        for one in transfers:
            one.pieces[0].storage = None
        for _ in range(10_000):
            others.append(mint.zeros((256, 1024)))
            ms.runtime.current_stream().query()  # an operator for which there is no memory fails here
        found["memory ran out"] = False
    except RuntimeError:
        found["memory ran out"] = True
    finally:
        ascsim.set_knob("ASCSIM_HBM_MB", 65536)
        ascsim.set_knob("ASCSIM_COPY_DELAY_US", 0)
    back_end.advance(lambda: all(one.is_sent for one in transfers))
    back_end.load(transfers)
    back_end.advance(lambda: True, *transfers)
    found["what was let go of"] = [
        bool(np.array_equal(values_of(one.loaded.tensor(one.layouts[0], one.pieces[0])), values))
        for one, values in zip(transfers, want, strict=True)
    ]
    back_end.close()


def slots_are_used_again() -> None:
    pinned.CHUNK_BYTES = 2**20
    tier = new_back_end(2**24).tier
    allocated = []
    for _ in range(5):
        slots = [tier.take(nbytes) for nbytes in (300_000, 70_000, 1_000_000, 2_500_000, 70_000)]
        allocated.append(
            (
                tier.allocations,
                tier.allocated,
                tier.used,
                len({part.ctypes.data for slot in slots for part in slot.place}),
            )
        )
        for slot in slots:
            tier.give_back(slot)
    found["slots"] = allocated


def what_mindspore_does() -> None:
    """Facts that `ms_ops.ascend` is built on."""
    chunk = mint.empty((8192,), dtype=ms.uint8, device="CPU", pin_memory=True)
    source = mint.ones((4096,), dtype=ms.uint8)
    behind = chunk[4096:]
    behind.copy_(source, non_blocking=True)
    found["a slice that begins behind its storage becomes the device's"] = behind.device != "CPU"
    over = Tensor.from_numpy(chunk.asnumpy()[4096:])
    over.copy_(source, non_blocking=True)
    ms.runtime.synchronize()
    found["a tensor over the same bytes stays on host"] = over.device == "CPU" and bool((over.asnumpy() == 1).all())
    wide = Tensor.from_numpy(np.zeros(16, np.float32))
    wide.copy_(mint.ones((16,), dtype=ms.float16), non_blocking=True)
    found["another type makes it the device's"] = wide.device != "CPU"
    side, owner = ms.runtime.Stream(), ms.runtime.current_stream()
    levels = []
    for release in ("synchronize", "wait"):
        tensor = mint.ones((1024, 1024))
        ms.runtime.synchronize()
        before = ms.runtime.memory_allocated()
        with ms.runtime.StreamCtx(side):
            used = Tensor.from_numpy(np.zeros((1024, 1024), np.float32))
            used.copy_(tensor, non_blocking=True)
        event = ms.runtime.Event()
        event.record(side)
        del tensor
        event.synchronize() if release == "synchronize" else owner.wait_event(event)
        wait_for_operators()
        levels.append(before - ms.runtime.memory_allocated())
    found["released by"] = levels
    tensor = mint.ones((4, 4))
    tensor.requires_grad_()
    found["data has no history"] = tensor.data._grad_node is None and not tensor.data._requires_grad


there_and_back("each", False, 2**20, False)
there_and_back("fused", True, 2**20, False)
there_and_back("small chunks", False, 4096, False)
there_and_back("verified", True, 2**20, True)
memory_is_given_back_bit_by_bit()
slots_are_used_again()
what_mindspore_does()
sources_may_go_under_their_copies()
print(json.dumps(found))
