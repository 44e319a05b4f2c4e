"""Memory figures and the picture."""

import time

import numpy as np

from hyper_parallel.report.memory_plot import Curve, plot_memory
from hyper_parallel.report.resident import ResidentSampler, peak_resident_bytes, reset_peak, resident_bytes

MB = 2**20


def test_resident_memory_follows_an_allocation():
    before = resident_bytes()
    block = np.ones(64 * MB, np.uint8)
    assert resident_bytes() - before > 56 * MB
    assert peak_resident_bytes() >= before + 56 * MB
    del block
    assert resident_bytes() - before < 32 * MB


def test_the_peak_forgets_what_was_before_a_reset():
    block = np.ones(64 * MB, np.uint8)
    del block
    if reset_peak():
        assert peak_resident_bytes() - resident_bytes() < 16 * MB


def test_the_sampler_sees_a_short_peak():
    with ResidentSampler(interval=0.001) as sampler:
        block = np.ones(64 * MB, np.uint8)
        time.sleep(0.1)
        del block
    sizes = [size for _, size in sampler.samples]
    assert max(sizes) - sizes[0] > 56 * MB
    assert [at for at, _ in sampler.samples] == sorted(at for at, _ in sampler.samples)


def curve(name, peak):
    samples = [(at / 10, int(peak * (at % 10) / 10)) for at in range(30)]
    return Curve(name, samples, step_starts=[0.0, 1.0, 2.0], step_seconds=[1.0, 0.95, 0.9], peak=peak)


def test_time_can_be_counted_in_steps():
    samples = [(0.0, 1), (1.5, 2), (3.0, 3), (4.0, 4), (9.0, 5)]
    counted = Curve("plain", samples, step_starts=[0.0, 3.0], step_seconds=[2.9, 2.0], peak=5).by_steps()
    assert counted == [(0.0, 1), (0.5, 2), (1.0, 3), (1.5, 4)]


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "memory.png"
    plot_memory([curve("plain", 100 * MB), curve("swap", 40 * MB)], "a test", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_curve_with_one_step_can_be_drawn(tmp_path):
    path = tmp_path / "memory.png"
    plot_memory([Curve("plain", [(0.0, 0), (1.0, MB)], [0.0], [1.0], MB)], "a test", path)
    assert path.stat().st_size > 0
