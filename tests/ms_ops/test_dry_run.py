"""What a simulated Ascend device needs from MindSpore: parameters that take no memory on host."""

import copy

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.common.initializer import initializer

from hyper_parallel.report.resident import peak_resident_bytes, reset_peak, resident_bytes
from ms_ops.dry_run import choose_simulated_ascend, is_emulated, parameters_without_values


def test_parameters_and_their_copies_take_no_memory() -> None:
    megabytes = 1024
    peak = peak_resident_bytes if reset_peak() else resident_bytes
    before = resident_bytes()
    with parameters_without_values():
        dense = nn.Dense(16384, 16384, has_bias=False)
        state = ms.ParameterTuple(dense.trainable_params()).clone("state", "zeros")
    assert dense.weight.nbytes == state[0].nbytes == megabytes * 2**20
    assert peak() - before < megabytes * 2**20 / 10


def test_a_copy_keeps_what_a_parameter_is_known_by() -> None:
    with parameters_without_values():
        first = ms.Parameter(initializer("normal", (3, 4), ms.float16), name="first", requires_grad=False)
        second = copy.copy(first)
    assert (second.shape, second.dtype, second.name, second.requires_grad) == ((3, 4), ms.float16, "first", False)


def test_afterwards_parameters_have_values_again() -> None:
    with pytest.raises(KeyError), parameters_without_values():
        raise KeyError
    one = ms.Parameter(initializer("ones", (2, 2)))
    assert copy.copy(one).asnumpy().tolist() == [[1, 1], [1, 1]]


def test_a_process_that_computes_is_not_taken_for_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_SIMULATION_LEVEL", raising=False)
    with pytest.raises(RuntimeError, match="MS_SIMULATION_LEVEL isn't set"):
        choose_simulated_ascend()


def test_the_emulator_says_so_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCSIM_LIBRARY", raising=False)
    assert not is_emulated()
    monkeypatch.setenv("ASCSIM_LIBRARY", "/somewhere/lib.so")
    assert is_emulated()
