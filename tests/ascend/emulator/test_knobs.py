"""Every setting does what docs/ascend_emulator.md says. Times are nominal: no load of the machine changes them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("knobs")  # one program serves them all

MEGABYTE = 1 << 20
MILLISECOND = 1000.0
ASYNC = "aclrtMemcpyAsync"


@pytest.fixture(scope="module")
def done(emulated):
    return emulated(Path(__file__).with_name("knobs_program.py"), trace=True)


@pytest.fixture(scope="module")
def measured(done):
    return done.json()


@pytest.fixture(scope="module")
def calls(done):
    """The calls of a section, by the beginning of their names."""
    return lambda section, name: [c for c in done.trace if c["mark"] == section and c["name"].startswith(name)]


def test_copies_take_the_time_of_their_bandwidth_and_share_it_by_direction(measured, calls):
    at_100_megabytes_a_second = MEGABYTE / 0.1e9 * 1e3
    assert sorted(measured["bandwidth"]) == pytest.approx(
        [at_100_megabytes_a_second, 2 * at_100_megabytes_a_second], rel=1e-4
    )
    (other_way,) = (copy for copy in calls("bandwidth", ASYNC) if copy["kind"] == "H2D" and copy["bytes"] == MEGABYTE)
    assert other_way["end"] - other_way["start"] == pytest.approx(MEGABYTE / 0.05e9 * 1e6, rel=1e-4)


def test_copies_of_two_directions_overlap(calls):
    copies = calls("bandwidth", ASYNC)
    assert {copy["kind"] for copy in copies} >= {"D2H", "H2D"}
    out, back = (
        next(copy for copy in copies if copy["kind"] == kind and copy["bytes"] == MEGABYTE) for kind in ("D2H", "H2D")
    )
    assert out["start"] < back["end"]
    assert back["start"] < out["end"]


def test_an_asynchronous_copy_is_not_waited_for(measured, calls):
    (copy,) = calls("copy_delay", ASYNC)
    assert copy["end"] - copy["start"] >= 50 * MILLISECOND
    assert copy["returned"] < copy["end"]
    assert measured["query_at_once"] is False
    assert measured["query_after_synchronize"] is True


def test_a_copy_to_pageable_memory_blocks_the_host(calls):
    copies = [c for c in calls("pageable", "aclrtMemcpy") if c["kind"] == "D2H"]
    assert sum(copy["returned"] - copy["called"] for copy in copies) >= 50 * MILLISECOND


def test_a_copy_to_pageable_memory_waits_for_its_stream(calls):
    (operator,) = calls("pageable_after_operator", "aclnnInplaceAdds")
    copy = [c for c in calls("pageable_after_operator", "aclrtMemcpy") if c["kind"] == "D2H"][-1]
    assert operator["end"] - operator["start"] >= 100 * MILLISECOND
    assert copy["returned"] >= operator["end"]


def test_an_operator_takes_at_least_its_delay(calls):
    (operator,) = calls("op_delay", "aclnnInplaceAdds")
    assert operator["end"] - operator["start"] >= 20 * MILLISECOND - 0.2


def test_counters_count_what_was_done(measured):
    counters = measured["counters"]
    assert (counters["d2h_async"], counters["d2h_async_bytes"]) == (1, MEGABYTE)
    assert (counters["h2d_async"], counters["h2d_async_bytes"]) == (1, MEGABYTE)
    assert counters["d2h_sync"] == counters["h2d_sync"] == counters["pageable_async"] == 0
    assert counters["operators"] == 1
    assert counters["calls"]["aclnnInplaceAdd"] == 1
    assert counters["host_syncs"]["event"] == 1
    assert counters["host_syncs"]["stream"] == 1
    assert counters["pinned_used"] == counters["pinned_peak"] >= 3 * MEGABYTE
    assert counters["device_used"] == counters["device_peak"] >= 3 * MEGABYTE
    assert counters["pinned_allocations"] == 0  # all of it before the counters were reset


def test_the_trace_has_every_call_in_order(done, calls):
    assert [call["index"] for call in done.trace] == sorted({call["index"] for call in done.trace})
    copy = next(c for c in calls("counters", ASYNC) if c["kind"] == "D2H")
    assert [end - begin for begin, end in copy["reads"] + copy["writes"]] == [MEGABYTE, MEGABYTE]
    assert copy["called"] <= copy["returned"]
    assert copy["start"] <= copy["end"]
    waits, records = calls("bandwidth", "aclrtStreamWaitEvent"), calls("bandwidth", "aclrtRecordEvent")
    assert {wait["event"] for wait in waits} <= {record["event"] for record in records}
    assert len(calls("counters", "mark")) == 1


def test_operators_ask_for_workspaces(calls):
    """A product keeps a partial result; a transposed factor is made dense first."""
    plain, transposed = calls("product", "aclnnMatmul")
    size = 64 * 64 * 4
    assert sorted(end - begin for begin, end in plain["writes"]) == [size, size]
    assert sorted(end - begin for begin, end in transposed["writes"]) == [size, 2 * size]


def test_device_memory_has_a_limit(measured, done):
    assert "llocate" in measured["out_of_memory"]
    assert 1 <= measured["held"] < 32
    assert measured["then"] == 1
    assert "out of device memory" in done.stderr


def test_what_is_no_knob_is_refused(measured):
    assert [text.split()[0] for text in measured["refused"]] == [
        "ASCSIM_SPEED",
        "ASCSIM_OP_DELAY_US",
        "ASCSIM_TRACE_FILE",
    ]


# Without MindSpore: it takes a second instead of ten.
RACE = f"""
    import json, sys

    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from acl_program import D2H, acl, ascsim, copy, device, first_byte, ok, pinned, stream

    host = pinned()
    copy(host, device(), D2H, stream())
    first_byte(host)
    ok(acl.aclrtSynchronizeDevice())
    print(json.dumps(ascsim.races()))
"""


@pytest.mark.parametrize("env", [{"ASCSIM_RACES": "off"}, {"ASCSIM_HOST_ACCESS": 0}])
def test_checks_can_be_turned_off(emulated, env):
    assert emulated(RACE, env=env | {"ASCSIM_COPY_DELAY_US": 20_000}).json() == []


def test_a_race_is_reported_and_the_program_goes_on(emulated):
    done = emulated(RACE, env={"ASCSIM_COPY_DELAY_US": 20_000})
    assert done.returncode == 0
    assert [race["memory"] for race in done.races] == ["pinned"]
    assert "race on pinned memory" in done.stderr


def test_a_race_ends_the_program_with_its_own_exit_code(emulated):
    done = emulated(RACE, env={"ASCSIM_COPY_DELAY_US": 20_000, "ASCSIM_RACES": "raise"})
    assert done.stdout.startswith("[{"), "it has reached its end"
    assert done.returncode == 86
    assert "race on pinned memory" in done.stderr
    assert done.counters["races"] == 1
