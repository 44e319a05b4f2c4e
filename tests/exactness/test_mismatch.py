"""A replay that does something else than its forward raises, whoever put the policy, and says what to do about it."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    PolicyError,
    ReplayMismatchError,
    activation_policy,
    apply_policy,
    checkpoint,
    checkpoint_wrapper,
    is_recomputing,
)
from tests.exactness.programs.entries import ENTRIES, put_by
from tests.exactness.programs.program import X
from tests.helpers import RECOMPUTE, SAVE, SWAP, Layer, Stack, assert_same, gradients, on

MODES = ("recompute", "swapped inputs", "recompute in recompute")

Body = Callable[[Tensor, bool], Tensor]
"""Called with whether it is the replay that runs."""

DIFFERENCES: dict[str, tuple[Body, str]] = {
    "more operators": (
        lambda x, again: ops.exp(ops.tanh(x)) if again else ops.tanh(x),
        r"runs Exp as operator \d+ .*the forward ran only \d+ operators",
    ),
    "more operators in the middle": (
        lambda x, again: ops.tanh(ops.exp(x) if again else x) * x,
        r"is Exp in the replay .*but Tanh\S* -> Float32 \(3, 4\) in the forward",
    ),
    "fewer operators": (
        lambda x, again: ops.tanh(x) if again else ops.exp(ops.tanh(x)),
        r"ended after \d+ operators, but the forward ran \d+; the first one missing is Exp",
    ),
    "another order": (
        lambda x, again: ops.sin(ops.cos(x)) if again else ops.cos(ops.sin(x)),
        r"is Cos in the replay .*but Sin",
    ),
    "another operator that saves the same": (
        lambda x, again: (ops.sigmoid if again else ops.tanh)(x) * x,
        r"is Sigmoid in the replay .*but Tanh",
    ),
    "another number": (
        lambda x, again: ops.tanh(x * (3.0 if again else 2.0)),
        r"Muls\(3\.0,?\).* in the replay .*but Muls\(2\.0,?\)",
    ),
    "another axis": (
        lambda x, again: ops.tanh(x @ x.T).sum(0 if again else 1),
        r"SumExt.* in the replay .*but SumExt",
    ),
    "another shape": (
        lambda x, again: ops.tanh(x[:1] if again else x[:2]).sum() * x,
        r"\(1, 4\) in the replay .*but .*\(2, 4\) in the forward",
    ),
    "another dtype": (
        lambda x, again: ops.tanh(x.astype(ms.float16 if again else ms.bfloat16).astype(ms.float32)) * x,
        r"Cast.*Float16.* in the replay .*but Cast.*BFloat16",
    ),
}


class Differs(nn.Cell):
    """Does something else each time it is replayed."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def construct(self, x: Tensor) -> Tensor:
        return self.body(x * x.mean(), is_recomputing())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_operator_that_differs_is_named(difference: str, mode: str) -> None:
    body, pattern = DIFFERENCES[difference]
    with pytest.raises(ReplayMismatchError, match=pattern):
        gradients(put_by("decorated instance", mode)(Differs(body)), X)
    assert_same(gradients(on(Layer(), RECOMPUTE), X), gradients(Layer(), X))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("difference", ["more operators in the middle", "fewer operators", "another number"])
def test_a_difference_raises_whoever_put_the_policy(difference: str, entry: str) -> None:
    body, pattern = DIFFERENCES[difference]
    with pytest.raises(ReplayMismatchError, match=pattern):
        gradients(put_by(entry, "recompute")(Differs(body)), X)


def test_the_message_names_the_path_the_line_and_the_remedy() -> None:
    net = Stack([Layer(), Differs(DIFFERENCES["another number"][0])])
    apply_policy(net, {"version": 1, "rules": [{"cells": "layers.1", "policy": "must_recompute"}]})
    with pytest.raises(ReplayMismatchError) as caught:
        gradients(net, X)
    message = str(caught.value)
    assert message.startswith("layers.1: ")
    for part in (__file__, "MUST_SAVE", "register_state_provider"):
        assert part in message


