"""`checkpoint`, `checkpoint_wrapper`, `swap`, `swap_wrapper`: policies for a call, a Cell or a function."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from mindspore import nn

from hyper_parallel.core.activation_memory import region
from hyper_parallel.core.activation_memory.attach import attach
from hyper_parallel.core.activation_memory.operator_policy import Operators, one_operator_policy
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import EXCLUDED, RegionSpec
from hyper_parallel.core.errors import PolicyOverruledWarning

_CHECKPOINT_KEYWORDS = frozenset(
    {
        "swap_inputs",
        "policy_fn",
        "context_fn",
        "group_swap",
        "early_stop",
        "determinism_check",
        "ops",
        "allow_cache_entry_mutation",
        "keep_collectives",
    }
)
_SWAP_KEYWORDS = frozenset({"policy_fn", "group_swap"})


class PolicyCallable:
    """A function, Primitive or bound method under a policy: callable, copyable, no Cell.

    Args:
        function: What is called.
        spec: The policy.
    """

    def __init__(self, function: Callable[..., Any], spec: RegionSpec) -> None:
        self._function = function
        self._spec = spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return region.run(self._spec, _name_of(self._function), self._function, self._function, args, kwargs)

    @property
    def unwrap_cell(self) -> Callable[..., Any]:
        """What is called."""
        return self._function

    def __repr__(self) -> str:
        return f"PolicyCallable({self._function!r}, {self._spec})"


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Callable[..., Any] | None = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    group_swap: bool = False,
    early_stop: bool = True,
    determinism_check: str = "operators",
    ops: Operators | None = None,
    allow_cache_entry_mutation: bool = False,
    keep_collectives: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function` as a replayed region: only its inputs wait for backward, the rest is computed again.

    Args:
        function: A function, bound method, Primitive or Cell.
        *args: Its positional arguments.
        swap_inputs: Keep the tensor inputs on host meanwhile.
        policy_fn: Asked for every operator, ``policy_fn(ctx, op, *args)``; a list of operators or a table is taken,
            too. See `activation_policy`.
        context_fn: Called once per call; gives the context manager of the forward and that of the replay.
        group_swap: Accepted for compatibility: what is swapped always travels in groups.
        early_stop: Let the replay leave out the operators after the last one that backward needs (it computes nothing
            for them and gives tensors of the right shape); False runs every operator again.
        determinism_check: ``"operators"``, or ``"values"`` to compare checksums of results, too; see
            `activation_policy`.
        ops: Policies of operators by name; see `activation_policy`.
        allow_cache_entry_mutation: Let results that are kept be written before the replay reads them.
        keep_collectives: Keep what collectives give; see `activation_policy`.
        **kwargs: Keyword arguments of `function`.

    Returns:
        What `function` returns.

    Raises:
        TypeError: `function` can't be called.
        ValueError: `function` has a parameter named like one of ours; bind it with `functools.partial`.
        PolicyError: An operator is unknown or can't be honoured, or `determinism_check` is neither of the two.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import ops
        >>> from hyper_parallel import checkpoint
        >>> x = ms.Tensor([0.0, 0.0])
        >>> print(ms.grad(lambda x: checkpoint(ops.tanh, x).sum())(x))
        [1. 1.]
    """
    spec = _checkpoint_spec(
        "checkpoint",
        swap_inputs=swap_inputs,
        policy_fn=policy_fn,
        context_fn=context_fn,
        determinism_check=determinism_check,
        early_stop=early_stop,
        ops=ops,
        allow_cache_entry_mutation=allow_cache_entry_mutation,
        keep_collectives=keep_collectives,
    )
    _check_keywords(function, _CHECKPOINT_KEYWORDS, "checkpoint")
    return region.run(spec, _name_of(function), function, function, args, kwargs)


