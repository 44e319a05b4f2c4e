"""Recording gradients: is it on, what is saved, how a forward is repeated, how MindSpore is left after a failure.

Seen in MindSpore 2.9.0 and 2.10.0, PyNative mode.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore._c_expression import MixedPrecisionType
from mindspore._c_expression.amp import AmpLevel, get_curr_amp_strategy
from mindspore.graph.api import _pynative_executor
from mindspore.train.amp import AmpDecorator, amp_cast

_seed: Any = import_module("mindspore.common.seed")  # the function of that name hides the module

saved_tensors_hooks = ms.saved_tensors_hooks
"""`with saved_tensors_hooks(pack, unpack)`: the innermost pair sees what autograd saves, on the caller's thread."""


def recording() -> bool:
    """Whether operators that run now are recorded for a gradient.

    True also while nobody asks for a gradient but MindSpore's flag was left on (by a failed step, or on purpose by
    code that calls `run_backward`): MindSpore then records, and calls the saved-tensor hooks.
    """
    return _pynative_executor.requires_grad()


def backward_is_recorded() -> bool:
    """Whether the backward that runs now is itself recorded (second-order gradients): its saved tensors are read again.

    In a plain backward the flag is off, even if it was on before (2.10.0).
    """
    return _pynative_executor.grad_flag()


def is_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter's data: hooks get those as plain tensors that keep `param_info`."""
    return tensor.param_info is not None


def comes_from_a_parameter(tensor: Tensor, views: Container[str]) -> bool:
    """Whether a saved tensor is a view or a cast of a parameter that is trained: its history says so.

    Args:
        tensor: The tensor.
        views: The operators that may lie in between.
    """
    node = tensor._grad_node
    while node is not None and not node.is_leaf():
        if node.name() not in views:
            return False
        before = node.next_functions
        node = before[0][0] if before else None
    # the leaf of a parameter has its name; that of another tensor is `input_` and a number
    return node is not None and not _OTHER_LEAF.fullmatch(node.name())


def from_parameters(tensors: Sequence[Tensor], views: Container[str]) -> set[int]:
    """Which of saved tensors come from a parameter, see `comes_from_a_parameter`, by their places.

    Each question to MindSpore takes about a microsecond in the middle of a forward, so that many tensors are asked
    about at once, and the names of operators that are no views are remembered. On the thread that trains: another one
    would read histories while they change.
    """
    found = set()
    for place, tensor in enumerate(tensors):
        node = tensor._grad_node
        if node is None:
            continue
        name = node.name()
        if name in _makes_new:
            continue
        if name in views or node.is_leaf():
            if comes_from_a_parameter(tensor, views):
                found.add(place)
        else:
            _makes_new.add(name)
    return found


_makes_new: set[str] = set()
"""Names of operators that are no views."""


_OTHER_LEAF = re.compile(r"input_\d+")


def requires_grad(tensor: Tensor) -> bool:
    """Whether autograd tracks `tensor`, as a leaf or as a result."""
    return tensor._requires_grad


