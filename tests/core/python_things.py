"""Objects that hold tensors, and a replay of what a forward did to them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.python_state import PythonState
from tests.helpers import numbers

OLD, NEW = numbers(2), numbers(2, seed=1)


@contextlib.contextmanager
def replay(owner: Any, forward: Callable[[], Any], *arguments: Any) -> Iterator[None]:
    """Change things as a forward does; inside is the replay."""
    state = PythonState(owner, [(f"argument {index}", argument) for index, argument in enumerate(arguments)])
    forward()
    state.seal()
    with state.restored():
        yield


def found(owner: Any, *arguments: Any) -> list[str]:
    """Where tensors were found."""
    return [
        what for what, _ in PythonState(owner, [(f"argument {i}", value) for i, value in enumerate(arguments)]).tensors
    ]


class Holds(nn.Cell):
    """A cell with one attribute, which it reads."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def construct(self, x: Tensor) -> Tensor:
        return x * self.value

    def method(self) -> Any:
        return self.value


class Thing:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


@dataclasses.dataclass
class Record:
    """A dataclass of the user's own."""

    value: Any

    def method(self) -> Any:
        return self.value


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass that has its attributes in slots."""

    value: Any

    def method(self) -> Any:
        return self.value


class Set:
    """Exchanges what an object holds."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self) -> None:
        self.thing.value = NEW
