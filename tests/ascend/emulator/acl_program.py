"""Calls AscendCL's functions directly, without MindSpore: runs the functions that the arguments name."""

import ctypes
import os
import sys
import threading

import ascsim  # the emulator's own module

acl = ctypes.CDLL(os.environ["ASCSIM_LIBRARY"])
H2D, D2H, D2D, DEFAULT = 1, 2, 3, 4
SIZE = 1 << 16
NOT_READY, COMPLETE = 0, 1
OUT_OF_MEMORY, NOT_SUPPORTED, INVALID = 207001, 207000, 100000
claims = {}


def claim(function):
    claims[function.__name__] = function
    return function


def ok(code):
    assert code == 0, code


def made(function, *arguments):
    handle = ctypes.c_void_p()
    ok(function(ctypes.byref(handle), *arguments))
    return handle


def device(size=SIZE):
    return made(acl.aclrtMalloc, ctypes.c_size_t(size), 0)


def pinned(size=SIZE):
    return made(acl.aclrtMallocHost, ctypes.c_size_t(size))


def stream():
    return made(acl.aclrtCreateStream)


def event(flag=False):
    return made(acl.aclrtCreateEventWithFlag if flag else acl.aclrtCreateEventExWithFlag, 0)


def copy(to, source, kind, on, size=SIZE):
    ok(acl.aclrtMemcpyAsync(to, ctypes.c_size_t(size), source, ctypes.c_size_t(size), kind, on))


def status(of):
    result = ctypes.c_int()
    ok(acl.aclrtQueryEventStatus(of, ctypes.byref(result)))
    return result.value


def record(what, on):
    ok(acl.aclrtRecordEvent(what, on))
    return what


def wait(on, what):
    ok(acl.aclrtStreamWaitEvent(on, what))


def fill(memory, byte):
    ok(acl.aclrtMemset(memory, ctypes.c_size_t(SIZE), byte, ctypes.c_size_t(SIZE)))


def first_byte(memory):
    return ctypes.cast(memory, ctypes.POINTER(ctypes.c_ubyte))[SIZE // 2]


def names():
    return [(race["first"]["name"], race["second"]["name"], race["memory"]) for race in ascsim.races()]


@claim
def a_stream_does_one_thing_after_the_other():
    a, b, host, on = device(), device(), pinned(), stream()
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 2000)
    ok(acl.aclrtMemsetAsync(a, ctypes.c_size_t(SIZE), 1, ctypes.c_size_t(SIZE), on))
    copy(b, a, D2D, on)
    ok(acl.aclrtMemsetAsync(a, ctypes.c_size_t(SIZE), 2, ctypes.c_size_t(SIZE), on))
    copy(host, b, D2H, on)
    ok(acl.aclrtSynchronizeStream(on))
    assert first_byte(host) == 1
    assert names() == []


@claim
def the_addresses_say_the_direction():
    a, host, on = device(), pinned(), stream()
    fill(a, 7)
    copy(host, a, DEFAULT, on)
    ok(acl.aclrtSynchronizeStream(on))
    assert first_byte(host) == 7
    assert ascsim.counters()["d2h_async"] == 1


@claim
def an_event_that_was_never_recorded_makes_nobody_wait():
    on, never = stream(), event()
    wait(on, never)
    ok(acl.aclrtSynchronizeStream(on))
    ok(acl.aclrtSynchronizeEvent(never))


@claim
def a_wait_means_the_last_record_before_it():
    first, second, again, host, a = stream(), stream(), event(), pinned(), device()
    record(again, first)
    wait(second, again)
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 30_000)
    copy(host, a, D2H, first)
    record(again, first)
    ok(acl.aclrtSynchronizeStream(second))  # returns while the copy still runs
    assert status(again) == NOT_READY
    ok(acl.aclrtSynchronizeEvent(again))
    assert status(again) == COMPLETE


@claim
def a_later_record_on_another_stream_ends_no_wait():
    """The other stream is idle, so that it comes to its record while the first still copies."""
    first, other, waits, again, host, a = stream(), stream(), stream(), event(), pinned(), device()
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 30_000)
    copy(host, a, D2H, first)
    record(again, first)
    wait(waits, again)
    record(again, other)
    ok(acl.aclrtSynchronizeStream(other))
    assert status(again) == COMPLETE
    idle = ctypes.c_int()
    ok(acl.aclrtStreamQuery(waits, ctypes.byref(idle)))
    assert idle.value == 1, "the stream still waits for the first record"
    copy(a, host, H2D, waits)
    assert names() == []


@claim
def a_flag_waits_for_the_record_that_comes():
    first, second, flag, host, a = stream(), stream(), event(flag=True), pinned(), device()
    wait(second, flag)
    idle = ctypes.c_int()
    ok(acl.aclrtStreamQuery(second, ctypes.byref(idle)))
    assert idle.value == 1, "the stream waits"
    fill(a, 3)
    copy(host, a, D2H, first)
    record(flag, first)
    ok(acl.aclrtSynchronizeStream(second))
    ok(acl.aclrtSynchronizeStream(first))
    assert first_byte(host) == 3
    ok(acl.aclrtResetEvent(flag, second))
    wait(second, flag)
    record(flag, first)
    ok(acl.aclrtSynchronizeStream(second))
    assert acl.aclrtResetEvent(event(), second) == NOT_SUPPORTED


