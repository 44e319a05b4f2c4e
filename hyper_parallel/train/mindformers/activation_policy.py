"""The callback that a MindFormers configuration names.

MindFormers copies this file and imports the copy, so it imports nothing relative to itself::

    callbacks:
      - type: ActivationPolicy
        auto_register: activation_policy.ActivationPolicy
        policy: policy.yaml

with `REGISTER_PATH` set to the folder that this file is in.
"""

from typing import Any

from hyper_parallel.policy_file import PolicyPlan
from hyper_parallel.train.callback import PolicyCallback


class ActivationPolicy(PolicyCallback):
    """A `PolicyCallback` for both of MindFormers' trainers.

    The older one is built on `Model.train` and calls callbacks as it does. The PyNative trainer calls them with its
    arguments, its state, and the model as a keyword: a list with one net per interleave chunk. Of a file with
    `stages`, each net gets the entry of its own number, `stage_idx`, if no stage is given.

    Args:
        policy: Path of a policy file.
        **options: As `PolicyCallback` has them.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.train.mindformers.activation_policy import ActivationPolicy
        >>> callback = ActivationPolicy({"version": 1, "rules": [{"cells": "layers.*", "policy": "must_recompute"}]})
        >>> callback.plans
        []
    """

    def __init__(self, policy: Any, **options: Any) -> None:
        super().__init__(policy, **options)
        self.plans: list[PolicyPlan] = []
        """The applied plans of the PyNative trainer, one per net."""

    def on_train_begin(self, run_context: Any, state: Any = None, *, model: Any = None, **others: Any) -> None:
        """Apply the plan to the net, or to each of the nets.

        Args:
            run_context: What `Model.train` gives, or the PyNative trainer's arguments.
            state: The PyNative trainer's state.
            model: The PyNative trainer's nets.
            **others: What that trainer gives besides.

        Raises:
            PolicyError: The plan can't be applied, or it is too late for it.
        """
        if model is None:
            super().on_train_begin(run_context)
        elif not self.plans:
            for net in model if isinstance(model, (list, tuple)) else [model]:
                stage = self._stage if self._stage is not None else getattr(net, "stage_idx", None)
                self.plans.append(self._applied(net, stage))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Refuse a step whose beginning of training this callback hasn't seen.

        Raises:
            PolicyError: No plan is applied.
        """
        if not self.plans:
            self.require_applied()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the plan applied: nothing is removed behind the user's back."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: an event of the PyNative trainer."""

    on_begin = on_end = on_epoch_begin = on_epoch_end = on_step_end = _nothing
