"""What the demo concludes from its measurements."""

import pytest

from hyper_parallel.demo.results import ModeResult, compare


def result(**changes):
    values = {
        "mode": "plain",
        "losses": [(4.5).hex(), (4.25).hex()],
        "weights_sha256": "a" * 64,
        "step_starts": [0.0, 3.0, 5.0],
        "step_seconds": [3.0, 2.0, 2.5],
        "peak_growth_bytes": 1000,
        "samples": [(0.0, 0)],
        "live_bytes": [0, 0],
        "swap": {"offloaded_bytes": 0},
    }
    return ModeResult(**{**values, **changes})


def test_equal_losses_and_weights_are_identical():
    (row,) = compare([result(mode="swap")], result())
    assert row.bit_identical
    assert row.passed
    assert row.final_loss == 4.25


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [(4.5).hex(), (4.25 + 2**-20).hex()]},
        {"losses": [(4.5 + 2**-20).hex(), (4.25).hex()]},
        {"weights_sha256": "b" * 64},
    ],
)
def test_any_other_loss_or_weight_is_not_identical(change):
    (row,) = compare([result(**change)], result())
    assert not row.bit_identical
    assert not row.passed


def test_bytes_left_on_host_fail_the_mode():
    (row,) = compare([result(live_bytes=[0, 4])], result())
    assert row.bit_identical
    assert not row.passed


def test_ratios_are_to_plain_and_leave_out_the_first_step():
    (row,) = compare([result(step_seconds=[99.0, 4.5, 4.5], peak_growth_bytes=250)], result())
    assert row.step_ratio == 2.0
    assert row.peak_ratio == 0.25


def test_a_single_step_is_its_own_median():
    assert result(step_seconds=[3.0]).median_step == 3.0
