"""The emulated device computes what MindSpore's CPU back end computes, to fp32 rounding."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("numbers of the emulator")  # one program serves them all

PROGRAM = Path(__file__).with_name("numbers_program.py")
GROUPS = ["mlp", "block", "language", "images.True", "images.False", "sgd", "sgd_momentum", "momentum", "adam"]
GROUPS += ["adam_weight_decay", "op"]


@pytest.fixture(scope="module")
def both(emulated, tmp_path_factory):
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
    emulated(PROGRAM, "Ascend", folder / "ascend.npz").check()
    return np.load(folder / "cpu.npz"), np.load(folder / "ascend.npz")


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


def test_operators_that_the_cpu_lacks(emulated):
    """Against numpy: AdamW in one operator, RMS norm, SwiGLU, mint's convolution, pooling, losses, sums."""
    emulated(Path(__file__).with_name("numpy_program.py")).check()


def test_dropout_drops_its_share_and_repeats_with_the_seed(emulated):
    done = emulated(
        """
        import numpy as np
        import mindspore as ms
        from mindspore import mint, nn

        ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
        drawn = []
        for _ in range(2):
            ms.set_seed(3)
            ms.manual_seed(3)
            net = nn.SequentialCell(mint.nn.Dropout(0.25)).set_train()
            x = ms.Tensor(np.ones((200, 100), np.float32))
            y, gradient = ms.value_and_grad(lambda x: net(x).sum(), 0)(x)
            gradient = gradient.asnumpy()
            kept = gradient != 0
            assert abs(kept.mean() - 0.75) < 0.02, kept.mean()
            np.testing.assert_allclose(gradient[kept], 1 / 0.75, rtol=1e-6)
            np.testing.assert_allclose(float(y), gradient.sum(), rtol=1e-5)
            drawn.append(gradient)
        np.testing.assert_array_equal(*drawn)
        again = ms.grad(lambda x: net(x).sum())(x).asnumpy()
        assert (again != drawn[1]).any()
        normal = mint.randn((100, 100)).asnumpy()
        assert abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05
        uniform = mint.rand((100, 100)).asnumpy()
        assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
        """
    )
    done.check()
