"""Who writes into a tensor behind autograd's back, and who reads values on host.

Version counters don't tell: on the CPU backend `_version` is not bumped by `x[...] = v`, `set_data`, `ops.assign` or an
optimizer, and by `copy_` only once the queue has run. So the Python entries of those writers are wrapped here, once; an
observer hears of a write before it happens. A numpy array over a tensor's bytes can be written unheard: the observer
hears when one is given out. Seen in MindSpore 2.9.0 and 2.10.0.
"""

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.graph.api import _pynative_executor
from mindspore.ops import auto_generate as _auto_generate
from mindspore.ops import primitive as _primitive

from ms_ops.dispatch import IN_PLACE_COLLECTIVES, NO_ANSWER, filled_by_collective, is_intercepted
from ms_ops.host_values import site_of


class Observer(Protocol):
    """Hears of writes and host reads; all of it is called on the thread that writes or reads."""

    @property
    def active(self) -> bool:
        """Whether it wants to hear; asked before every call."""

    def writes(self, tensor: Tensor, how: str, rebinds: bool) -> None:
        """`tensor` is about to be written; `rebinds`: the object gets a new storage, the old one stays as it is."""

    def exposes(self, tensor: Tensor, array: np.ndarray) -> None:
        """`array` lies over the bytes of `tensor`."""

    def reads(self) -> None:
        """A value is read on host."""

    def recalls(self, site: Any) -> Any:
        """What the instruction `site` is to read instead of a small value on host; NO_ANSWER: what is there."""

    def remembers(self, site: Any, value: Any) -> None:
        """The instruction `site` has read a small value on host."""


_WRITING_METHODS = (
    "copy_",
    "add_",
    "addmm_",
    "bernoulli_",
    "clamp_",
    "div_",
    "erfinv_",
    "exp_",
    "exponential_",
    "fill_",
    "fill_diagonal_",
    "floor_",
    "floor_divide_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "log_",
    "masked_fill_",
    "masked_scatter_",
    "mul_",
    "normal_",
    "put_",
    "random_",
    "remainder_",
    "scatter_",
    "scatter_add_",
    "set_",
    "sigmoid_",
    "sign_",
    "sub_",
    "tanh_",
    "uniform_",
    "zero_",
    "assign_value",
)
"""Methods of `Tensor` that write into it; those a version doesn't have are left out."""

_SMALL_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
"""Methods of `Tensor` that give Python numbers, or lists of them."""

_READING_METHODS = (*_SMALL_READS, "__str__", "__repr__", "get_bytes")
"""Methods of `Tensor` that bring values to host, besides `asnumpy`."""

_WRITING_FIRST = ("Assign", "Inplace", "Scatter")
"""Old primitives whose name begins so write into their first argument."""

_WRITING_ALL = ("Apply", "SparseApply", "Fused", "Adam", "Momentum", "SGD")
"""Old primitives whose name begins so write into those of their arguments that are parameters."""

_OPTIMIZERS = (("mindspore.nn.optim.optimizer", "Optimizer"), ("mindspore.experimental.optim.optimizer", "Optimizer"))
"""Their step is compiled, so that no primitive is seen."""

_observer: Any = None


def observe(observer: Observer) -> None:
    """Let `observer` hear of writes and host reads from now on; the wrappers are installed once."""
    global _observer
    _observer = observer
    if hasattr(Tensor.asnumpy, "_hp_observed"):
        return
    Tensor.__setitem__ = _writing(Tensor.__setitem__, "x[...] = v", rebinds=_item_assignment_rebinds)
    for name in _WRITING_METHODS:
        if hasattr(Tensor, name):
            setattr(Tensor, name, _writing(getattr(Tensor, name), f"Tensor.{name}"))
    data: Any = Tensor.data
    assign = _writing(lambda tensor, value: data.__set__(tensor, value), "x.data = v", rebinds=lambda tensor: True)
    Tensor.data = property(data.__get__, assign, doc=data.__doc__)
    Parameter.set_data = _writing(Parameter.set_data, "Parameter.set_data", rebinds=lambda tensor: True)
    for name in _READING_METHODS:
        setattr(Tensor, name, _reading(getattr(Tensor, name), name in _SMALL_READS))
    Tensor.asnumpy = _exposing(Tensor.asnumpy)
    Tensor.from_numpy = staticmethod(_wrapping(Tensor.from_numpy))
    for module, name in _OPTIMIZERS:
        optimizer = getattr(import_module(module), name)
        optimizer.__call__ = _stepping(optimizer.__call__)
    _primitive._run_op = _running(_primitive._run_op)
    for name in IN_PLACE_COLLECTIVES:
        collective: Any = getattr(_auto_generate.gen_ops_prim, name, None)
        if collective is not None:
            collective.__call__ = _communicating(collective.__call__, name)


