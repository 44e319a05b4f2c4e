"""`AscendBackEnd` by itself, on the emulated device: bytes, memory, slots, and what it relies on in MindSpore."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("bytes on Ascend")  # one program serves them all


@pytest.fixture(scope="module")
def found(emulated: Any) -> dict[str, Any]:
    return emulated(Path(__file__).with_name("bytes_program.py"), seed=1, env={"ASCSIM_JITTER_US": 200}).json()


@pytest.mark.parametrize("way", ["each", "fused", "verified"])
def test_every_type_and_layout_comes_back_as_it_left(found: dict[str, Any], way: str) -> None:
    assert found[way] == []


def test_a_tensor_larger_than_a_chunk_comes_back_from_several(found: dict[str, Any]) -> None:
    assert found["small chunks"] == []


def test_device_memory_is_given_back_batch_by_batch(found: dict[str, Any]) -> None:
    tensor = 256 * 256 * 4
    all_there, some, none = found["memory"]
    assert 8 * tensor <= all_there < 8.1 * tensor
    assert 0 < some < 6.1 * tensor
    assert none == 0


def test_after_the_first_step_nothing_is_pinned_any_more(found: dict[str, Any]) -> None:
    assert len({tuple(step) for step in found["slots"]}) == 1


def test_hardly_more_is_pinned_than_is_used(found: dict[str, Any]) -> None:
    _, allocated, used, _ = found["slots"][0]
    assert allocated <= 1.1 * used


def test_a_large_slot_lies_in_several_chunks(found: dict[str, Any]) -> None:
    assert found["slots"][0][3] == 5 + 2


@pytest.mark.parametrize(
    "fact",
    [
        "a slice that begins behind its storage becomes the device's",
        "a tensor over the same bytes stays on host",
        "another type makes it the device's",
        "data has no history",
    ],
)
def test_mindspore_does_what_copies_rely_on(found: dict[str, Any], fact: str) -> None:
    assert found[fact] is True


def test_what_a_copy_reads_is_held_though_all_memory_is_asked_for(found: dict[str, Any]) -> None:
    assert found["memory ran out"]
    assert found["what was let go of"] == [True] * 8  # and the race checker saw nothing


def test_only_a_wait_of_the_owner_gives_memory_back(found: dict[str, Any]) -> None:
    synchronized, waited = found["released by"]
    assert synchronized == 0
    assert waited >= 4 * 2**20
