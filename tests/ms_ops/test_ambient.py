"""Mixed precision and the generator as they were in the forward, while it is repeated."""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops
from mindspore._c_expression.amp import AmpLevel
from mindspore.train.amp import AmpDecorator

from ms_ops.autograd import (
    Ambient,
)
from tests.helpers import numbers


def matmul_dtype() -> Any:
    return ops.matmul(numbers(2, 2), numbers(2, 2)).dtype


def half() -> AmpDecorator:
    return AmpDecorator(AmpLevel.AmpO3, ms.float16, [], [])


def test_the_generator_is_restored_inside_and_as_it_was_afterwards() -> None:
    ambient = Ambient()
    saved = ms.get_rng_state().asnumpy().copy()
    ms.manual_seed(1234)
    now = ms.get_rng_state().asnumpy().copy()
    assert not np.array_equal(saved, now)
    with ambient.restored():
        assert np.array_equal(ms.get_rng_state().asnumpy(), saved)
        ms.manual_seed(5)
    assert np.array_equal(ms.get_rng_state().asnumpy(), now)


def test_the_generator_is_as_it_was_after_an_exception() -> None:
    ambient = Ambient()
    ms.manual_seed(99)
    now = ms.get_rng_state().asnumpy().copy()
    with pytest.raises(LookupError), ambient.restored():
        raise LookupError
    assert np.array_equal(ms.get_rng_state().asnumpy(), now)


def test_mixed_precision_of_the_forward_is_restored_inside_and_gone_afterwards() -> None:
    with half():
        assert matmul_dtype() == ms.float16
        ambient = Ambient()
    assert matmul_dtype() == ms.float32
    with ambient.restored():
        assert matmul_dtype() == ms.float16
    assert matmul_dtype() == ms.float32


def test_mixed_precision_is_gone_after_an_exception() -> None:
    with half():
        ambient = Ambient()
    with pytest.raises(LookupError), ambient.restored():
        raise LookupError
    assert matmul_dtype() == ms.float32


def test_a_forward_without_mixed_precision_is_repeated_without_it() -> None:
    ambient = Ambient()
    with half():
        with ambient.restored():
            inside = matmul_dtype()
        assert matmul_dtype() == ms.float16
    assert inside == ms.float32