def checkpoint_wrapper(module: Any, **checkpoint_kwargs: Any) -> Any:
    """Put MUST_RECOMPUTE on a Cell (the same object comes back) or wrap a function.

    Args:
        module: A Cell, function, bound method or Primitive.
        **checkpoint_kwargs: `swap_inputs`, `context_fn`, `policy_fn`, `ops`, `group_swap`, `early_stop`,
            `determinism_check`, `allow_cache_entry_mutation` and `keep_collectives`, as `checkpoint` takes them, and
            `output_recompute`, which MindFormers gives for communication operators: what the operator saves is
            recomputed, but not its output for those who save that; a warning says so, once.

    Returns:
        The Cell itself, or a callable.

    Raises:
        TypeError: `module` is neither a Cell nor callable, or a keyword is unknown.
        PolicyError: The cell carries a policy that contradicts, or a keyword asks for what this version can't do.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import checkpoint_wrapper
        >>> layer = nn.Dense(4, 4)
        >>> checkpoint_wrapper(layer) is layer
        True
    """
    given = dict(checkpoint_kwargs)
    unknown = set(given) - _CHECKPOINT_KEYWORDS - {"output_recompute"}
    if unknown:
        raise TypeError(
            f"checkpoint_wrapper got the unknown keywords {sorted(unknown)}; it knows "
            f"{sorted(_CHECKPOINT_KEYWORDS | {'output_recompute'})}"
        )
    if given.pop("output_recompute", False):
        warnings.warn(
            "checkpoint_wrapper: output_recompute=True recomputes what the operator itself saves; its output stays "
            "with the operators that save it. Put these into the region, too, where that is too much",
            PolicyOverruledWarning,
            stacklevel=2,
        )
    given.pop("group_swap", None)
    spec = _checkpoint_spec("checkpoint_wrapper", **given)
    return _wrap(module, spec)


def checkpoint_exclude_wrapper(module: Any, *, save_output: bool = True) -> Any:
    """Let a Cell or function inside a replayed region run once: the replay reads its output.

    The Cell gets MUST_SAVE (the same object comes back), and stays excluded if `checkpoint_wrapper` gets it afterwards,
    as one of many that a pattern names. Gradients reach its parameters and inputs as always.

    Args:
        module: A Cell, function, bound method or Primitive.
        save_output: Keep the output whatever follows. False keeps it only if the replay needs it: not where no
            operator that backward needs comes after the call.

    Returns:
        The Cell itself, or a callable.

    Raises:
        TypeError: `module` is neither a Cell nor callable, or `save_output` is no bool.
        PolicyError: The cell carries a policy that contradicts.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import checkpoint_exclude_wrapper
        >>> layer = nn.Dense(4, 4)
        >>> checkpoint_exclude_wrapper(layer) is layer
        True
    """
    return _wrap(module, RegionSpec(CheckpointPolicy.MUST_SAVE, save_output=save_output, source=EXCLUDED))


