"""Programs x entries x policies: each gives plain's losses, gradients, buffers and generators, to the last bit.

What a program does can depend on how its arguments reach the region (three ways: a decorated class, a cell whose class
is swapped, a function), and on what happens to the region (one policy, or one inside another). All programs go through
these. The other combinations differ in nothing but who made the cell's record of its policy, or in how it is called:
a few programs go through them, one for each thing that an entry could forget.
"""

import functools
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from tests.exactness.programs import calls, cells, gradients, precision, randomness, state, trees
from tests.exactness.programs.entries import WAYS, put_by
from tests.exactness.programs.program import Around, Program, record_of
from tests.helpers import Record, assert_same

PROGRAMS: dict[str, Program] = {}
for module in (calls, cells, trees, gradients, randomness, state, precision):
    assert not PROGRAMS.keys() & module.PROGRAMS.keys()
    PROGRAMS.update(module.PROGRAMS)

OF_ALL_PROGRAMS: dict[str, tuple[str, ...]] = {
    "decorated instance": ("recompute", "swap", "swapped inputs", "recompute in recompute", "swap in recompute"),
    "function": ("recompute",),
    "decorated class": ("recompute",),
}
REPRESENTATIVES = (
    "two_forwards_before_two_backwards",
    "a_call_whose_output_is_not_used",
    "train_and_eval_toggled_before_backward",
    "arguments: everything in everything",
    "results: nested",
    "by_mixed_second_derivatives",
    "a session, first in first out",
    "draws: two draws",
    "draws: numpy's global generator",
    "nn_dropout",
    "batch_norm_first",
    "tensors_that_a_cell_keeps",
    "a_half_precision_cell",
)
REFUSED = {
    # checkpoint() would take them for its own: it refuses by name
    "keywords_named_like_those_of_checkpoint": lambda entry, mode: entry == "function",
    # a cell that runs once inside a replayed one: the replay would not see the container grow
    "a_list_that_is_passed_and_appended_to": lambda entry, mode: mode in ("swap in recompute", "save in recompute"),
    "a_dict_that_is_passed_and_appended_to": lambda entry, mode: mode in ("swap in recompute", "save in recompute"),
}


COMBINATIONS = [
    (program, entry, mode)
    for program in PROGRAMS
    for entry, mode in WAYS
    if mode in OF_ALL_PROGRAMS.get(entry, ()) or program in REPRESENTATIVES
    if not (program in REFUSED and REFUSED[program](entry, mode))
]


@functools.cache
def plain(program: str) -> Record:
    return record_of(PROGRAMS[program], lambda cell: cell)


@pytest.mark.parametrize(
    ("program", "entry", "mode"),
    # one worker has all combinations of a program, so that its plain run is taken once
    [pytest.param(*each, marks=pytest.mark.xdist_group(f"table, {each[0]}")) for each in COMBINATIONS],
)
def test_a_program_gives_plains_bits(program: str, entry: str, mode: str) -> None:
    assert_same(record_of(PROGRAMS[program], put_by(entry, mode)), plain(program))


def test_every_name_in_the_table_is_one() -> None:
    assert PROGRAMS.keys() >= {*REPRESENTATIVES, *REFUSED}
    assert set(WAYS) >= {(entry, mode) for entry, modes in OF_ALL_PROGRAMS.items() for mode in modes}


class Faulty(Around):
    """An entry that forgets something."""

    def __init__(self, cell: nn.Cell, fault: str) -> None:
        super().__init__(cell)
        self.fault = fault

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        if self.fault == "runs twice":
            self.cell(*args, **kwargs)
        if self.fault == "draws a number":
            np.random.rand()
        if self.fault == "unpacks something else":
            with ms.saved_tensors_hooks(lambda t: t * 1, lambda t: t + 1 if t.is_floating_point() else t):
                return self.cell(*args, **kwargs)
        output = self.cell(*args, **kwargs)
        return ops.stop_gradient(output) if self.fault == "drops the gradient" else output


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("one_cell", "unpacks something else"),
        ("one_cell", "drops the gradient"),
        ("one_cell", "draws a number"),
        ("batch_norm_first", "runs twice"),
        ("parameters_that_count_and_sum", "runs twice"),
        ("tensors_that_a_cell_keeps", "runs twice"),
        ("draws: ops.dropout", "runs twice"),
        ("draws: numpy's global generator", "runs twice"),
        ("a_half_precision_cell", "unpacks something else"),
    ],
)
def test_the_table_notices_a_faulty_entry(program: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=r"differs|missing"):
        assert_same(record_of(PROGRAMS[program], lambda cell: Faulty(cell, fault)), plain(program))
