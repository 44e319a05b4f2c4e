"""What a model runs: its operators as MindSpore dispatches them, measured."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.call_site import running_cell
from hyper_parallel.core.activation_memory.scopes import Kept
from ms_ops.autograd import saved_tensors_hooks, wait_for_operators
from ms_ops.catalogue import catalogue_name, dispatch_names
from ms_ops.dispatch import Interception, arguments
from ms_ops.tensors import storage_of


@dataclass(frozen=True)
class OperatorRow:
    """One operator, over one forward."""

    name: str
    """The catalogue's name: `MatMul` for every matrix product."""
    dispatch_name: str
    """MindSpore's name on the route that the model takes."""
    calls: int
    """How often it runs."""
    output_bytes: int
    """Bytes of all tensors it gives; one that shares its storage with an argument counts as none."""
    seconds: float
    """What its calls take together, each waited for, in the fastest of the timed forwards; 0 if none runs it."""
    cells: tuple[str, ...]
    """Dotted paths of the cells whose construct calls it, in the order in which they do so first; `""` is the model."""


@dataclass
class _Seen:
    calls: int = 0
    output_bytes: int = 0
    cells: dict[str, None] = field(default_factory=dict)


def measure_operators(net: nn.Cell, inputs: tuple[Any, ...], steps: int = 1) -> list[OperatorRow]:
    """Run forwards of a model and tell its operators apart.

    The first forward warms up, the second is counted, the others are timed, each operator waited for: what runs side by
    side in an undisturbed forward is added up. Operators are seen as a region sees them. Nothing is recorded for a
    gradient, unless the model takes one; moving statistics are updated if it is in training mode.

    Waking MindSpore's queue takes up to 4 ms per operator on a busy machine, which is in the times;
    `mindspore.runtime.launch_blocking()` avoids it, if no operator has run yet in the process (seen in 2.9.0, 2.10.0).

    Args:
        net: The model, as it is to run.
        inputs: What it is called with.
        steps: Forwards that are timed.

    Returns:
        A row per dispatch name, in the order in which they run first.

    Raises:
        ValueError: `steps` is less than 1.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from hyper_parallel.report.operators import measure_operators
        >>> [(row.name, row.dispatch_name, row.output_bytes) for row in measure_operators(nn.Tanh(), (ops.ones(2),))]
        [('Tanh', 'Tanh', 8)]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, but is {steps}")
    net(*inputs)
    wait_for_operators()
    seen = _count(net, inputs)
    times: dict[str, list[float]] = {name: [] for name in seen}
    for _ in range(steps):
        for name, seconds in _time(net, inputs).items():
            if name in times:
                times[name].append(seconds)
    return [
        OperatorRow(
            name=catalogue_name(name),
            dispatch_name=name,
            calls=found.calls,
            output_bytes=found.output_bytes,
            seconds=min(times[name], default=0.0),
            cells=tuple(found.cells),
        )
        for name, found in seen.items()
    ]


def _count(net: nn.Cell, inputs: tuple[Any, ...]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    paths = [(path, cell) for path, cell in net.cells_and_names()]

    def answer(name: str, run: Callable[..., Any], args: tuple) -> Any:
        result = run(*args)
        if not dispatch_names(name) and not list(_tensors(result)):
            return result  # Python that MindSpore computes with: make_range, typeof
        found = seen.setdefault(name, _Seen())
        found.calls += 1
        found.output_bytes += _new_bytes(result, args)
        found.cells[running_cell(paths)] = None
        return result

    _forward(net, inputs, answer)
    return seen


def _time(net: nn.Cell, inputs: tuple[Any, ...]) -> dict[str, float]:
    taken: dict[str, float] = {}

    def answer(name: str, run: Callable[..., Any], args: tuple) -> Any:
        begin = time.perf_counter()
        result = run(*args)
        wait_for_operators()
        taken[name] = taken.get(name, 0.0) + time.perf_counter() - begin
        return result

    _forward(net, inputs, answer)
    return taken


def _forward(net: nn.Cell, inputs: tuple[Any, ...], answer: Callable[[str, Callable[..., Any], tuple], Any]) -> None:
    # without hooks MindSpore passes over operators none of whose tensors comes from Python
    with saved_tensors_hooks(Kept, Kept.get), Interception(answer):
        net(*inputs)
        wait_for_operators()


def _new_bytes(result: Any, args: tuple) -> int:
    tensors = list(_tensors(result))
    if not tensors:
        return 0
    known = {storage_of(tensor) for tensor in _tensors(arguments(args))} - {0}
    return sum(tensor.nbytes for tensor in tensors if storage_of(tensor) not in known)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
