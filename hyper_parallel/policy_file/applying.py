"""What a plan does to a net, in PyNative mode or to be compiled, and how it is taken back."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import ref

from mindspore import nn

from hyper_parallel.core.activation_memory import prefetch_layers
from hyper_parallel.core.activation_memory.attach import attach, restore
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.graph.applied import require_uncompiled, set_flags
from hyper_parallel.graph.mapping import flags_of
from hyper_parallel.graph.swap import ladder_of
from hyper_parallel.policy_file.applied import recorded
from hyper_parallel.policy_file.graph_notes import graph_notes, pynative_notes
from hyper_parallel.policy_file.loading import Source
from hyper_parallel.policy_file.problems import policy_error
from hyper_parallel.policy_file.resolve import Resolution


class Done(NamedTuple):
    """What was done to a net."""

    before: Callable[[], None]
    """Called before anything is taken back. May refuse, and then nothing is."""
    cells: ExitStack
    notes: list[str]
    """What there is to say about it."""

    def take_back(self) -> None:
        """Leave the net as it was."""
        self.before()
        self.cells.close()


def attach_policies(plan: Any, source: Source, net: nn.Cell, resolution: Resolution) -> Done:
    """Put the policies of a plan on the cells of a net that runs in PyNative mode: all of them, or none on an error.

    Args:
        plan: The plan, for the record of which net is under which.
        source: Its file.
        net: The net.
        resolution: What the plan means for the net.

    Returns:
        What takes all back.

    Raises:
        PolicyError: The file's swap settings contradict what the manager was told.
        SwapStateError: Tensors are swapped right now, so the swap settings can't change.
        HostMemoryError: The spill folder can't be written.
    """
    given = source.file.swap.model_dump(exclude_unset=True)
    undo_swap = SwapManager().adopt(given, source.origin) if given else _nothing
    with ExitStack() as undo:
        undo.callback(undo_swap)
        cells = undo.enter_context(ExitStack())
        for cell, spec in resolution.attachments:
            cells.callback(_attached(cell, spec))
            cells.callback(recorded(cell, plan))
        for first, second in resolution.prefetch:
            cells.callback(prefetch_layers.pair(first, second))
        cells.callback(recorded(net, plan))
        done = Done(undo_swap, cells, pynative_notes(resolution))
        undo.pop_all()
        return done


def flag_net(plan: Any, source: Source, net: nn.Cell, resolution: Resolution, settings: SwapSettings) -> Done:
    """Set the flags that a plan means on a net that will be compiled: all of them, or none on an error.

    Args:
        plan: The plan, for the record of which net is under which.
        source: Its file.
        net: The net.
        resolution: What the plan means for the net.
        settings: The swap settings that are in force: they say what becomes of `must_swap`.

    Returns:
        What takes all back, and refuses once the net was compiled.

    Raises:
        PolicyError: The net was compiled already, or a policy can't be honoured.
    """
    require_uncompiled(net, f"for the plan from {source.origin}")
    flags = flags_of(resolution.regions, ladder_of(settings))
    if flags.problems:
        raise policy_error(f"{source.name} in graph mode", flags.problems)
    cells, weak = set_flags(flags), ref(net)

    def refuse_late() -> None:
        if (alive := weak()) is not None:
            require_uncompiled(alive, "to remove the plan")

    for cell, _ in resolution.attachments:
        cells.callback(recorded(cell, plan))
    cells.callback(recorded(net, plan))
    return Done(refuse_late, cells, flags.notes + graph_notes(source, resolution))


def _attached(cell: nn.Cell, spec: RegionSpec) -> Callable[[], None]:
    previous, weak = attach(cell, spec, must_agree=True), ref(cell)

    def undo() -> None:
        if (alive := weak()) is not None:
            restore(alive, previous)

    return undo


def _nothing() -> None:
    """Undo nothing."""
