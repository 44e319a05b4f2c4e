"""Setting the flags of a plan on a net, and taking them back."""

from contextlib import ExitStack

from mindspore import nn

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.graph.functions import SETTINGS
from hyper_parallel.graph.guard import watch
from hyper_parallel.graph.labels import label_of
from hyper_parallel.graph.mapping import Flags
from ms_ops.graph_compile import compiled_parameter, is_inlined_late, set_apart
from ms_ops.graph_flags import set_attribute, set_flag, set_scope


def require_uncompiled(net: nn.Cell, what: str) -> None:
    """Refuse a net of which a graph was compiled.

    Args:
        net: The net.
        what: What it is too late for.

    Raises:
        PolicyError: There is a graph with a parameter of the net, or one of its cells has a graph of its own.
    """
    own = next((path or "the net" for path, cell in net.cells_and_names() if cell.compile_cache), "")
    found = None if own else compiled_parameter(net.get_parameters())
    if own or found is not None:
        compiled = own or f"the cell of {getattr(found, 'name', '')}"
        raise PolicyError(
            f"{compiled} was compiled in graph mode already, so it is too late {what}: MindSpore reads flags when it "
            f"compiles, and goes on with the graph that it has; apply a policy to a net that hasn't run, before its "
            f"first step and its first evaluation"
        )


def set_flags(flags: Flags) -> ExitStack:
    """Set flags on a net: all of them, or none if an error is raised.

    Args:
        flags: What is set.

    Returns:
        What takes them back when it is closed. It doesn't keep the net alive.
    """
    with ExitStack() as undo:
        for cell, path in flags.labels.values():
            undo.callback(set_scope(cell, label_of(path, id(cell) in flags.recomputed)))
            if is_inlined_late(cell) and flags.recompute:
                undo.callback(set_apart(cell, f" {path} under a policy"))
        for cell in flags.outputs.values():
            undo.callback(set_flag(cell, output_recompute=False))
        for primitive, name, value in flags.attributes:
            undo.callback(set_attribute(primitive, name, value))
        for cell, where in flags.watched.values():
            undo.callback(watch(cell, where))
        if flags.regions or flags.functions:
            cells = [cell for cell, _ in flags.labels.values()]
            undo.callback(SETTINGS.add(cells, flags.functions))
        return undo.pop_all()
