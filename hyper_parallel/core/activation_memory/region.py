"""Running the body of a region under its policy: the one place where the policies differ."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_memory.benefit import check_operators, check_swap, is_first_swap
from hyper_parallel.core.activation_memory.effects import Effects
from hyper_parallel.core.activation_memory.operator_choice import OperatorChoice
from hyper_parallel.core.activation_memory.operator_log import OperatorLog
from hyper_parallel.core.activation_memory.operator_policy import KeepsCollectives
from hyper_parallel.core.activation_memory.replay import Invocation, offer_inputs
from hyper_parallel.core.activation_memory.replay_scopes import Recording, Repeated
from hyper_parallel.core.activation_memory.scopes import Scope, current, entered, open_scopes, unseen
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.activation_memory.swap_group import HostSide, SwapScope
from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.core.activation_memory.tape import Tape
from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.core.errors import PolicyError
from ms_ops.autograd import recording

Body = Callable[..., Any]


def run(spec: RegionSpec, path: str, owner: Any, body: Body, args: tuple, kwargs: dict) -> Any:
    """Run `body(*args, **kwargs)` as a region under `spec`.

    Args:
        spec: What the user said.
        path: Names the region in messages and statistics.
        owner: The cell or callable whose code runs: what it can reach is put back for a replay.
        body: What runs.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What `body` gives.
    """
    if not recording():
        return body(*args, **kwargs)
    scope = current()
    if (scope.records or scope.replays) and scope.inside_a_gradient:
        # a replay takes the gradient again: it needs all of the graph, which an output read from a tape doesn't have
        return body(*args, **kwargs)
    if scope.replays:
        return _again(scope, path, body, args, kwargs)
    if spec.policy.saves:
        return _saved(scope, spec, path, body, args, kwargs)
    manager = SwapManager()
    manager.region_begins(path)
    choice = manager.choose(spec, path)
    if choice.policy.saves:
        return _saved(scope, spec, path, body, args, kwargs)
    if choice.policy.swaps:
        return _swapped(scope, spec, path, owner, body, args, kwargs)
    return _replayed(scope, choice, path, owner, body, args, kwargs)


def _again(scope: Any, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    """A region inside the replay of an enclosing one: what ran once is read, a nested region gives its output again."""
    if scope.reader.upcoming != f"region {path}":  # the record decides: the ladder may have overruled the policy
        with unseen():
            output, effects = scope.reader.cell(path)
            effects.apply(scope.after)
        return output
    offer_inputs(scope.offer, args, kwargs)
    repeated = Repeated(scope.reader.nested(path), path, scope)
    with entered(repeated):
        output = body(*args, **kwargs)
    repeated.finish()
    return output


def _saved(scope: Any, spec: RegionSpec, path: str, body: Body, args: tuple, kwargs: dict) -> Any:
    if not (scope.records or isinstance(scope, SwapScope)):
        return body(*args, **kwargs)
    return _once(scope, Scope(), path, body, args, kwargs, None, perhaps=not spec.save_output)


def _swapped(scope: Any, spec: RegionSpec, path: str, owner: Any, body: Body, args: tuple, kwargs: dict) -> Any:
    if isinstance(scope, SwapScope) and spec.tensor_policy is None:
        return body(*args, **kwargs)  # what it saves goes to host with the enclosing group
    group = SwapManager().open_group(path, spec.tensor_policy, owner)
    group.is_given((*args, *kwargs.values()))
    with group:
        output = _once(scope, SwapScope(group), path, body, args, kwargs, group.add)
        group.passes(output)
    if is_first_swap(path):
        check_swap(path, spec.source, "it", group.why_nothing_left())
    return output


def _once(
    scope: Any, inner: Scope, path: str, body: Body, args: tuple, kwargs: dict, to_host: Any, perhaps: bool = False
) -> Any:
    """Run a cell that runs once; for an enclosing region that is recorded, note what its replay must know."""
    if not scope.records:
        with entered(inner):
            return body(*args, **kwargs)
    before = leaves((args, kwargs))
    around = [each.invocation for each in open_scopes() if isinstance(each, Recording)]
    effects = Effects([each.state for each in around], scope.invocation.provided)
    with entered(inner):
        output = body(*args, **kwargs)
    after = leaves((args, kwargs))
    if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True)):
        raise PolicyError(
            f"{path} runs once inside a region that is replayed, but changes a list or dict that it is called with, "
            f"which the replay would not see; give it MUST_RECOMPUTE, too, or let it return what is new"
        )
    with unseen():
        effects.seal(inner.written_parameters.values())
        scope.tape.write_cell(path, output, to_host, effects, perhaps)
    return output


def _replayed(scope: Any, spec: RegionSpec, path: str, owner: Any, body: Body, args: tuple, kwargs: dict) -> Any:
    contexts = _contexts_of(spec, path)
    log = OperatorLog(values=spec.determinism_check == "values", all_needed=not spec.early_stop)
    may_be_written = spec.allow_cache_entry_mutation
    tape = scope.tape.nested(path, log, may_be_written) if scope.records else Tape(log, may_be_written)
    given = (*args, *kwargs.values())
    with contextlib.ExitStack() as groups:
        host = HostSide(lambda: SwapManager().open_group(path, spec.tensor_policy, owner), groups, given)
        policy = spec.operators.for_call() if spec.operators is not None else None
        to_host = functools.partial(host.add, may_be_written=may_be_written)
        policy = KeepsCollectives(policy) if spec.keep_collectives else policy
        operators = OperatorChoice(policy, to_host, host.leave_alone)
        invocation = Invocation(owner, body, path, tape, contexts, operators)
        takes_inputs = spec.swap_inputs and not (scope.records or isinstance(scope, SwapScope))
        is_first = (takes_inputs or spec.operators is not None) and is_first_swap(path)
        operators.ran = {} if is_first and spec.operators is not None else None
        if scope.records or isinstance(scope, SwapScope):
            output = invocation.forward(args, kwargs, scope.offer)
        else:
            output = invocation.forward(args, kwargs, host.add if spec.swap_inputs else None)
        group = host.group
    if is_first:
        _check_benefit(spec, path, takes_inputs, operators, group)
    return output


def _check_benefit(spec: RegionSpec, path: str, takes_inputs: bool, operators: OperatorChoice, group: Any) -> None:
    """Warn if nothing comes of what the region should swap, or of what its operators should do."""
    asked = ["its inputs"] if takes_inputs else []
    ran = operators.ran
    if ran is not None:
        assert spec.operators is not None
        check_operators(path, spec.source, spec.operators.without_effect(ran.keys()), spec.operators)
        asked += [f"results of {' and '.join(sorted(name for name, goes in ran.items() if goes))}"] * any(ran.values())
    if asked:
        check_swap(path, spec.source, " and ".join(asked), group.why_nothing_left() if group is not None else {})


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
