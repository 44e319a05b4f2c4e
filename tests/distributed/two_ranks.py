"""What each of two ranks runs: a net that sums over the ranks in a region; prints what it found as one line of JSON.

MindSpore's CPU backend has the primitive AllReduce (MCCL), and of `mint.distributed`, whose collectives write into an
argument, all_reduce and broadcast.
"""

import json
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy, is_recomputing
from ms_ops.dispatch import Interception

P = CheckpointPolicy


class Sharded(nn.Cell):
    """A dense layer whose results are summed over the ranks, as in tensor parallelism."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense, self.sum = nn.Dense(4, 4), ops.AllReduce()
        random = np.random.RandomState(rank)
        for parameter in self.get_parameters():
            parameter.set_data(Tensor(random.randn(*parameter.shape).astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.sum(ops.tanh(self.dense(x))) * 0.3)


class InPlace(Sharded):
    """The same by `mint.distributed`, on the result of a matrix product; the second time with a handle."""

    def construct(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        mint.distributed.all_reduce(y)
        z = ops.tanh(y) * 0.3
        mint.distributed.all_reduce(z, async_op=True).wait()
        return ops.tanh(z)


def run(net: nn.Cell, x: Tensor) -> tuple[list[bytes], int]:
    """Loss and gradients, and how many collectives a replay ran."""
    again = [0]

    def answer(name: str, run: Any, args: tuple) -> Any:
        again[0] += is_recomputing() and "AllReduce" in name
        return run(*args)

    with Interception(answer):
        value, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
    return [tensor.asnumpy().tobytes() for tensor in (value, *gradients)], again[0]


def main() -> None:
    ms.set_device("CPU")
    init()
    rank = get_rank()
    x = Tensor(np.random.RandomState(7).randn(2, 4).astype(np.float32))
    plain, _ = run(Sharded(rank), x)
    SwapManager().configure(min_bytes=0)
    nets = {
        "recompute": activation_policy(P.MUST_RECOMPUTE)(Sharded(rank)),
        "kept collectives": activation_policy(P.MUST_RECOMPUTE, keep_collectives=True)(Sharded(rank)),
        "kept by a table": activation_policy(ops={"Collective": P.MUST_SAVE})(Sharded(rank)),
        "swapped by a table": activation_policy(ops={"Collective": P.MUST_SWAP})(Sharded(rank)),
        "swap": activation_policy(P.MUST_SWAP)(Sharded(rank)),
    }
    found = {name: run(net, x) for name, net in nets.items()}
    in_place, _ = run(InPlace(rank), x)
    policies: dict[str, tuple[Any, int]] = {  # and how many collectives a replay runs
        "recompute": (activation_policy(P.MUST_RECOMPUTE), 2),
        "kept collectives": (activation_policy(P.MUST_RECOMPUTE, keep_collectives=True), 0),
        "kept by a table": (activation_policy(ops=["Collective", "MatMul", "Mul"]), 0),
        "swapped by a table": (activation_policy(ops={"Collective": P.MUST_SWAP}), 0),
        "kept products": (activation_policy(ops=["MatMul", "BiasAdd"]), 2),
    }
    wrong = [name for name, (put, again) in policies.items() if run(put(InPlace(rank)), x) != (in_place, again)]
    print(
        "found",
        json.dumps(
            {
                "rank": rank,
                "wrong in place": wrong,
                "ranks": get_group_size(),
                "same": {name: numbers == plain for name, (numbers, _) in found.items()},
                "again": {name: again for name, (_, again) in found.items()},
                "live": SwapManager().stats().live_bytes,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