class _CellPrecision(threading.local):
    """The precisions that cells with `to_float` set while they run, innermost last: MindSpore has no getter."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_cell_precision = _CellPrecision()


def _follow_cell_precision() -> None:
    run = type(_pynative_executor).set_mixed_precision_type
    if hasattr(run, "_hp_follows"):
        return

    @functools.wraps(run)
    def followed(self: Any, precision: Any, is_push: bool = True) -> Any:
        stack = _cell_precision.stack
        if is_push:
            stack.append(precision)
        elif stack:
            stack.pop()
        return run(self, precision, is_push)

    followed._hp_follows = True  # type: ignore[attr-defined]
    type(_pynative_executor).set_mixed_precision_type = followed


@contextlib.contextmanager
def _as_they_are() -> Iterator[None]:
    _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
    try:
        with contextlib.nullcontext() if get_curr_amp_strategy() is None else _no_amp():
            yield
    finally:
        _pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def mixed_precision_is_on() -> bool:
    """Whether operators that run now may take their arguments in another precision than they have."""
    return bool(_cell_precision.stack) or get_curr_amp_strategy() is not None


def is_written_cast(value: Any) -> bool:
    """Whether this is what `auto_mixed_precision` of level O1 writes into the code of cells, to cast arguments."""
    return value is amp_cast


def _no_amp() -> Any:
    return AmpDecorator(AmpLevel.AmpO0, ms.float32, [], [])


def without_precision() -> Any:
    """Operators that run inside take tensors as they are, whatever precision the cell around has: ours are copies."""
    if mixed_precision_is_on():
        return _as_they_are()
    return contextlib.nullcontext()


@contextlib.contextmanager
def without_history() -> Iterator[None]:
    """Operators that run inside aren't recorded, and take tensors as they are: ours are aliases and copies.

    On 2.9.0 a recorded `stop_gradient` that answers for a matrix product in a replay keeps the replay's graph for good.
    """
    enabled = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)
    try:
        with without_precision():
            yield
    finally:
        _pynative_executor.set_enable_grad(enabled)


def alias(tensor: Tensor, tracked: bool) -> Tensor:
    """The same storage as a new tensor without history; `tracked` makes it a leaf that autograd follows.

    Anything that outlives a forward holds an alias: a result holds its gradient node, which holds the saved objects,
    which would hold the result: a cycle that no collector sees, since it runs through C++.
    """
    enabled = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)  # as `without_history`, which takes longer
    try:
        with without_precision():
            result = ms.ops.stop_gradient(tensor)
    finally:
        _pynative_executor.set_enable_grad(enabled)
    if tracked:
        result.requires_grad_()
    return result


_data = Tensor.data.__get__  # of subclasses, too, whatever they make of the name


def data_of(tensor: Tensor) -> Tensor:
    """An untracked alias of a tensor that a hook or a storage is asked about: no operator, a thirtieth of the time.

    Not for the output of a cell that runs once inside a replayed region: its graph then stays for good (found by random
    nets in 2.10.0; why is not known).
    """
    return _data(tensor)


def result_like(tensor: Tensor, tracked: bool) -> Tensor:
    """A copy that code may write into, as it may into a result: MindSpore refuses to write into a tracked leaf."""
    with without_precision():
        return alias(tensor, tracked).copy()


_generator = threading.Lock()
"""Two threads that ask MindSpore's generator at once wait for each other for good (2.10.0)."""


def _rng_state() -> Tensor:
    with _generator:
        return ms.get_rng_state()


def _set_rng_state(state: Tensor) -> None:
    with _generator:
        ms.set_rng_state(state)


