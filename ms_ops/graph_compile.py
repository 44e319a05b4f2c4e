"""Compiling without running, and what was compiled so far. Seen in MindSpore 2.9.0 and 2.10.0.

GRAPH_MODE cells and functions under `ms.jit` have executors of their own: asked for the other one's phase, an executor
gives a graph in which nothing is recomputed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any
from weakref import ref

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore._c_expression import JitExecutor_, RuntimeConf, dump_func_graph
from mindspore.graph import api
from mindspore.graph.jit_config import JitConfig

JIT_LEVELS = ("O0", "O1")
"""What the CPU and Ascend back ends compile; O2 is for whole-graph sinking on Ascend, which reads other flags."""

_CAPTURES = {"staging_specialize": "ast", "_fn": "bytecode", "jit_trace_wrap": "trace"}
"""The capture modes of `ms.jit`, by the names of the functions in which it wraps another one."""

_FRONTEND_ONLY = "MS_DEV_PRECOMPILE_ONLY"


def in_graph_mode() -> bool:
    """Whether MindSpore compiles every cell that is called."""
    return ms.get_context("mode") == ms.GRAPH_MODE


def device_target() -> str:
    """What MindSpore compiles for: CPU, Ascend or GPU."""
    return str(ms.get_context("device_target"))


def is_launch_blocking() -> bool:
    """Whether every operator is waited for when it is launched (`mindspore.runtime.launch_blocking`)."""
    return bool(RuntimeConf.get_instance().is_launch_blocking())


def plans_memory_ahead() -> bool:
    """Whether the memory of a graph is planned before it runs (`mindspore.runtime.set_memory`, optimize level O1)."""
    return ms.get_context("memory_optimize_level") != 0


def is_compiling() -> bool:
    """Whether this is called, from however far, by the compilation of a graph."""
    compiles = (api._JitExecutor.compile.__code__, api._CellGraphExecutor.compile.__code__)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in compiles:
            return True
        frame = frame.f_back
    return False


def is_compiled_by_jit(function: Any) -> bool:
    """Whether a function is one that `ms.jit` gave."""
    return hasattr(function, "__wrapped_by_jit__") or getattr(function, "__name__", "") == "staging_specialize"


def capture_mode(function: Any) -> str | None:
    """How a function that `ms.jit` gave becomes a graph.

    Args:
        function: A function; what wraps it is looked through.

    Returns:
        ``"ast"``, ``"bytecode"`` or ``"trace"``; None if `ms.jit` didn't give it.
    """
    while function is not None:
        mode = _CAPTURES.get(getattr(getattr(function, "__code__", None), "co_name", ""))
        if mode is not None and is_compiled_by_jit(function):
            return mode
        function = getattr(function, "__wrapped__", None)
    return None


def is_inlined_late(cell: nn.Cell) -> bool:
    """Whether the cell's class is under `mindspore.lazy_inline`."""
    return str(vars(cell).get("_cell_init_args", "")).startswith("lazy_inline_")


def set_apart(cell: nn.Cell, mark: str) -> Callable[[], None]:
    """Let a cell under `lazy_inline` not share its graph with cells that were made alike but have other flags.

    Args:
        cell: The cell.
        mark: What tells it from others.

    Returns:
        What takes the mark back.
    """
    before, weak = vars(cell)["_cell_init_args"], ref(cell)
    vars(cell)["_cell_init_args"] = before + mark

    def undo() -> None:
        alive = weak()
        if alive is not None:
            vars(alive)["_cell_init_args"] = before

    return undo


