"""Which expert a token goes to, and what was read on host, is in a replay what it was in the forward."""

from collections import Counter
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import activation_policy
from ms_ops import dispatch
from ms_ops.dispatch import wait_for_collective
from tests.helpers import PREFER_RECOMPUTE, RECOMPUTE, SWAP, Layer, Stack, assert_same, gradients, numbers, on, seeded

X = numbers(6, 4)


class Experts(nn.Cell):
    """Sends every token to one of three experts, by lists on host."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Dense(4, 3)
        self.experts = nn.CellList([Layer(seed=seed) for seed in (5, 6, 7)])
        self.read: list[Any] = []

    def construct(self, x: Tensor) -> Tensor:
        weights, chosen = ops.topk(ops.softmax(self.router(ops.tanh(x)), -1), 1)
        order = ops.argsort(chosen.squeeze(-1).astype(ms.float32))
        counts = [int((chosen == expert).astype(ms.int32).sum()) for expert in range(3)]
        assert ops.stack([(chosen == expert).astype(ms.int32).sum() for expert in range(3)]).tolist() == counts
        parts, begin = [], 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                parts.append(expert(ops.gather(x, order[begin : begin + count], 0)))
            begin += count
        return ops.cat(parts) * ops.gather(weights, order, 0)


@pytest.mark.parametrize("how", ["recompute", "swapped inputs", "in another", "swap", "a table of other operators"])
def test_experts_are_chosen_once_and_gradients_are_plains(how: str, replayed: Counter[str]) -> None:
    cell = seeded(Experts())
    net = {
        "recompute": lambda: on(cell, RECOMPUTE),
        "swapped inputs": lambda: on(cell, RECOMPUTE, swap_inputs=True),
        "in another": lambda: on(Stack([on(cell, RECOMPUTE)]), RECOMPUTE),
        "swap": lambda: on(cell, SWAP),
        "a table of other operators": lambda: activation_policy(ops=["MatMul"])(cell),
    }[how]()
    got, want = gradients(net, X), gradients(seeded(Experts()), X)
    assert [value.tobytes() for value in got.values()] == [value.tobytes() for value in want.values()]
    assert "TopK" not in replayed
    assert ("TopK read" in replayed) is (how != "swap")


def test_a_table_that_names_it_has_it_run_again(replayed: Counter[str]) -> None:
    got = gradients(activation_policy(ops={"TopK": PREFER_RECOMPUTE})(seeded(Experts())), X)
    assert_same(got, gradients(seeded(Experts()), X))
    assert "TopK" in replayed


@pytest.mark.parametrize("read", ["item", "tolist", "__int__", "__float__", "__bool__", "__index__"])
def test_a_replay_reads_on_host_what_the_forward_read(read: str) -> None:
    """Even where what it would read now is another tensor, which nobody can know of."""
    dtype = ms.int32 if read == "__index__" else ms.float32
    held = [Tensor(1, dtype)]

    def construct(x: Tensor) -> Tensor:
        value = getattr(held[0], read)()
        return ops.tanh(ops.exp(x) * float(value)) * 2

    class Reads(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return construct(x)

    net = on(Reads(), RECOMPUTE)

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        held[0] = Tensor(0, dtype)
        return y

    got = ms.grad(forward)(X).asnumpy()
    held[0] = Tensor(1, dtype)
    assert got.tobytes() == ms.grad(Reads())(X).asnumpy().tobytes()


def test_a_list_that_is_changed_after_it_was_read_is_read_as_it_was() -> None:
    class Changes(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            sizes = ops.ones(3, ms.int32).tolist()
            sizes[0] += sum(sizes)
            return ops.tanh(ops.exp(x) * sizes[0]) * 2

    assert_same(gradients(on(Changes(), RECOMPUTE), X), gradients(Changes(), X))


def test_the_handle_of_an_asynchronous_collective_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Handle:
        """One process has nobody to communicate with."""

        def wait(self) -> None:
            waited.append("waited")

    monkeypatch.setattr(dispatch, "CommHandle", Handle)
    for result in (Handle(), X, None):
        wait_for_collective(result)
    assert waited == ["waited"]