@claim
def elapsed_time_is_of_events_that_are_reached():
    on, begin, end = stream(), event(), event()
    result = ctypes.c_float()
    assert acl.aclrtEventElapsedTime(ctypes.byref(result), begin, end) == INVALID
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 5000)
    a, host = device(), pinned()
    copy(host, a, D2H, on)
    record(begin, on)
    copy(host, a, D2H, on)
    record(end, on)
    assert acl.aclrtEventElapsedTime(ctypes.byref(result), begin, end) == INVALID
    ok(acl.aclrtSynchronizeEvent(end))
    ok(acl.aclrtEventElapsedTime(ctypes.byref(result), begin, end))
    assert abs(result.value - 5) < 0.01


@claim
def a_destroyed_event_is_still_reached():
    first, second, host, a = stream(), stream(), pinned(), device()
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 5000)
    copy(host, a, D2H, first)
    done = record(event(), first)
    wait(second, done)
    ok(acl.aclrtDestroyEvent(done))
    ok(acl.aclrtSynchronizeStream(second))


def blocks_under_a_copy():
    """A device block and the pinned one that it is copied to."""
    a, host, on = device(), pinned(), stream()
    copy(host, a, D2H, on)
    let_the_copy_end(on)
    return a, host


@claim
def device_memory_freed_under_a_copy():
    a, _ = blocks_under_a_copy()
    ok(acl.aclrtFree(a))
    assert names() == [("aclrtMemcpyAsync D2H", "aclrtFree", "device")]


@claim
def pinned_memory_freed_under_a_copy():
    _, host = blocks_under_a_copy()
    ok(acl.aclrtFreeHost(host))
    assert names() == [("aclrtMemcpyAsync D2H", "aclrtFreeHost", "pinned")]


def let_the_copy_end(on):
    """The race is in the calls; a copy that really ran into freed memory would crash this program."""
    ended = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ended.set())
    ok(acl.aclrtLaunchCallback(callback, None, 0, on))
    assert ended.wait(30)


@claim
def device_memory_unmapped_under_a_copy():
    """MindSpore's pool reserves addresses, and maps pieces of memory into them."""
    reserved = made(acl.aclrtReserveMemAddress, ctypes.c_size_t(4 * SIZE), ctypes.c_size_t(0), None, ctypes.c_uint64(0))
    piece = made(acl.aclrtMallocPhysical, ctypes.c_size_t(SIZE), None, ctypes.c_uint64(0))
    ok(acl.aclrtMapMem(reserved, ctypes.c_size_t(SIZE), ctypes.c_size_t(0), piece, ctypes.c_uint64(0)))
    host, on = pinned(), stream()
    copy(host, reserved, D2H, on)
    let_the_copy_end(on)
    ok(acl.aclrtUnmapMem(reserved))
    assert names() == [("aclrtMemcpyAsync D2H", "aclrtUnmapMem", "device")]
    ok(acl.aclrtFreePhysical(piece))
    assert acl.aclrtUnmapMem(reserved) == INVALID


@claim
def memory_freed_after_the_copy():
    a, host, on = device(), pinned(), stream()
    copy(host, a, D2H, on)
    ok(acl.aclrtSynchronizeStream(on))
    ok(acl.aclrtFree(a))
    ok(acl.aclrtFreeHost(host))
    assert names() == []


@claim
def what_is_no_block_cannot_be_freed():
    assert acl.aclrtFree(ctypes.c_void_p(4096)) == INVALID
    assert b"not the begin of an allocated block" in error_text()


def error_text():
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return acl.aclGetRecentErrMsg()


@claim
def no_more_than_the_limit_is_allocated():
    others = ascsim.counters()["device_used"]
    ascsim.set_knob("ASCSIM_HBM_MB", others / (1 << 20) + 1)
    device(1 << 19)
    handle = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(handle), ctypes.c_size_t((1 << 19) + 1), 0) == OUT_OF_MEMORY
    device(1 << 19)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ok(acl.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)))
    assert (free.value, total.value) == (0, others + (1 << 20))


@claim
def neighbours_on_a_page_do_not_disturb():
    """Only memory of the copy itself is closed to the host, not what shares its first and last page."""
    host, a, on = pinned(4 * 4096), device(), stream()
    ascsim.set_knob("ASCSIM_COPY_DELAY_US", 5000)
    copy(ctypes.c_void_p(host.value + 2048), a, D2H, on, 2 * 4096)
    bytes_of = ctypes.cast(host, ctypes.POINTER(ctypes.c_ubyte))
    assert bytes_of[0] == bytes_of[3 * 4096] == 0
    assert names() == []
    assert bytes_of[5000] == 0
    assert names() == [("aclrtMemcpyAsync D2H", "the program's read", "pinned")]
    ok(acl.aclrtSynchronizeStream(on))
    assert bytes_of[5000] == 0


@claim
def parts_of_a_block_do_not_race():
    a, host, first, second = device(), pinned(), stream(), stream()
    half = SIZE // 2
    copy(host, a, D2H, first, half)
    copy(ctypes.c_void_p(a.value + half), ctypes.c_void_p(host.value + half), H2D, second, half)
    assert names() == []
    copy(ctypes.c_void_p(a.value + half - 1), ctypes.c_void_p(host.value + half), H2D, second, half)
    assert names() == [("aclrtMemcpyAsync D2H", "aclrtMemcpyAsync H2D", "device")]
    assert ascsim.races()[0]["overlap"] == [a.value + half - 1, a.value + half]


for name in sys.argv[1:]:
    ascsim.forget_races()
    ascsim.reset_counters()
    for knob, value in (("COPY_DELAY_US", 0), ("HBM_MB", 65536)):
        ascsim.set_knob(f"ASCSIM_{knob}", value)
    claims[name]()
    acl.aclrtSynchronizeDevice()
    print(name)
ascsim.forget_races()
