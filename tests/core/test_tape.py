"""`Tape` and `TapeReader`: a replay reads what the forward wrote, in order, or raises."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from hyper_parallel import ReplayMismatchError
from hyper_parallel.core.activation_memory.operator_log import OperatorLog
from hyper_parallel.core.activation_memory.tape import Tape, TapeReader
from hyper_parallel.core.activation_memory.written import Written
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
    output, effects = reader.cell("mlp")
    assert (output["y"].asnumpy() == numbers(3).asnumpy()).all()
    assert effects is None
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
    said = "block: the replay reads operator Dropout as recorded result 1, but the forward recorded only 0"
    with pytest.raises(ReplayMismatchError, match=said) as c:
        reader.operator("Dropout")
    assert REMEDY in str(c.value)


def test_entries_left_over_are_named() -> None:
    reader = TapeReader(filled(), "block")
    reader.operator("Dropout")
    with pytest.raises(ReplayMismatchError, match=r"block: the replay ended before cell mlp.*\(1 of 2") as caught:
        reader.finish()
    assert REMEDY in str(caught.value)


# ---- a log beside it


def test_a_nested_tape_needs_what_ran_before_it() -> None:
    tape = Tape()
    tape.log.write("Tanh", (), numbers(2))
    tape.nested("layers.0")
    assert tape.log.needed == 1


def test_a_nested_tape_has_the_log_that_it_is_given() -> None:
    log = OperatorLog()
    assert Tape().nested("layers.0", log).log is log


# ---- writes


def result() -> Tensor:
    return ops.tanh(numbers(2, 4))


def written(tensor: Tensor) -> Written:
    return Written(tensor, "copy_", False)


def test_a_written_result_is_found_with_what_gave_it() -> None:
    tape, tensor = Tape(), result()
    tape.write_operator("StandardNormal", tensor)
    assert tape.finds(written(tensor)) == "the kept result of operator StandardNormal"
    assert tape.finds(written(tensor.view(-1))) == "the kept result of operator StandardNormal"
    assert tape.finds(written(result())) is None


def test_a_written_result_is_found_on_the_tape_of_a_region_inside() -> None:
    tape, tensor = Tape(), result()
    tape.write_operator("StandardNormal", result())
    tape.nested("layers.0").nested("mlp").write_cell("mlp.act", [tensor])
    assert tape.finds(written(tensor)) == "the kept result of cell mlp.act"


def test_a_result_on_host_is_reached_by_no_write() -> None:
    tape, tensor = Tape(), result()
    tape.write_cell("mlp", tensor, OnHost)
    assert tape.finds(written(tensor)) is None


def test_a_parameter_that_a_cell_gives_is_not_kept() -> None:
    tape, weight = Tape(), Parameter(numbers(2), name="w")
    tape.write_cell("mlp", weight)
    assert TapeReader(tape, "block").cell("mlp")[0] is weight
    assert tape.finds(written(weight)) is None


def test_a_result_that_the_region_itself_writes_is_copied_before() -> None:
    tape, tensor = Tape(), result()
    tape.write_operator("StandardNormal", tensor)
    tape.rescue(written(tensor))
    tensor.copy_(ops.zeros_like(tensor))
    assert np.array_equal(TapeReader(tape, "block").operator("StandardNormal").asnumpy(), result().asnumpy())


def test_other_results_are_not_copied() -> None:
    tape, tensor = Tape(), result()
    tape.write_operator("StandardNormal", tensor)
    before = [saved.tensor for _, saved in tape._saved]
    tape.rescue(written(result()))
    assert all(saved.tensor is old for (_, saved), old in zip(tape._saved, before, strict=True))