def compiled_parameter(parameters: Iterable[Parameter]) -> Parameter | None:
    """One of the parameters that a graph compiled so far has, of a cell or of a function under `ms.jit`.

    Args:
        parameters: The parameters.

    Returns:
        The first that is found; None if no graph has any.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    executor = api._cell_graph_executor._graph_executor
    cells = [(executor, phase) for phases in list(api.cells_compile_cache.values()) for phase in list(phases or ())]
    functions = [(JitExecutor_.get_instance(), phase) for phase in list(api.ms_compile_cache)]
    for executor, phase in cells + functions:
        if executor.has_compiled(phase):
            for parameter in executor.get_params(phase).values():
                if id(parameter) in wanted:
                    return wanted[id(parameter)]
    return None


def graph_of_cell(cell: nn.Cell, inputs: tuple, jit_level: str | None) -> str:
    """Compile a cell as GRAPH_MODE does, up to the back end, and forget it.

    Args:
        cell: The cell.
        inputs: What it would be called with.
        jit_level: One of `JIT_LEVELS`; None for the cell's own.

    Returns:
        The graph as text.
    """
    before = set(cell.compile_cache)
    config = cell._jit_config_dict
    if jit_level is not None:
        cell._jit_config_dict = {**(config or {}), **JitConfig(jit_level=jit_level).jit_config_dict}
    try:
        with _frontend_only():
            cell.compile(*inputs)
        executor = api._cell_graph_executor._graph_executor
        return dump_func_graph(executor.get_func_graph(cell.compile_phase))
    finally:
        cell._jit_config_dict = config
        new = set(cell.compile_cache) - before
        for phase in new:
            cell.compile_cache.discard(phase)
        for name, phase in list(cell.phase_cache.items()):
            if phase in new:
                del cell.phase_cache[name]
        if new:
            api._cell_graph_executor.del_net_res(cell, new)


def graph_of_function(function: Callable[..., Any], inputs: tuple, jit_level: str | None) -> str:
    """Compile a function as `ms.jit` does, up to the back end, and forget it.

    Args:
        function: A function, or what `ms.jit` gave.
        inputs: What it would be called with.
        jit_level: One of `JIT_LEVELS`; None for MindSpore's default.

    Returns:
        The graph as text.
    """
    plain = getattr(function, "__wrapped__", function)
    owner = getattr(plain, "__self__", None) or getattr(function, "__self__", None)
    plain = getattr(plain, "__func__", plain)
    config = JitConfig(**({} if jit_level is None else {"jit_level": jit_level}))
    with _frontend_only():
        return _graph_of(plain, owner, inputs, config)


def _graph_of(function: Callable[..., Any], owner: Any, inputs: tuple, config: JitConfig) -> str:
    before = set(api.ms_compile_cache)
    executor = api._JitExecutor(function, int(time.time() * 1e9), None, owner, config)
    try:
        phase = executor.compile(function.__name__, *inputs)
        return dump_func_graph(JitExecutor_.get_instance().get_func_graph(phase))
    finally:
        new = set(api.ms_compile_cache) - before
        api.ms_compile_cache.difference_update(new)
        if new:
            JitExecutor_.get_instance().del_net_res(None, new)


def _nothing(x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def _frontend_only() -> Iterator[None]:
    # os.unsetenv, which MindSpore's own helper calls, leaves the variable in os.environ: every later call of a jit
    # function would then compile and run nothing
    before = os.environ.get(_FRONTEND_ONLY)
    os.environ[_FRONTEND_ONLY] = "1"
    try:
        yield
    finally:
        # after a graph under lazy_inline MindSpore's CPU back end would refuse whatever runs next
        _graph_of(_nothing, None, (Tensor(0),), JitConfig())
        if before is None:
            del os.environ[_FRONTEND_ONLY]
        else:
            os.environ[_FRONTEND_ONLY] = before


def hear_of_compilations(listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call `listener(what)` before a cell or a function is compiled; never for one whose graph is there already.

    Args:
        listener: What is called.

    Returns:
        What ends it.
    """
    check: Any = api._check_recompile  # both executors call it where they have found no graph to reuse

    def _check_recompile(obj: Any, *args: Any) -> None:
        # the cell that is given for a function is the one it is a method of
        executor = sys._getframe(1).f_locals.get("self")
        listener(executor.fn if isinstance(executor, api._JitExecutor) and obj is None else obj)
        check(obj, *args)

    api._check_recompile = _check_recompile

    def undo() -> None:
        if api._check_recompile is _check_recompile:
            api._check_recompile = check

    return undo
