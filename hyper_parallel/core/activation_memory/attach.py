"""Putting a policy on a cell, and taking it off again, while the cell stays itself.

Note: [How a cell is changed]
An instance's class is replaced by a subclass that overrides `construct` (and `update_parameters_name`, so that names
survive `parent.cell = cell`) and nothing else: hooks of the cell stay outside the region, names, parameters, checkpoint
keys, `isinstance` and `deepcopy` are as before, and a copy uses its own weights. What the user said is one immutable
value in the instance's `__dict__`. A decorated class keeps its identity: its own `construct` is replaced, and that of
every subclass that overrides it.
When other code has put a class of its own on top (FSDP does), ours stays below it and does nothing once the value is
gone.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mindspore import nn

from hyper_parallel.core.activation_memory import region
from hyper_parallel.core.activation_memory.spec import SPEC as _SPEC
from hyper_parallel.core.activation_memory.spec import RegionSpec, spec_of, stack
from hyper_parallel.core.errors import PolicyError, PolicyTypeError
from ms_ops.graph import compiling, probe, refuse_in_graph


def attach(cell: nn.Cell, spec: RegionSpec, must_agree: bool = False) -> RegionSpec | None:
    """Put a policy on a cell.

    Args:
        cell: The cell.
        spec: What the user said.
        must_agree: Refuse everything but what the cell carries already, if it carries anything.

    Returns:
        What the instance itself carried before; `restore()` takes it.

    Raises:
        PolicyError: The cell carries something that contradicts `spec`, or its `construct` isn't its class's.
    """
    if not isinstance(cell, nn.Cell):
        raise PolicyTypeError(f"{spec.source}: a policy goes on a Cell, but got {type(cell).__name__}: {cell!r}")
    where = spec.path or f"a {type(cell).__name__}"
    if "construct" in cell.__dict__:
        raise PolicyError(
            f"{where} has a construct of its own on the instance (for example from ms.jit), which would run past the "
            f"policy {spec} ({spec.source}); put the policy on the class, or wrap what the construct calls"
        )
    previous, old = cell.__dict__.get(_SPEC), spec_of(cell)
    if old is not None:
        new = stack(old, spec, where)
        if must_agree and new != old:
            raise PolicyError(f"{where} carries {old} ({old.source}), but {spec.source} says {spec}; they must agree")
        spec = replace(new, path=spec.path or new.path)
    _mark(cell, spec)
    if not _runs_regions(type(cell)):
        cell.__class__ = _region_class(type(cell))
    return previous


def restore(cell: nn.Cell, previous: RegionSpec | None) -> None:
    """Give a cell back what `attach()` returned."""
    if previous is not None:
        _mark(cell, previous)
        return
    cell.__dict__.pop(_SPEC, None)
    cell.__dict__.pop("_hp_where", None)
    if "_hp_base" in type(cell).__dict__:
        cell.__class__ = type(cell)._hp_base


def plain_type(cls: Any) -> Any:
    """A cell's class without the policy that an instance carries."""
    return cls.__dict__.get("_hp_base", cls)


def plain_construct(cls: Any) -> Any:
    """The `construct` of a class that a decorator has covered, as it was written; None if none has."""
    found = inspect.getattr_static(cls, "construct", None)
    plain = found
    while hasattr(plain, "_hp_region"):
        plain = plain._hp_region
    return None if plain is found else plain


def _mark(cell: nn.Cell, spec: RegionSpec) -> None:
    object.__setattr__(cell, _SPEC, spec)
    object.__setattr__(cell, "_hp_where", f"{spec.path or f'a {type(cell).__name__}'} ({spec}, {spec.source})")


def decorate_class(cls: Any, spec: RegionSpec) -> None:
    """Put a policy on every instance of a Cell class, present and future, and of its subclasses."""
    old = cls.__dict__.get("_hp_class_spec")
    cls._hp_class_spec = spec if old is None else stack(old, spec, f"class {cls.__name__}")
    cls._hp_where = f"a {cls.__name__} ({cls._hp_class_spec}, decorator on its class)"
    if old is None:
        _cover_subclasses(cls)
        for subclass in [cls, *_descendants(cls)]:
            _cover(subclass)


