"""Programs with streams: right ones, and the same with one mistake each.

Arguments: how many seeds, and the names of the programs. Prints, for each, the races of each seed and what was read.
"""

import functools
import json
import sys

import ascsim  # the emulator's own module
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops, runtime

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
SIZE = 64 * 1024
compute, to_host, to_device = runtime.current_stream(), runtime.Stream(), runtime.Stream()
ones = Tensor(np.ones(SIZE, np.float32)) * 1.0
programs = {}


def program(function):
    programs[function.__name__] = function
    return function


def pinned():
    return mint.empty((SIZE,), dtype=ms.float32, device="CPU", pin_memory=True)


def device():
    return mint.empty((SIZE,), dtype=ms.float32)


def copy(stream, to, source, after=None):
    """Copy on a stream; returns the event of its end."""
    with runtime.StreamCtx(stream):
        if after is not None:
            stream.wait_event(after)
        to.copy_(source, non_blocking=True)
        return recorded(stream)


def recorded(stream):
    event = runtime.Event()
    event.record(stream)
    return event


@program
def swap_out_and_in():
    """Right: out after the operator, in after out, the operator after in; the host reads after the copy."""
    host, back, source = pinned(), device(), ones * 2
    out = copy(to_host, host, source, recorded(compute))
    compute.wait_event(out)
    source.mul_(3)
    loaded = copy(to_device, back, host, out)
    compute.wait_event(loaded)
    result = back + 1
    out.synchronize()
    assert host.asnumpy()[0] == 2
    compute.wait_event(loaded)
    return result.asnumpy()[0]


@program
def reuse_after_the_copy():
    """Right: the pinned block takes another tensor after the copy from it."""
    host, first, second = pinned(), device(), ones * 2
    out = copy(to_host, host, ones, recorded(compute))
    loaded = copy(to_device, first, host, out)
    out = copy(to_host, host, second, loaded)
    compute.wait_event(out)
    compute.wait_event(loaded)
    result = first + second
    out.synchronize()
    assert host.asnumpy()[0] == 2
    return result.asnumpy()[0]


@program
def polled_until_done():
    """Right: the host asks until the copy is done, then reads."""
    host = pinned()
    out = copy(to_host, host, ones, recorded(compute))
    while not out.query():
        pass
    return host.asnumpy()[0]


@program
def copies_to_pageable_memory():
    """Right: copies that block the host."""
    double = ones * 2
    return double.to("CPU").asnumpy()[0] + double.asnumpy()[-1]


@program
def out_without_waiting_for_the_operator():
    host, source = pinned(), ones * 2
    copy(to_host, host, source).synchronize()
    return host.asnumpy()[0]


@program
def overwritten_while_copied_out():
    host, source = pinned(), ones * 2
    out = copy(to_host, host, source, recorded(compute))
    source.mul_(3)
    out.synchronize()
    return host.asnumpy()[0]


@program
def read_before_it_is_loaded():
    host, back = pinned(), device()
    copy(to_host, host, ones, recorded(compute)).synchronize()
    back.zero_()
    copy(to_device, back, host, recorded(compute))
    return (back + 1).asnumpy()[0]


@program
def loaded_before_it_is_out():
    host, back = pinned(), device()
    copy(to_host, host, ones, recorded(compute))
    loaded = copy(to_device, back, host, recorded(compute))
    compute.wait_event(loaded)
    return (back + 1).asnumpy()[0]


@program
def pinned_block_reused_too_early():
    host, back = pinned(), device()
    out = copy(to_host, host, ones, recorded(compute))
    loaded = copy(to_device, back, host, out)
    copy(to_host, host, ones * 5, recorded(compute))
    compute.wait_event(loaded)
    return (back + 1).asnumpy()[0]


@program
def pinned_block_freed_too_early():
    host, back = pinned(), device()
    copy(to_host, host, ones, recorded(compute))
    del host
    other = pinned()  # MindSpore's pool hands out the same block
    loaded = copy(to_device, back, other)
    compute.wait_event(loaded)
    return back.asnumpy()[0]


@program
def host_reads_too_early():
    host = pinned()
    copy(to_host, host, ones, recorded(compute))
    return host.asnumpy()[SIZE // 2]


@program
def host_reads_after_a_wait_of_the_stream_only():
    host = pinned()
    compute.wait_event(copy(to_host, host, ones, recorded(compute)))
    return host.asnumpy()[SIZE // 2]


@program
def host_writes_while_copied_in():
    host, back = pinned(), device()
    copy(to_host, host, ones, recorded(compute)).synchronize()
    view = host.asnumpy()
    loaded = copy(to_device, back, host)
    to_host.query()  # makes MindSpore hand over the copy; a write before that is in time
    view[SIZE // 2] = 9
    compute.wait_event(loaded)
    return back.asnumpy()[0]


@program
def waits_for_an_event_that_was_recorded_too_soon():
    host, early = pinned(), recorded(compute)
    source = ones * 2
    copy(to_host, host, source, early).synchronize()
    return host.asnumpy()[0]


@program
def device_memory_is_copied_by_the_host_too_early():
    """`asnumpy` waits for the current stream, not for the one that loads."""
    host, back = pinned(), device()
    copy(to_host, host, ones, recorded(compute)).synchronize()
    copy(to_device, back, host, recorded(compute))
    return back.asnumpy()[0]


@program
def pinned_sources_let_go():
    """Right: MindSpore hands out a pinned block again only after the copy from it (its callback has run)."""
    total = 0.0
    for number in range(3):
        source = Tensor(np.full(SIZE, number, np.float32)).pin_memory()
        back = device()
        loaded = copy(to_device, back, source)
        del source
        compute.wait_event(loaded)
        total += back.asnumpy()[0]  # the host now waits for the copy by way of `compute`, not of `to_device`
    return total


class Block(nn.Cell):
    def __init__(self, width):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm((width,)), mint.nn.Dropout(0.1)
        self.qkv, self.out = nn.Dense(width, 3 * width), mint.nn.Linear(width, width)

    def construct(self, x):
        q, k, v = ops.split(self.qkv(self.norm(x)), x.shape[-1], axis=-1)
        return x + self.drop(self.out(ops.matmul(ops.softmax(ops.matmul(q, k.transpose(0, 2, 1)), -1), v)))


@functools.cache
def trained():
    net = nn.SequentialCell(Block(16), Block(16)).set_train()
    step = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    return step, nn.Adam(net.trainable_params(), 0.01)


@program
def plain_training():
    """Right: MindSpore's own streams, copies and memory pool give no reports."""
    ascsim.set_knob("ASCSIM_JITTER_US", 200)  # there are many operators
    step, optimizer = trained()
    loss, gradients = step(Tensor(np.ones((2, 5, 16), np.float32)))
    optimizer(gradients)
    float(loss)
    runtime.synchronize()
    ascsim.set_knob("ASCSIM_JITTER_US", 1000)
    return 0


def run(name, seed):
    ascsim.set_knob("ASCSIM_SEED", seed)
    # Programs that keep their pinned blocks are checked strictly.
    ascsim.set_knob("ASCSIM_STRICT_PINNED", name not in ("pinned_sources_let_go", "plain_training"))
    ascsim.forget_races()
    ascsim.mark(name)
    read = float(programs[name]())
    runtime.synchronize()
    return {"seed": seed, "read": read, "races": ascsim.races()}


seeds, names = int(sys.argv[1]), sys.argv[2:] or list(programs)
found = {name: [run(name, seed) for seed in range(seeds)] for name in names}
ascsim.forget_races()
print(json.dumps(found))
