"""AscendCL's runtime, called directly: memory, streams, events, copies, and what the race checker says of them."""

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("acl_program.py")
HELPERS = {
    "ok",
    "made",
    "device",
    "pinned",
    "stream",
    "event",
    "copy",
    "status",
    "record",
    "wait",
    "fill",
    "first_byte",
}
HELPERS |= {"names", "let_the_copy_end", "error_text"}
CLAIMS = [name for name in re.findall(r"^def (\w+)", PROGRAM.read_text(), re.M) if name not in HELPERS]


@pytest.fixture(scope="module")
def done(emulated):
    return emulated(PROGRAM, *CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS)
def test_runtime(done, claim):
    held = done.stdout.split()
    if claim not in held and len(held) < len(CLAIMS):
        assert claim != CLAIMS[len(held)], done.stderr[-3000:]
        pytest.fail(f"not reached: {CLAIMS[len(held)]} failed")
