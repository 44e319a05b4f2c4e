"""`activation_policy`: a policy for a Cell class or a Cell, as a decorator."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mindspore import nn

from hyper_parallel.core.activation_memory.attach import attach, decorate_class
from hyper_parallel.core.activation_memory.operator_policy import Operators, one_operator_policy
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.errors import PolicyTypeError

Target = TypeVar("Target")


def activation_policy(
    policy: CheckpointPolicy | None = None,
    *,
    swap_inputs: bool = False,
    determinism_check: str = "operators",
    ops: Operators | None = None,
    policy_fn: Callable[..., CheckpointPolicy] | None = None,
    allow_cache_entry_mutation: bool = False,
    keep_collectives: bool = False,
) -> Callable[[Target], Target]:
    """Say what happens to the activations of a Cell class (every instance, subclasses too) or of one Cell.

    The target comes back as the same object. The region begins after the cell's own pre-hooks and ends before its
    post-hooks.

    Args:
        policy: What happens. With `ops`, `policy_fn` or `swap_inputs` it must replay, and is MUST_RECOMPUTE if it isn't
            given.
        swap_inputs: With a policy that replays: keep the region's inputs on host meanwhile.
        determinism_check: What a replay compares with its forward: ``"operators"`` (names, order, plain arguments,
            shapes and dtypes of the results) or ``"values"`` (checksums of the results, too: every operator waits for
            its result, so that this is for finding a fault, not for training).
        ops: Policies of the operators inside, by their names in the catalogue (``MatMul`` is every matrix product) or
            as MindSpore dispatches them; ``"*"`` is the rest, which is replayed by default. A list names those that
            are kept. The results of kept operators wait for the replay, those of swapped ones on host.
        policy_fn: Instead of `ops`, a function ``policy_fn(ctx, op, *args)`` that is asked for every operator, after
            it ran in the forward and before it in the replay (``ctx.is_recompute``); ``op`` has ``name``,
            ``dispatch_name``, ``cell`` and ``outputs``. It must answer the same in both phases.
        allow_cache_entry_mutation: Let results that are kept be written before the replay reads them.
        keep_collectives: Keep what collectives (AllReduce, AllGather, ...) give, so that the replay communicates
            nothing.

    Returns:
        A function that puts the policy on its argument, and returns it.

    Raises:
        PolicyError: `policy` is no CheckpointPolicy, or the target is neither a Cell class nor a Cell (these two are
            TypeErrors, too), the target carries a policy that contradicts, an operator is unknown or can't be
            honoured, or `swap_inputs` or `determinism_check` has nothing to act on.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from hyper_parallel import CheckpointPolicy, activation_policy
        >>> @activation_policy(CheckpointPolicy.MUST_RECOMPUTE)
        ... class Block(nn.Cell):
        ...     def construct(self, x):
        ...         return ops.tanh(x)
        >>> head = nn.Dense(4, 4)
        >>> activation_policy(CheckpointPolicy.MUST_SWAP)(head) is head
        True
        >>> mlp = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4))
        >>> mlp = activation_policy(ops={"MatMul": CheckpointPolicy.MUST_SAVE})(mlp)
    """
    operators = one_operator_policy(ops, policy_fn, "activation_policy")
    if policy is None and (operators is not None or swap_inputs is True or keep_collectives is True):
        policy = CheckpointPolicy.MUST_RECOMPUTE
    spec = RegionSpec(
        cast(CheckpointPolicy, policy),
        swap_inputs=swap_inputs,
        determinism_check=determinism_check,
        operators=operators,
        allow_cache_entry_mutation=allow_cache_entry_mutation,
        keep_collectives=keep_collectives,
    )

    def put(target: Any) -> Any:
        if isinstance(target, type) and issubclass(target, nn.Cell):
            decorate_class(target, spec)
        elif isinstance(target, nn.Cell):
            attach(target, spec)
        else:
            raise PolicyTypeError(
                f"activation_policy goes on a Cell class or a Cell, but got {target!r} of type "
                f"{type(target).__name__}; for a function use checkpoint_wrapper or swap_wrapper"
            )
        return target

    return put
