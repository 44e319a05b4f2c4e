"""`OperatorChoice`: what happens to an operator's results in one invocation of a replayed region."""

import warnings
from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.activation_memory.operator_policy import (
    FORWARD,
    REPLAY,
    WHY_NOT_KEPT,
    Operator,
    OperatorPolicy,
    Phase,
    makes_a_tensor,
)
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy, no_policy
from hyper_parallel.core.errors import PolicyError, PolicyOverruledWarning, PolicyTypeError, ReplayMismatchError
from ms_ops.dispatch import why_not_repeated

_reported: set[tuple[str, str, CheckpointPolicy]] = set()


class OperatorChoice:
    """What the policy of operators says, and what becomes of it.

    Args:
        policy: What the user said; None: every operator is replayed.
        to_host: Takes a tensor to host; gives what stands for it.
        leave_alone: Called with a tensor that must not go there.
    """

    __slots__ = ("leave_alone", "policy", "ran", "to_host")

    def __init__(
        self,
        policy: OperatorPolicy | None,
        to_host: Callable[[Tensor], Any],
        leave_alone: Callable[[Tensor], None] = lambda tensor: None,
    ) -> None:
        self.policy = policy
        self.to_host = to_host
        self.leave_alone = leave_alone
        self.ran: dict[str, bool] | None = None
        """Dispatch names of what has run in the forward, and whether it should go to host; if somebody wants to know.
        """

    def ask(
        self, path: str, name: str, result: Any, cells: Any, args: tuple, runs_once: bool
    ) -> tuple[CheckpointPolicy, CheckpointPolicy]:
        """What is said of an operator that has run in the forward, and what is done.

        Args:
            path: The region.
            name: The operator's dispatch name.
            result: What it gave.
            cells: The cells of the region with their paths.
            args: The operator's own arguments.
            runs_once: The replay reads its result, whatever is said.
        """
        assert self.policy is not None
        said = _said(self.policy, path, FORWARD, name, result, cells, args)
        if self.ran is not None:
            self.ran[name] = said.swaps or self.ran.get(name, False)
        if runs_once and said.replays:
            if said is CheckpointPolicy.MUST_RECOMPUTE and self.policy.names(name):
                _report(path, name, said, f"it {why_not_repeated(name) or 'writes a parameter'}: its result is kept")
            return said, CheckpointPolicy.MUST_SAVE
        if not said.replays and not makes_a_tensor(name):
            if self.policy.names(name):
                _report(path, name, said, f"it {WHY_NOT_KEPT}: the replay runs it again")
            return said, CheckpointPolicy.PREFER_RECOMPUTE
        return said, said

    def ask_again(self, path: str, name: str, answer: Any, cells: Any, args: tuple) -> None:
        """A replay is about to run an operator: a function is asked again, and must answer as it did.

        Args:
            path: The region.
            name: The operator's dispatch name.
            answer: What was said in the forward, and shapes and dtypes of what the operator gave; None: nothing.
            cells: The cells of the region with their paths.
            args: The operator's own arguments.
        """
        if self.policy is None or answer is None:
            return
        answered, outputs = answer
        said = _said(self.policy, path, REPLAY, name, outputs, cells, args)
        if said is not answered:
            raise ReplayMismatchError(
                f"{path}: policy_fn answers {said.name} for {Operator(name, outputs, cells)!r} in the replay, but "
                f"answered {answered.name} in the forward; it must answer the same in both phases for the same operator"
            )


def _said(
    policy: OperatorPolicy, path: str, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple
) -> CheckpointPolicy:
    try:
        said = policy.decide(phase, name, outputs, cells, args)
    except Exception as error:  # whatever the user's function raises
        raise PolicyError(
            f"{path}: policy_fn raised {type(error).__name__}: {error}, asked about "
            f"{Operator(name, outputs, cells)!r} in the {phase}"
        ) from error
    if not isinstance(said, CheckpointPolicy):
        raise PolicyTypeError(
            f"{path}: policy_fn must answer a CheckpointPolicy, but about {Operator(name, outputs, cells)!r} in the "
            f"{phase} it answered {no_policy(said)}"
        )
    return said


def _report(path: str, name: str, said: CheckpointPolicy, why: str) -> None:
    key = path, name, said
    if key not in _reported:
        _reported.add(key)
        warnings.warn(f"{path}: {said.name} for {name} is overruled, since {why}", PolicyOverruledWarning, stacklevel=3)
