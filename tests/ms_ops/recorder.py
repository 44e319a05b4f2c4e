"""An observer that writes down what it hears."""

import numpy as np
from mindspore import Tensor


class Recorder:
    """Writes down all that it hears."""

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.written: list[tuple[Tensor, str, bool]] = []
        self.exposed: list[tuple[Tensor, np.ndarray]] = []
        self.read = 0

    def writes(self, tensor: Tensor, how: str, rebinds: bool) -> None:
        self.written.append((tensor, how, rebinds))

    def exposes(self, tensor: Tensor, array: np.ndarray) -> None:
        self.exposed.append((tensor, array))

    def reads(self) -> None:
        self.read += 1

    def heard_of(self, tensor: Tensor) -> list[str]:
        return [how for other, how, _ in self.written if other is tensor]
