"""Uses every knob in turn; prints what was measured. The trace, cut at the marks, tells the rest."""

import json

import ascsim  # the emulator's own module
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, runtime

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
MEGABYTE = 1 << 20
compute, out, more_out, back = (runtime.current_stream(), *(runtime.Stream() for _ in range(3)))
measured = {}


def pinned():
    return mint.empty((MEGABYTE // 4,), dtype=ms.float32, device="CPU", pin_memory=True)


def device():
    return Tensor(np.ones(MEGABYTE // 4, np.float32)) * 1.0


def recorded(stream):
    event = runtime.Event(enable_timing=True)
    event.record(stream)
    return event


def section(name, **knobs):
    """What stands in the trace from here on belongs to `name`; all knobs are off but these."""
    runtime.synchronize()
    for knob in ("COPY_DELAY_US", "OP_DELAY_US", "H2D_GBPS", "D2H_GBPS"):
        ascsim.set_knob(f"ASCSIM_{knob}", knobs.get(knob, 0))
    ascsim.mark(name)
    ascsim.reset_counters()


a, b, c = device(), device(), device()
host_a, host_b, host_c = pinned(), pinned(), pinned()

# Everything is on the streams before the slow operator at the front of them all ends.
section("bandwidth", OP_DELAY_US=500_000, D2H_GBPS=0.1, H2D_GBPS=0.05)
a.add_(1)
begin = recorded(compute)
ends = []
for stream, to, source in ((out, host_a, a), (more_out, host_b, b), (back, c, host_c)):
    with runtime.StreamCtx(stream):
        stream.wait_event(begin)
        to.copy_(source, non_blocking=True)
    ends.append(recorded(stream))
runtime.synchronize()
measured["bandwidth"] = [begin.elapsed_time(end) for end in ends]

section("copy_delay", COPY_DELAY_US=50_000)
with runtime.StreamCtx(out):
    host_a.copy_(a, non_blocking=True)
copied = recorded(out)
measured["query_at_once"] = copied.query()
copied.synchronize()
measured["query_after_synchronize"] = copied.query()

section("pageable", COPY_DELAY_US=50_000)
a.to("CPU")

section("pageable_after_operator", OP_DELAY_US=100_000)
a.add_(1)
np.asarray(a.asnumpy())

section("op_delay", OP_DELAY_US=20_000)
a.add_(1)

section("counters")
with runtime.StreamCtx(out):
    host_a.copy_(a, non_blocking=True)
    c.copy_(host_a, non_blocking=True)
a.add_(b)
recorded(out).synchronize()
out.synchronize()
measured["counters"] = ascsim.counters()
runtime.synchronize()

section("product")
x = Tensor(np.ones((64, 64), np.float32)) * 1.0
mint.matmul(x, x)
mint.matmul(x, x.T)
runtime.synchronize()

measured["refused"] = []
for name, value in (("ASCSIM_SPEED", 1), ("ASCSIM_OP_DELAY_US", -1), ("ASCSIM_TRACE_FILE", 1)):
    try:
        ascsim.set_knob(name, value)
    except ValueError as error:
        measured["refused"].append(str(error))

section("memory")
ascsim.set_knob("ASCSIM_HBM_MB", ascsim.counters()["device_used"] / MEGABYTE + 16)
held = []
try:
    for _ in range(64):
        held.append(device())
        runtime.synchronize()
except RuntimeError as error:
    measured["out_of_memory"] = str(error)
measured["held"] = len(held)
del held
ascsim.set_knob("ASCSIM_HBM_MB", 4096)
kept = [device() for _ in range(64)]
runtime.synchronize()
measured["then"] = float(kept[-1][0])
ascsim.mark("end")
ascsim.forget_races()
print(json.dumps(measured))