def test_the_remedy_helps() -> None:
    """The cell that does something else each time is kept; around it everything is replayed."""

    class Outer(nn.Cell):
        def __init__(self, policy: Any, body: Body) -> None:
            super().__init__()
            self.layer, self.inner = Layer(), on(Differs(body), policy)

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(self.layer(x)).sum() * x

    for body, _ in DIFFERENCES.values():
        for policy in (SAVE, SWAP):
            assert_same(gradients(on(Outer(policy, body), RECOMPUTE), X), gradients(Outer(None, body), X))


# ---- values

Values = Callable[[nn.Cell], nn.Cell]

VALUES: dict[str, Values] = {
    "decorator": lambda cell: activation_policy(RECOMPUTE, determinism_check="values")(cell),
    "wrapper": lambda cell: checkpoint_wrapper(cell, determinism_check="values"),
    "function": lambda cell: Calls(cell),
    "policy file": lambda cell: applied(cell, {"policy": "must_recompute", "determinism_check": "values"}),
}


class Calls(nn.Cell):
    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, x: Tensor) -> Tensor:
        return checkpoint(self.cell, x, determinism_check="values")


def applied(cell: nn.Cell, rule: dict[str, str]) -> nn.Cell:
    net = Stack([cell])
    apply_policy(net, {"version": 1, "rules": [{"cells": "layers.0", **rule}]})
    return net


class Router(nn.Cell):
    """Near ties that another rounding would decide otherwise: the logits differ by a millionth in the replay."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Tensor(np.array([0.0, 1e-6, 0.0, 0.0], np.float32))

    def construct(self, x: Tensor) -> Tensor:
        logits = ops.zeros((3, 4), ms.float32)
        logits = logits + self.noise if is_recomputing() else logits + self.noise * 0
        return ops.topk(logits, 2)[1]


class Routed(nn.Cell):
    """A router, and what it routes to."""

    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.router, self.layer = on(Router(), policy), Layer()

    def construct(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return ops.gather_elements(y, 1, self.router(y)) * x[:, :2]


class Perturbed(nn.Cell):
    """Takes a tensor of another value in the replay; the operators are the same."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x + (EPSILON if is_recomputing() else ZERO)) * x


ZERO, EPSILON = Tensor(0.0, ms.float32), Tensor(1e-6, ms.float32)


@pytest.mark.parametrize("way", VALUES)
def test_other_values_of_the_same_operators_are_noticed_where_values_are_compared(way: str) -> None:
    with pytest.raises(ReplayMismatchError, match=r"operator 1 of \d+ is Add.* with checksum .*in the replay"):
        gradients(VALUES[way](Perturbed()), X)


@pytest.mark.parametrize("way", VALUES)
def test_comparing_values_changes_none(way: str) -> None:
    assert_same(gradients(VALUES[way](Layer()), X), gradients(Layer(), X))


def test_a_router_that_decides_otherwise_is_named() -> None:
    with pytest.raises(ReplayMismatchError, match=r"Routed: .*MUST_SAVE"):
        gradients(on(Routed(), RECOMPUTE), X)


def test_a_router_that_is_kept_decides_once() -> None:
    want = gradients(Routed(), X)
    for check in ("operators", "values"):
        assert_same(gradients(on(Routed(SAVE), RECOMPUTE, determinism_check=check), X), want)


@pytest.mark.parametrize("bad", ["value", "", None, True])
def test_a_check_that_does_not_exist_is_refused(bad: Any) -> None:
    with pytest.raises(PolicyError, match="determinism_check must be one of operators, values"):
        activation_policy(RECOMPUTE, determinism_check=bad)
    with pytest.raises(PolicyError, match="determinism_check"):
        checkpoint(ops.tanh, X, determinism_check=bad)


@pytest.mark.parametrize("policy", [SAVE, SWAP], ids=lambda policy: policy.name)
def test_comparing_values_where_nothing_is_replayed_is_refused(policy: Any) -> None:
    with pytest.raises(PolicyError, match="determinism_check='values' compares a replay with its forward"):
        activation_policy(policy, determinism_check="values")
