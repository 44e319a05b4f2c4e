"""A loop of one's own under a policy file: one call before the first step.

Run it with the path of a policy file, or without one: python examples/train/custom_loop.py [policy.yaml]
"""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn

from hyper_parallel import SwapManager, apply_policy

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from net import Net, dataset  # noqa: E402


def main(policy: str) -> list[float]:
    """Train two epochs."""
    net, loss_of = Net(), nn.MSELoss()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    plan = apply_policy(net, policy)  # after the net has its classes and devices, before the first step
    print(plan.describe())
    step = ms.value_and_grad(lambda x, y: loss_of(net(x), y), None, optimizer.parameters)
    losses = []
    for _ in range(2):
        for x, y in dataset().create_tuple_iterator():
            loss, gradients = step(x, y)
            optimizer(gradients)
            losses.append(float(loss))
    print(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}; to host: {SwapManager().stats().offloaded_bytes} bytes")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(FOLDER / "policy.yaml"))