class Ambient:
    """What an operator's result depends on besides its inputs, as it is when this object is made."""

    __slots__ = ("amp", "cell_precision", "generator")

    def __init__(self) -> None:
        self.amp = get_curr_amp_strategy()
        self.cell_precision = _cell_precision.stack[-1] if _cell_precision.stack else None
        self.generator = _rng_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Mixed precision and the default generator as they were, inside; as they are, afterwards.

        Random operators don't run again inside, but their seeds are counted when they are made.
        """
        now, seeds = _rng_state(), dict(_seed._KERNEL_SEED)
        _set_rng_state(self.generator)
        amp = self.amp
        precision: Any = contextlib.nullcontext()
        if amp is not None:
            precision = AmpDecorator(
                amp.get_amp_level(), amp.get_amp_dtype(), amp.get_white_list(), amp.get_black_list()
            )
        elif get_curr_amp_strategy() is not None:  # backward runs inside mixed precision, the forward did not
            precision = _no_amp()
        cell_precision = self.cell_precision
        if cell_precision is None and _cell_precision.stack:  # a cell with another precision asks for this replay
            cell_precision = MixedPrecisionType.NOTSET
        if cell_precision is not None:
            _pynative_executor.set_mixed_precision_type(cell_precision)
        try:
            with precision:
                yield
        finally:
            if cell_precision is not None:
                _pynative_executor.set_mixed_precision_type(cell_precision, False)
            _set_rng_state(now)
            _seed._KERNEL_SEED.clear()
            _seed._KERNEL_SEED.update(seeds)


def record_again(forward: Callable[[], None], takes_gradients: bool) -> None:
    """Record a forward into a graph of its own, so that hooks see again what it saves; flags stay.

    Args:
        forward: What runs; its graph is dropped unread.
        takes_gradients: It calls for gradients itself. MindSpore 2.9 and 2.10 can't begin a gradient in an empty graph
            that is not the first one of a backward (`top_cell_ is null`), but can inside another gradient's forward.
            After that, an empty graph doesn't take cells with a `bprop` of their own, so that this thread makes none
            until its next step.
    """
    flag, enabled = _pynative_executor.grad_flag(), _pynative_executor.enable_grad()
    _pynative_executor.set_grad_flag(True)
    _pynative_executor.set_enable_grad(True)
    try:
        if takes_gradients or not _depth.makes_empty_graphs:
            _record_in_a_gradient(forward)
        else:
            _record_in_an_empty_graph(forward)
    finally:
        if takes_gradients:
            _depth.makes_empty_graphs = False
        _pynative_executor.set_grad_flag(flag)
        _pynative_executor.set_enable_grad(enabled)


def _record_in_an_empty_graph(forward: Callable[[], None]) -> None:
    _pynative_executor.new_empty_graph()
    try:
        forward()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the failure may have closed the graph; its error is what matters
            _pynative_executor.end_empty_graph()
        raise
    _pynative_executor.end_empty_graph()


def _record_in_a_gradient(forward: Callable[[], None]) -> None:
    def beside(one: Tensor) -> Tensor:
        forward()
        return one * 1

    ms.grad(beside)(Tensor(1.0))


def wait_for_operators() -> None:
    """Block until every dispatched operator has run, and what they no longer need is released."""
    _pynative_executor.sync()


class _Depth(threading.local):
    value = 0
    begun = 0
    makes_empty_graphs = True
    weights: Any = None
    flag = False
    """The grad flag as it was before the forward whose backward comes next: MindSpore turns it off in between."""


_depth = _Depth()


def gradient_depth() -> int:
    """How many gradient calls this thread is inside of: tells a gradient inside a region from the one around it."""
    return _depth.value


def gradients_begun() -> int:
    """How many gradient calls this thread has begun so far: tells whether code takes gradients."""
    return _depth.begun


def gradient_weights() -> tuple[Any, ...]:
    """The parameters that the backward which runs now takes the gradient of; empty if it takes none, or is unknown."""
    weights = _depth.weights
    return tuple(weights) if isinstance(weights, (tuple, list)) else () if weights is None else (weights,)


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of MindSpore's gradient entries: count the depth, and leave the grad flag as it was after a failure.

    MindSpore 2.9 and 2.10 leave the flag on: later inference records graphs and calls hooks. Only an exception that
    leaves the gradient call as a whole is treated; one that the user's forward catches itself is none of our business.
    """
    is_backward = run.__name__ == "_pynative_func_grad_backward"

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        flag, cells, weights = _pynative_executor.grad_flag(), len(_cell_precision.stack), _depth.weights
        if not _depth.value and not is_backward:
            _depth.makes_empty_graphs = True
        _depth.value += 1
        _depth.begun += 1
        if is_backward:
            _depth.weights, flag, _depth.flag = args[2], flag or _depth.flag, False
        try:
            result = run(*args, **kwargs)
            if not is_backward:
                _depth.flag = flag
            return result
        except BaseException:
            if not flag or _depth.value == 1:  # else it would take the recording of a gradient around this one
                with contextlib.suppress(RuntimeError):  # an operator that failed on the device is raised here again
                    _pynative_executor.clear_res()
                del _cell_precision.stack[cells:]  # a cell that fails doesn't take its precision back; this does
            _pynative_executor.set_grad_flag(flag)
            raise
        finally:
            _depth.value -= 1
            _depth.weights = weights

    guarded._hp_guarded = True  # type: ignore[attr-defined]
    return guarded


_GRADIENT_ENTRIES = (
    ("mindspore.ops.composite.base", "_pynative_forward_run"),
    ("mindspore.ops.composite.base", "_pynative_func_grad_backward"),
    ("mindspore.ops.function.grad.grad_func", "_pynative_func_grad_forward"),
    ("mindspore.ops.function.grad.grad_func", "_pynative_func_grad_backward"),
)
"""The halves of every PyNative gradient call: `grad`, `value_and_grad`, `GradOperation` (two), `vjp` (last two)."""


def guard_gradient_calls() -> None:
    """Install the guard on every PyNative gradient call; doing so again changes nothing."""
    _follow_cell_precision()
    for module_name, name in _GRADIENT_ENTRIES:
        module = import_module(module_name)
        run = getattr(module, name)
        if not hasattr(run, "_hp_guarded"):
            setattr(module, name, _guarded(run))
