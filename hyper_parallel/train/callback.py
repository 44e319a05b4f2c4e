"""`PolicyCallback`: puts a net under a policy file when `Model.train` begins."""

import os
from collections.abc import Callable
from typing import Any
from weakref import ref

from mindspore import nn
from mindspore.train import Callback, RunContext

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file import PolicyPlan, apply_policy, load_policy

Source = str | os.PathLike[str] | dict[str, Any] | PolicyPlan

_SHARDED = "HSDPModule"
"""The class that a cell derives from once its parameters are sharded."""


class PolicyCallback(Callback):
    """Puts the net that is trained under a policy file, before its first step.

    The file is read and checked at once, so that its mistakes show before anything is built. When training begins, the
    plan is applied to the net that `Model` was given, and printed by rank 0. It stays applied when training ends: what
    is checkpointed or trained later is under the same policies, until `callback.plan.remove()`.

    Args:
        policy: Path of a policy file, the same content as a dict, or a plan from `load_policy`.
        stage: Which stage of the pipeline the net is, from 0, for a file with `stages`.
        cell: Dotted path of the cell that the file is about, where it isn't the whole net: of a net that computes its
            loss itself, for example ``"backbone"``.
        mode: How the net runs, as `apply_policy` takes it: ``"graph"`` where Python code compiles it by `ms.jit`; in
            GRAPH_MODE that is found out.
        format: What the file is written in: ``"native"`` or ``"mindformers"``.
        say: Gets the description of the plan, on rank 0.
        **options: With format ``"mindformers"``: what the configuration leaves open, such as `layers`.

    Raises:
        TypeError: An argument is of another type.
        PolicyError: The file can't be read or has mistakes. When training begins: the plan can't be applied, or it is
            too late for it.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore.dataset as ds
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from hyper_parallel.train import PolicyCallback
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 1))
        >>> model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
        >>> numbers = np.ones((4, 4), np.float32), np.ones((4, 1), np.float32)
        >>> data = ds.NumpySlicesDataset(numbers, ["x", "y"], shuffle=False).batch(2)
        >>> policy = {"version": 1, "rules": [{"cells": "0", "policy": "must_recompute"}]}
        >>> callback = PolicyCallback(policy)
        >>> model.train(1, data, callbacks=[callback], dataset_sink_mode=False)
        dict: applied to SequentialCell, 1 of 3 cells decided
        path  cell   policy          why     keeps
        0     Dense  must_recompute  rule 1  inputs on device; 1 cell replayed
        >>> callback.plan.applied
        True
        >>> callback.plan.remove()
    """

    def __init__(
        self,
        policy: Source,
        *,
        stage: int | None = None,
        cell: str = "",
        mode: str | None = None,
        format: str = "native",
        say: Callable[[str], Any] = print,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(policy, PolicyPlan):
            if format != "native" or options:
                raise TypeError("format and options are for reading a file; a plan from load_policy is read already")
            self._policy = policy
        else:
            self._policy = load_policy(policy, format=format, **options)
        self._stage = stage
        self._cell = cell
        self._mode = mode
        self._say = say
        self._net: Callable[[], nn.Cell | None] = lambda: None
        self.plan: PolicyPlan | None = None
        """The applied plan; None before training begins."""

    def begin(self, run_context: RunContext) -> None:
        """Apply the plan (`on_train_begin` calls this); nothing to do if it is applied to the same net already.

        Args:
            run_context: What `Model.train` gives to every callback.

        Raises:
            PolicyError: The plan can't be applied, or it is too late for it.
        """
        self.apply_to(run_context.original_args().network)

    def step_begin(self, run_context: RunContext) -> None:
        """Refuse a step whose beginning of training this callback hasn't seen.

        Args:
            run_context: What `Model.train` gives to every callback.

        Raises:
            PolicyError: The plan isn't applied.
        """
        self.require_applied()

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Do nothing: evaluation keeps nothing for backward.

        Args:
            run_context: What `Model.eval` gives to every callback.
        """

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Do nothing.

        Args:
            run_context: What `Model.eval` gives to every callback.
        """

    def apply_to(self, net: nn.Cell) -> PolicyPlan:
        """Apply the plan to a net, or to the cell in it that the file is about.

        Args:
            net: The net.

        Returns:
            The applied plan.

        Raises:
            PolicyError: The plan can't be applied, or it is too late for it.
        """
        if self.plan is not None and self.plan.applied:
            if self._net() is not net:
                raise PolicyError(
                    f"the plan from {self.plan.source} is applied to another net than the one that is trained now; "
                    f"make a PolicyCallback for each net, or call plan.remove() first"
                )
            return self.plan
        self.plan, self._net = self._applied(net, self._stage), ref(net)
        return self.plan

    def _applied(self, net: nn.Cell, stage: int | None) -> PolicyPlan:
        cell = _below(net, self._cell)
        _refuse_late(cell, self._policy.source)
        plan = apply_policy(cell, self._policy, stage=stage, mode=self._mode)
        if is_rank_0():
            self._say(plan.describe())
        return plan

    def require_applied(self) -> None:
        """Refuse to go on without the plan.

        Raises:
            PolicyError: The plan was never applied, or was removed.
        """
        if self.plan is None:
            raise PolicyError(
                f"a step begins, but the plan from {self._policy.source} isn't applied: on_train_begin of this "
                f"callback was never called, and now it is too late; give the callback to Model.train, or call "
                f"apply_policy(net, ...) before the first step"
            )


def is_rank_0() -> bool:
    """Whether this process is the first of a distributed job, or alone; launchers set RANK_ID."""
    return os.environ.get("RANK_ID", "0") in ("", "0")


def _below(net: nn.Cell, path: str) -> nn.Cell:
    cells = dict(net.cells_and_names()) if path else {"": net}
    if path not in cells:
        tops = ", ".join(name for name in cells if name and "." not in name)
        raise PolicyError(f"cell={path!r}: {type(net).__name__} has no such cell; it has {tops or 'none'}")
    return cells[path]


def _refuse_late(net: nn.Cell, source: str) -> None:
    for path, cell in net.cells_and_names():
        where = path or type(net).__name__
        if cell.compile_cache:
            raise PolicyError(
                f"{where} was compiled in graph mode already, so it is too late for the plan from {source}: the "
                f"graph would go on without it; apply the policy to a net that hasn't run"
            )
        if any(base.__name__ == _SHARDED for base in type(cell).__mro__):
            raise PolicyError(
                f"{where} is sharded already (fully_shard), so it is too late for the plan from {source}: policies "
                f"come before sharding; call apply_policy(net, ...) there, or write them as MindFormers' settings "
                f"(hyper-parallel convert --to mindformers), which it applies in that order"
            )
