"""The emulated device computes what MindSpore's CPU back end computes, to fp32 rounding."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("numbers of the emulator")  # one program serves them all

PROGRAM, MORE = (Path(__file__).with_name(f"{name}_program.py") for name in ("numbers", "numpy"))
BOTH = f"""
    import runpy

    for program in ({str(PROGRAM)!r}, {str(MORE)!r}):
        runpy.run_path(program)
"""
GROUPS = ["mlp", "block", "language", "images.True", "images.False", "sgd", "sgd_momentum", "momentum", "adam"]
GROUPS += ["adam_weight_decay", "op"]


@pytest.fixture(scope="module")
def ascend(emulated):
    return emulated(BOTH, "Ascend", "ascend.npz")


@pytest.fixture(scope="module")
def both(ascend, tmp_path_factory):
    """All numbers, of the CPU and of the emulated device."""
    folder = tmp_path_factory.mktemp("numbers")
    plain = subprocess.run(
        [sys.executable, str(PROGRAM), "CPU", str(folder / "cpu.npz")],
        env={**os.environ, "GLOG_v": "3"},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert plain.returncode == 0, plain.stderr[-3000:]
    return np.load(folder / "cpu.npz"), np.load(ascend.check().folder / "ascend.npz")


def names(numbers, group):
    return [name for name in numbers.files if name == group or name.startswith(group + ".")]


@pytest.mark.parametrize("group", GROUPS)
def test_same_numbers_as_on_cpu(both, group):
    cpu, ascend = both
    assert names(cpu, group)
    assert names(cpu, group) == names(ascend, group)
    for name in names(cpu, group):
        expected, got = cpu[name], ascend[name]
        assert got.dtype == expected.dtype, name
        scale = np.abs(expected.astype(np.float64)).max() + 1e-6
        np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=3e-6, err_msg=name)


def test_every_number_belongs_to_a_group(both):
    cpu, _ = both
    assert sorted(name for group in GROUPS for name in names(cpu, group)) == sorted(cpu.files)


@pytest.mark.parametrize("claim", ["adam_w", "nets", "batch_norm", "along_an_axis"])
def test_operators_that_the_cpu_lacks(ascend, claim):
    """Against numpy: AdamW in one operator, RMS norm, SwiGLU, mint's convolution, pooling, losses, sums."""
    assert ascend.json()[claim] == ""


def test_dropout_drops_its_share_and_repeats_with_the_seed(ascend):
    assert ascend.json()["dropout"] == ""


def test_random_numbers_lie_as_they_should(ascend):
    assert ascend.json()["random_numbers"] == ""


def test_an_operator_that_is_missing_fails_by_its_name(ascend):
    assert ascend.json()["missing_operators"] == ""
    assert "the operator TopK (aclop) is not emulated, here of [2, 3]" in ascend.stderr