def _descendants(cls: Any) -> list[Any]:
    return [found for subclass in cls.__subclasses__() for found in (subclass, *_descendants(subclass))]


def _cover(cls: Any) -> None:
    """Make a class's own `construct`, if it has one, run as a region."""
    own = cls.__dict__.get("construct")
    if own is None:
        if "_hp_class_spec" in cls.__dict__:
            inherited = lambda cell: super(cls, cell).construct  # noqa: E731
            cls.construct = _region_construct(inherited, cls.construct)
    elif not hasattr(own, "_hp_region"):
        cls.construct = _region_construct(lambda cell: own.__get__(cell), own)


def _cover_subclasses(cls: Any) -> None:
    inherited = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: Any, **kwargs: Any) -> None:
        if inherited is not None:
            inherited.__func__(subclass, **kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        _cover(subclass)

    cls.__init_subclass__ = classmethod(__init_subclass__)
    if not hasattr(cls, "unwrap_cell"):
        cls.unwrap_cell = property(_itself)


def _itself(cell: nn.Cell) -> nn.Cell:
    """The cell: a policy wraps nothing around it."""
    return cell


def _renaming(plain: Callable[..., None]) -> Callable[..., None]:
    """MindSpore's `update_parameters_name`, but a parameter whose name ends in the new one already keeps it.

    `layer.mlp = checkpoint_wrapper(layer.mlp)` would make `mlp.weight` of `layers.0.mlp.weight`, in every layer.
    """

    def update_parameters_name(self: nn.Cell, prefix: str = "", recurse: bool = True) -> None:
        before = [(p, p.name, name) for name, p in self.parameters_and_names(expand=recurse)]
        plain(self, prefix, recurse)
        for parameter, full, name in before:
            if full.endswith(f".{prefix}{name}"):
                parameter.name = full

    return update_parameters_name


def _runs_regions(cls: type) -> bool:
    return hasattr(inspect.getattr_static(cls, "construct", None), "_hp_region")


def _region_class(cls: Any) -> type:
    found = cls.__dict__.get("_hp_region_class")
    if found is None:
        names = {
            "construct": _region_construct(lambda cell: cls.construct.__get__(cell), cls.construct),
            "unwrap_cell": property(_itself),
            "update_parameters_name": _renaming(cls.update_parameters_name),
            "_hp_base": cls,
            "_hp_where": f"a {cls.__name__}, whose policy was removed under another class on top of it,",
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        found = type(cls)(cls.__name__, (cls,), names)
        cls._hp_region_class = found
    return found


def _region_construct(plain_of: Callable[[Any], Callable[..., Any]], like: Any) -> Any:
    """A `construct` that runs the plain one (`plain_of(cell)`) as a region, if the cell carries a policy."""

    # MindSpore's compiler reads this function, too: no annotations, plain statements
    def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        if compiling(probe):  # @jit.cond: True
            refuse_in_graph(self._hp_where)
        return _run(self, plain_of(self), args, kwargs)

    construct._hp_region = like  # type: ignore[attr-defined]
    # not functools.wraps: with __wrapped__ the compiler would read the original's source, past the policy
    construct.__doc__, construct.__qualname__ = like.__doc__, like.__qualname__
    construct.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return construct


class _Running(threading.local):
    def __init__(self) -> None:
        self.cells: list[Any] = []


_running = _Running()


def _run(cell: Any, plain: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    spec = spec_of(cell)
    if spec is None or any(running is cell for running in _running.cells):
        # `super().construct(...)` of a decorated class, or a cell that calls itself: part of the region that runs
        return plain(*args, **kwargs)

    def body(*args: Any, **kwargs: Any) -> Any:
        _running.cells.append(cell)
        try:
            return plain(*args, **kwargs)
        finally:
            _running.cells.pop()

    return region.run(spec, spec.path or type(cell).__name__, cell, body, args, kwargs)
