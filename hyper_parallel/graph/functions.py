"""Flags for operators that functions run: one Primitive for a whole process, so they are set around a compilation."""

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from mindspore import nn

from hyper_parallel.graph.reach import cells_reached
from ms_ops.catalogue import all_names
from ms_ops.dispatch import why_not_repeated
from ms_ops.graph_compile import hear_of_compilations
from ms_ops.graph_flags import Undo, flag_made_primitives, function_primitives, set_attribute


class Settings:
    """What the plans that are applied in graph mode want of functions.

    The flags are on while a net under such a plan may be compiled, and off while another cell is: then they would
    change what its own flags mean.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[WeakSet[nn.Cell], Mapping[str, bool]]] = {}
        self._now: dict[str, bool] = {}
        """What the graph that is compiled now gets."""
        self._set = ExitStack()
        self._patches = ExitStack()

    def add(self, cells: list[nn.Cell], functions: Mapping[str, bool]) -> Undo:
        """Set flags whenever one of some cells may be compiled.

        Args:
            cells: The cells of a net.
            functions: Recompute or keep, by dispatch name.

        Returns:
            What ends it.
        """
        if not self._wanted:
            self._patches.callback(flag_made_primitives(self._wants))
            self._patches.callback(hear_of_compilations(self._compiles))
        key = id(functions)
        self._wanted[key] = WeakSet(cells), functions

        def undo() -> None:
            self._wanted.pop(key, None)
            self._set.close()
            if not self._wanted:
                self._patches.close()

        return undo

    def _compiles(self, compiled: Any) -> None:
        self._set.close()
        for key in [key for key, (cells, _) in self._wanted.items() if not cells]:  # their net is gone
            del self._wanted[key]
        if not self._wanted:
            self._patches.close()
            return
        inside = cells_reached(compiled)
        reached = [functions for cells, functions in self._wanted.values() if any(id(cell) in inside for cell in cells)]
        if not reached and not isinstance(compiled, nn.Cell):  # it may reach the net in a way that isn't known
            reached = [functions for _, functions in self._wanted.values()]
        names = self._now = dict.fromkeys(_kept() if reached else (), False)
        for functions in reached:
            for name, again in functions.items():
                names[name] = names.get(name, True) and again
        for name, again in names.items():
            for primitive in function_primitives().get(name, ()):
                self._set.callback(set_attribute(primitive, "recompute", again))

    def _wants(self, name: str) -> bool | None:
        return self._now.get(name)


@functools.cache
def _kept() -> tuple[str, ...]:
    """Operators that are never computed again."""
    return tuple(sorted(name for name in all_names() if why_not_repeated(name)))


SETTINGS = Settings()
"""Those of this process."""