def _item_assignment_rebinds(tensor: Tensor) -> bool:
    """While a gradient is recorded, `x[...] = v` gives a tracked tensor a new storage (2.9, 2.10).

    It also does for others, but not for every view of them: those count as written in place.
    """
    return tensor._requires_grad and not isinstance(tensor, Parameter) and _pynative_executor.grad_flag()


class _Inside(threading.local):
    """Writers call one another: only the outermost is heard."""

    write = False


_inside = _Inside()


def _writing(write: Any, how: str, rebinds: Callable[[Tensor], bool] = lambda tensor: False) -> Any:
    @functools.wraps(write)
    def observed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not _observer.active or _inside.write or not isinstance(tensor, Tensor):
            return write(tensor, *args, **kwargs)
        _observer.writes(tensor, how, rebinds(tensor))
        _inside.write = True
        try:
            return write(tensor, *args, **kwargs)
        finally:
            _inside.write = False

    return observed


def _reading(read: Any, is_small: bool) -> Any:
    @functools.wraps(read)
    def observed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not _observer.active:
            return read(tensor, *args, **kwargs)
        site = site_of(sys._getframe(1)) if is_small and is_intercepted() else None
        if site is not None and (recalled := _observer.recalls(site)) is not NO_ANSWER:
            return copy.deepcopy(recalled)
        _observer.reads()
        value = read(tensor, *args, **kwargs)
        if site is not None:
            _observer.remembers(site, copy.deepcopy(value))
        return value

    return observed


def _exposing(read: Any) -> Any:
    @functools.wraps(read)
    def observed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        array = read(tensor, *args, **kwargs)
        _exposed(tensor, array)
        if _observer.active:
            _observer.reads()
        return array

    observed._hp_observed = True  # type: ignore[attr-defined]
    return observed


def _wrapping(make: Any) -> Any:
    @functools.wraps(make)
    def observed(array: np.ndarray) -> Tensor:
        tensor = make(array)
        _exposed(tensor, array)
        return tensor

    return observed


def _stepping(step: Any) -> Any:
    @functools.wraps(step)
    def observed(optimizer: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        if _observer.active:
            for parameter in optimizer.parameters:
                _observer.writes(parameter, f"a step of {type(optimizer).__name__}", False)
        return step(optimizer, *args, **kwargs)

    return observed


def _running(run: Any) -> Any:
    @functools.wraps(run)
    def observed(primitive: Any, name: str, args: tuple) -> Any:
        if _observer.active and not _inside.write and name.startswith((*_WRITING_FIRST, *_WRITING_ALL)):
            for argument in args[:1] if name.startswith(_WRITING_FIRST) else args:
                if isinstance(argument, Parameter):
                    _observer.writes(argument, f"operator {name}", False)
        return run(primitive, name, args)

    return observed


def _communicating(run: Any, name: str) -> Any:
    @functools.wraps(run)
    def observed(primitive: Any, *args: Any, **kwargs: Any) -> Any:
        if _observer.active and not _inside.write:
            for tensor in filled_by_collective(name, args):
                _observer.writes(tensor, f"operator {name}", False)
        return run(primitive, *args, **kwargs)

    return observed


# ---- arrays over a tensor's bytes

_arrays: dict[int, tuple[Any, Any]] = {}
"""By the id of a tensor object: weak references to it and to the array that was given out last."""


def _exposed(tensor: Tensor, array: np.ndarray) -> None:
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        return
    key = id(tensor)
    _arrays[key] = (weakref.ref(tensor, lambda _: _arrays.pop(key, None)), weakref.ref(array))
    if _observer.active:
        _observer.exposes(tensor, array)


def is_exposed(tensor: Tensor) -> bool:
    """Whether somebody still holds the array that was given out last for this tensor object."""
    tensor_ref, array_ref = _arrays.get(id(tensor), (None, None))
    return tensor_ref is not None and tensor_ref() is tensor and array_ref() is not None
