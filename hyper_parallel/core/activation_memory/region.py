"""Running the body of a region under its policy: the one place where the policies differ."""

import contextlib
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_memory.replay import Invocation, Repeated, offer_inputs
from hyper_parallel.core.activation_memory.scopes import Scope, current, entered
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.activation_memory.swap_group import SwapGroup, SwapScope
from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.core.activation_memory.tape import Tape
from ms_ops.autograd import recording

Body = Callable[..., Any]


def run(spec: RegionSpec, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    """Run `body(*args, **kwargs)` as a region under `spec`; `path` names it in messages and statistics."""
    if not recording():
        return body(*args, **kwargs)
    scope = current()
    if (scope.records or scope.replays) and scope.inside_a_gradient:
        # a replay takes the gradient again: it needs all of the graph, which an output read from a tape doesn't have
        return body(*args, **kwargs)
    if scope.replays:
        return _again(scope, spec, path, body, args, kwargs)
    if spec.policy.saves:
        return _saved(scope, path, body, args, kwargs)
    manager = SwapManager()
    manager.region_begins()
    choice = manager.choose(spec, path)
    if choice.policy.saves:
        return _saved(scope, path, body, args, kwargs)
    if choice.policy.swaps:
        return _swapped(scope, spec, path, body, args, kwargs)
    return _replayed(scope, choice, path, body, args, kwargs)


def _again(scope: Any, spec: RegionSpec, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    """A region inside the replay of an enclosing one: what ran once is read, a nested region gives its output again."""
    if scope.reader.upcoming != f"region {path}":  # the record decides: the ladder may have overruled the policy
        return scope.reader.cell(path)
    offer_inputs(scope.offer, args, kwargs)
    with entered(Repeated(scope.reader.nested(path), path)):
        return body(*args, **kwargs)


def _saved(scope: Any, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    if not (scope.records or isinstance(scope, SwapScope)):
        return body(*args, **kwargs)
    with entered(Scope()):
        output = body(*args, **kwargs)
    if scope.records:
        scope.tape.write_cell(path, output)
    return output


def _swapped(scope: Any, spec: RegionSpec, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    if isinstance(scope, SwapScope) and spec.tensor_policy is None:
        return body(*args, **kwargs)  # what it saves goes to host with the enclosing group
    group = SwapManager().open_group(path, spec.tensor_policy)
    with group:
        with entered(SwapScope(group)):
            output = body(*args, **kwargs)
        if scope.records:
            scope.tape.write_cell(path, output, group.add)
    return output


def _replayed(scope: Any, spec: RegionSpec, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    contexts = _contexts_of(spec, path)
    tape = scope.tape.nested(path) if scope.records else Tape()
    invocation = Invocation(body, path, tape, contexts)
    if scope.records or isinstance(scope, SwapScope):
        return invocation.forward(args, kwargs, scope.offer)
    if not spec.swap_inputs:
        return invocation.forward(args, kwargs, None)
    group: SwapGroup = SwapManager().open_group(path)
    with group:
        return invocation.forward(args, kwargs, group.add)


def _contexts_of(spec: RegionSpec, path: str) -> tuple[Any, Any]:
    if spec.context_fn is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    contexts = spec.context_fn()
    if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
        raise TypeError(
            f"{path}: context_fn must give two context managers, for the forward and for the replay, but gave "
            f"{contexts!r}"
        )
    return contexts[0], contexts[1]