def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: Callable[[Any], CheckpointPolicy] | None = None,
    group_swap: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function` as a swapped region: what it saves for backward waits on host.

    Args:
        function: A function, bound method, Primitive or Cell.
        *args: Its positional arguments.
        policy_fn: Asked once for every saved tensor, when the call ends: MUST_SWAP, or MUST_SAVE to leave it.
        group_swap: Accepted for compatibility: what is swapped always travels in groups.
        **kwargs: Keyword arguments of `function`.

    Returns:
        What `function` returns.

    Raises:
        TypeError: `function` can't be called.
        ValueError: `function` has a parameter named like one of ours; bind it with `functools.partial`.
        HostMemoryError: The host budget or the disk is exhausted.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import ops
        >>> from hyper_parallel import swap
        >>> x = ms.Tensor([0.0, 0.0])
        >>> print(ms.grad(lambda x: swap(ops.tanh, x).sum())(x))
        [1. 1.]
    """
    spec = RegionSpec(CheckpointPolicy.MUST_SWAP, tensor_policy=policy_fn, source="swap")
    _check_keywords(function, _SWAP_KEYWORDS, "swap")
    return region.run(spec, _name_of(function), function, function, args, kwargs)


def swap_wrapper(
    module: Any, policy_fn: Callable[[Any], CheckpointPolicy] | None = None, group_swap: bool = False
) -> Any:
    """Put MUST_SWAP on a Cell (the same object comes back) or wrap a function.

    Args:
        module: A Cell, function, bound method or Primitive. A Cell that is replayed already gets its inputs swapped.
        policy_fn: Asked once for every saved tensor, when the cell ends: MUST_SWAP, or MUST_SAVE to leave it.
        group_swap: Accepted for compatibility: what is swapped always travels in groups.

    Returns:
        The Cell itself, or a callable.

    Raises:
        TypeError: `module` is neither a Cell nor callable.
        PolicyError: The cell carries a policy that contradicts.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import swap_wrapper
        >>> layer = nn.Dense(4, 4)
        >>> swap_wrapper(layer) is layer
        True
    """
    return _wrap(module, RegionSpec(CheckpointPolicy.MUST_SWAP, tensor_policy=policy_fn, source="swap_wrapper"))


def not_replayed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have a hook, or another function that is called inside a replayed region, run in the forward only.

    Hooks of cells inside a region run again in its replay, since some of them communicate or change what flows. One
    that must act once (it counts, logs, or reduces over ranks) is registered as ``not_replayed(hook)``: the replay
    reads what it gave in the forward.

    Args:
        hook: The hook, as it would be registered.

    Returns:
        What to register instead.

    Raises:
        TypeError: `hook` can't be called.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from hyper_parallel import checkpoint, not_replayed
        >>> seen = []
        >>> act = nn.Tanh()
        >>> handle = act.register_forward_hook(not_replayed(lambda cell, inputs, output: seen.append("forward")))
        >>> print(ms.grad(lambda x: checkpoint(lambda x: act(x) ** 2, x).sum())(ms.Tensor([0.0])))
        [0.]
        >>> seen
        ['forward']
    """
    if not callable(hook):
        raise TypeError(f"not_replayed takes a function, but got {hook!r} of type {type(hook).__name__}")
    return PolicyCallable(hook, RegionSpec(CheckpointPolicy.MUST_SAVE, source="not_replayed"))


def _checkpoint_spec(
    who: str, context_fn: Any = None, policy_fn: Any = None, ops: Any = None, **options: Any
) -> RegionSpec:
    if context_fn is not None and not callable(context_fn):
        raise TypeError(f"{who}: context_fn must be callable and give two context managers, but got {context_fn!r}")
    return RegionSpec(
        CheckpointPolicy.MUST_RECOMPUTE,
        context_fn=context_fn,
        operators=one_operator_policy(ops, policy_fn, who),
        source=who,
        **options,
    )


def _wrap(module: Any, spec: RegionSpec) -> Any:
    if isinstance(module, nn.Cell):
        attach(module, spec)
        return module
    if isinstance(module, type) or not callable(module):
        raise TypeError(
            f"{spec.source} takes a Cell, function, bound method or Primitive, but got {module!r} of type "
            f"{type(module).__name__}; for a Cell class use activation_policy"
        )
    return PolicyCallable(module, spec)


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _check_keywords(function: Any, ours: frozenset[str], who: str) -> None:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{who} calls a function or Cell, but got {function!r} of type {type(function).__name__}")
    plain = function.construct if isinstance(function, nn.Cell) else function
    clash = _parameters_of(plain) & ours
    if clash:
        raise ValueError(
            f"{who}: {_name_of(function)} has parameters named like {who}'s own, {sorted(clash)}, which would never "
            f"reach it; bind them first: {who}(functools.partial(function, {min(clash)}=...), ...)"
        )


def _parameters_of(function: Callable[..., Any]) -> set[str]:
    bound = function.keywords if isinstance(function, functools.partial) else {}
    try:
        return set(inspect.signature(function).parameters) - set(bound)
    except (TypeError, ValueError):  # built in
        return set()
