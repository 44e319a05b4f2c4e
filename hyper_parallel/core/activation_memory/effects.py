"""`Effects`: what a cell that runs once inside a replayed region changes besides its output.

The replay reads the output and doesn't run the cell, but what runs after it may read what the cell has left behind: a
parameter, the next number of a generator, a tensor on an object that both know. What the cell changed is therefore
noted when it ends, and holds again from the moment at which the replay reads the output.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel.core.activation_memory.python_state import PythonState
from hyper_parallel.core.activation_memory.state_holders import Holder
from hyper_parallel.core.activation_memory.state_providers import ProvidedState
from ms_ops.tensors import copy_of, rebind


class Effects:
    """Made before the cell runs.

    Args:
        states: What the code of the regions around the cell can reach.
        provided: The state of the providers when the innermost of these regions began.
    """

    __slots__ = ("_begun", "_held", "_parameters", "_provided")

    def __init__(self, states: Iterable[PythonState], provided: ProvidedState) -> None:
        self._begun: Any = provided
        self._held: list[tuple[Holder, Any]] = [(holder, holder.read()) for each in states for holder in each.holders]
        self._parameters: list[tuple[Parameter, Tensor]] = []
        self._provided: ProvidedState | None = None

    def seal(self, parameters: Iterable[Parameter]) -> None:
        """The cell has run, and has written these parameters."""
        self._parameters = [(parameter, copy_of(parameter)) for parameter in parameters]
        held, self._held = self._held, []
        for holder, before in held:
            changed = holder.changed_since(before)
            if changed is not None:
                self._held.append((holder, changed))
        self._provided = ProvidedState().since(self._begun)
        self._begun = None

    def apply(self, after: contextlib.ExitStack) -> None:
        """The replay is where the cell has run; `after` is closed when it ends, and undoes what isn't undone anyway."""
        for parameter, value in self._parameters:
            rebind(parameter, copy_of(value))
        for holder, changed in self._held:
            after.callback(holder.write(changed))
        if self._provided is not None:
            self._provided.set()
