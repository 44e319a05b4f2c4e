"""`Tape` and `TapeReader`: a replay reads what the forward wrote, in order, or raises."""

import pytest
from mindspore import Tensor

from hyper_parallel import ReplayMismatchError
from hyper_parallel.core.activation_memory.tape import Tape, TapeReader
from tests.helpers import numbers

REMEDY = "must do the same each time"


class OnHost:
    """Stands for a tensor that went to host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.reads = 0

    def get(self) -> Tensor:
        self.reads += 1
        return self.tensor


def filled() -> Tape:
    tape = Tape()
    tape.write_operator("Dropout", (numbers(2), None))
    tape.write_cell("mlp", {"y": numbers(3)})
    return tape


def test_what_was_written_is_read_in_its_structure() -> None:
    reader = TapeReader(filled(), "block")
    tensor, none = reader.operator("Dropout")
    assert (tensor.asnumpy() == numbers(2).asnumpy()).all()
    assert none is None
    output, written = reader.cell("mlp")
    assert (output["y"].asnumpy() == numbers(3).asnumpy()).all()
    assert written == ()
    reader.finish()


def test_upcoming_says_what_the_forward_did_next() -> None:
    reader = TapeReader(filled(), "block")
    seen = [reader.upcoming]
    reader.operator("Dropout")
    seen.append(reader.upcoming)
    reader.cell("mlp")
    assert [*seen, reader.upcoming] == ["operator Dropout", "cell mlp", ""]


def test_a_tape_is_read_again_by_another_reader() -> None:
    tape = filled()
    for _ in range(2):
        reader = TapeReader(tape, "block")
        reader.operator("Dropout")
        reader.cell("mlp")
        reader.finish()


def test_a_nested_tape_is_the_one_that_the_forward_made() -> None:
    tape = Tape()
    inner = tape.nested("layers.0")
    assert TapeReader(tape, "block").nested("layers.0") is inner


def test_an_entry_on_host_is_loaded_when_it_is_read() -> None:
    tape, hosts = Tape(), []

    def to_host(tensor: Tensor) -> OnHost:
        hosts.append(OnHost(tensor))
        return hosts[-1]

    tape.write_cell("mlp", [numbers(2), 5], to_host)
    assert hosts[0].reads == 0
    (tensor, number), _ = TapeReader(tape, "block").cell("mlp")
    assert (tensor.asnumpy() == numbers(2).asnumpy()).all()
    assert (hosts[0].reads, number) == (1, 5)


def test_another_order_names_region_both_sides_and_remedy() -> None:
    with pytest.raises(ReplayMismatchError) as caught:
        TapeReader(filled(), "block").cell("mlp")
    texts = ("block:", "the replay runs cell mlp", "the forward ran operator Dropout", "1 of 2", REMEDY, "MUST_SAVE")
    assert all(text in str(caught.value) for text in texts)


def test_more_than_the_forward_ran_is_named() -> None:
    reader = TapeReader(Tape(), "block")
    with pytest.raises(
        ReplayMismatchError, match=r"block: the replay runs operator Dropout, which the forward did not"
    ) as c:
        reader.operator("Dropout")
    assert REMEDY in str(c.value)


def test_entries_left_over_are_named() -> None:
    reader = TapeReader(filled(), "block")
    reader.operator("Dropout")
    with pytest.raises(ReplayMismatchError, match=r"block: the replay ended before cell mlp.*\(1 of 2") as caught:
        reader.finish()
    assert REMEDY in str(caught.value)
