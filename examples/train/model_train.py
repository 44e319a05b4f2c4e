"""`Model.train` under a policy file: one callback, and nothing else changes.

Run it with the path of a policy file, or without one: python examples/train/model_train.py [policy.yaml]
"""

import sys
from pathlib import Path

from mindspore import nn
from mindspore.train import LossMonitor, Model

from hyper_parallel.train import PolicyCallback

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from net import Net, dataset  # noqa: E402


def main(policy: str) -> Model:
    """Train two epochs."""
    net = Net()
    model = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.01))
    model.train(2, dataset(), callbacks=[PolicyCallback(policy), LossMonitor()], dataset_sink_mode=False)
    return model


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(FOLDER / "policy.yaml"))
