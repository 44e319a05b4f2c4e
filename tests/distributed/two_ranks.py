"""What each of two ranks runs: a net that sums over the ranks in a region; prints what it found as one line of JSON.

MindSpore's CPU backend has AllReduce (MCCL) and no other collective, and none with a handle.
"""

import json
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
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
    print(
        "found",
        json.dumps(
            {
                "rank": rank,
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
