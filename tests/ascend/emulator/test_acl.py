"""AscendCL's runtime, called directly: memory, streams, events, copies, and what the race checker says of them."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("calls of the emulator")  # one program serves them all

PROGRAM = Path(__file__).with_name("acl_program.py")
CLAIMS = re.findall(r"^@claim\ndef (\w+)", PROGRAM.read_text("utf-8"), re.M)


@pytest.fixture(scope="module")
def done(emulated):
    return emulated(PROGRAM, *CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS)
def test_runtime(done, claim):
    assert claim in done.stdout.split(), done.stderr[-3000:]
