"""`load_policy`, `apply_policy` and the `PolicyPlan` they give: the way from a policy file to policies on cells."""

import os
from collections.abc import Callable
from typing import Any
from weakref import ref

import yaml
from mindspore import nn

from hyper_parallel.core.activation_memory.swap_manager import SwapManager
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.applied import name_of, require_free
from hyper_parallel.policy_file.applying import Done, attach_policies, flag_net
from hyper_parallel.policy_file.describe import resolution_as_text, rules_as_text
from hyper_parallel.policy_file.loading import Source, read_policy_file
from hyper_parallel.policy_file.mindformers.conversion import convert_mindformers
from hyper_parallel.policy_file.mode import GRAPH, decided
from hyper_parallel.policy_file.notes import ladder_notes
from hyper_parallel.policy_file.resolve import PlanRow, Resolution, resolve


class PolicyPlan:
    """A validated policy file and, once it is applied, what it does to a net.

    `load_policy` gives a plan that belongs to no net yet; `apply_policy` gives one that is applied to a net.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import apply_policy
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 1))
        >>> plan = apply_policy(net, {"version": 1, "rules": [{"cells": "0", "policy": "must_recompute"}]})
        >>> print(plan.describe())
        dict: applied to SequentialCell, 1 of 3 cells decided
        path  cell   policy          why     keeps
        0     Dense  must_recompute  rule 1  inputs on device; 1 cell replayed
        >>> plan.remove()
        >>> plan.applied
        False
    """

    def __init__(self, source: Source, stage: int | None = None) -> None:
        self._source = source
        self._stage = stage
        self._net_name = ""
        self._resolution: Resolution | None = None
        self._done: Done | None = None
        self._mode = ""
        self._net: Callable[[], nn.Cell | None] = lambda: None

    @property
    def source(self) -> str:
        """The path of the file as it was given, or ``dict``."""
        return self._source.origin

    @property
    def applied(self) -> bool:
        """Whether a net is under this plan now."""
        return self._done is not None

    @property
    def mode(self) -> str:
        """How the net runs: ``pynative``, or ``graph`` if it is compiled; empty before the plan is applied."""
        return self._mode

    @property
    def rows(self) -> list[PlanRow]:
        """One row per cell that a rule, the default or a decorator decides; empty before the plan is applied."""
        return list(self._resolution.rows) if self._resolution else []

    @property
    def notes(self) -> list[str]:
        """What a reader should know besides: overruled rules, exemptions; empty before the plan is applied.

        While it is applied also what regions did instead of swapping, since the host was exhausted, until
        `SwapManager().reset()`.
        """
        if self._resolution is None:
            return []
        ladder = ladder_notes(self._resolution.rows, SwapManager().regions()) if self.applied else []
        return self._resolution.notes + ladder

    @property
    def stage(self) -> int | None:
        """The stage of the pipeline that the plan is for; None if none was given."""
        return self._stage

    def resolve(self, net: nn.Cell) -> list[PlanRow]:
        """Work out what the plan would do to a net, and attach nothing.

        Args:
            net: The net.

        Returns:
            One row per cell that a rule, the default or a decorator decides.

        Raises:
            TypeError: `net` is no Cell.
            PolicyError: A rule matches no cell, or contradicts a decorator or another path of a shared cell.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from mindspore import nn
            >>> from hyper_parallel import load_policy
            >>> plan = load_policy({"version": 1, "rules": [{"cells": "*", "policy": "must_save"}]})
            >>> [row.path for row in plan.resolve(nn.SequentialCell(nn.Dense(2, 2), nn.ReLU()))]
            ['0', '1']
        """
        return self.resolution_for(net).rows

    def describe(self, net: nn.Cell | None = None) -> str:
        """Say what the plan does, as plain text.

        Args:
            net: Work the plan out for this net first, without attaching anything. By default the net that the plan
                is applied to; before it is applied, the text lists the rules.

        Returns:
            One line per cell (path, class, policy, who decided, what it keeps), then notes.

        Raises:
            TypeError: `net` is no Cell.
            PolicyError: The plan can't be worked out for `net`.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from hyper_parallel import load_policy
            >>> print(load_policy({"version": 1, "rules": [{"cells": "**.mlp", "policy": "must_swap"}]}).describe())
            dict: not applied to a net
            rule 1   **.mlp          must_swap
            default  any other cell  prefer_save
        """
        resolution = self._resolution if net is None else self.resolution_for(net)
        if resolution is None:
            return "\n".join([f"{self.source}: not applied to a net", *rules_as_text(self._source)])
        if net is not None:
            state = f"worked out for {name_of(net)}"
        else:
            state = f"{'applied to' if self.applied else 'removed from'} {self._net_name}"
            state += " in graph mode" if self._mode == GRAPH else ""
            resolution = resolution._replace(notes=self.notes)
        counts = f"{len(resolution.rows)} of {resolution.cell_count} cells decided"
        stage = f" (stage {self._stage})" if self._stage is not None else ""
        return "\n".join([f"{self.source}{stage}: {state}, {counts}", *resolution_as_text(resolution)])

    def to_yaml(self) -> str:
        """Write the policy as a file: what was included is part of it, keys that weren't given aren't in it.

        Returns:
            YAML text in the native format; `load_policy` reads it as the same policy.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from hyper_parallel import CheckpointPolicy, load_policy
            >>> rule = {"cells": "layers.*", "policy": CheckpointPolicy.MUST_SWAP}
            >>> print(load_policy({"version": 1, "rules": [rule]}).to_yaml())
            version: 1
            rules:
            - cells: layers.*
              policy: must_swap
            <BLANKLINE>
        """
        return yaml.safe_dump(self.to_plain_values(), sort_keys=False, allow_unicode=True)

    def to_plain_values(self) -> dict[str, Any]:
        """The same as `to_yaml`, as what JSON can write.

        Returns:
            A dict that `load_policy` reads as the same policy.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from hyper_parallel import load_policy
            >>> load_policy({"version": 1, "default": "Must_Swap"}).to_plain_values()
            {'version': 1, 'default': 'must_swap'}
        """
        return self._source.file.as_plain_values()

    def remove(self) -> None:
        """Give every cell back what it carried before, and undo the plan's swap settings.

        Raises:
            PolicyError: The plan isn't applied; or the net was compiled with its flags, which the graph keeps.
            SwapStateError: Tensors are swapped right now, so the swap settings can't change. Nothing is removed.

        Supported Platforms:
            ``CPU``

        Examples:
            >>> from mindspore import nn
            >>> from hyper_parallel import apply_policy
            >>> plan = apply_policy(nn.Dense(2, 2), {"version": 1})
            >>> plan.remove()
            >>> plan.remove()
            Traceback (most recent call last):
            ...
            hyper_parallel.core.errors.PolicyError: the plan from dict isn't applied, so there is nothing to remove
        """
        if self._done is None:
            raise PolicyError(f"the plan from {self.source} isn't applied, so there is nothing to remove")
        self._done.take_back()
        self._done = None

    def __repr__(self) -> str:
        return f"<PolicyPlan from {self.source}, {f'applied to {self._net_name}' if self.applied else 'not applied'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PolicyPlan":
        # A net may hold its plan as an attribute; the copy of that net isn't under the plan's control.
        return PolicyPlan(self._source, self._stage)

    def is_for(self, net: nn.Cell) -> bool:
        """Whether the plan was applied to this net, not only to a net that holds it, or a part of it."""
        return self._net() is net

    def resolution_for(self, net: nn.Cell) -> Resolution:
        """What the plan means for a net, with what was decided about each cell."""
        _require_cell(net)
        return resolve(self._source, net, self.swap_settings(), self._stage)

    def swap_settings(self) -> SwapSettings:
        """The swap settings that are in force while the plan is applied."""
        return SwapManager().settings.model_copy(update=self._source.file.swap.model_dump(exclude_unset=True))

    def _apply(self, net: nn.Cell, mode: str | None) -> None:
        require_free(net)
        decided_mode = decided(self._source, mode)
        resolution = self.resolution_for(net)
        if decided_mode == GRAPH:
            done = flag_net(self, self._source, net, resolution, self.swap_settings())
        else:
            done = attach_policies(self, self._source, net, resolution)
        self._done = done
        self._mode = decided_mode
        self._net, self._net_name = ref(net), name_of(net)
        # without cells: see [Which net is under which plan]
        self._resolution = resolution._replace(notes=resolution.notes + done.notes).without_cells()


def load_policy(
    source: str | os.PathLike[str] | dict[str, Any],
    *,
    format: str = "native",
    stage: int | None = None,
    stages: int | None = None,
    **options: Any,
) -> PolicyPlan:
    """Read and validate a policy file.

    Args:
        source: Path of a YAML file in the native format, or the same content as a dict, in which policies may also be
            CheckpointPolicy members.
        format: What the source is written in: ``"native"``, or ``"mindformers"`` for a MindFormers configuration with
            `recompute_config`, `swap_config`, or PyNative `recompute` and `swap`.
        stage: Which stage of the pipeline the net is, from 0, for a file with `stages`. `apply_policy` takes it, too.
        stages: How many stages the pipeline has: a native file with another number of `stages` is refused; None: not
            checked. With format ``"mindformers"`` it says how many to convert for.
        **options: With format ``"mindformers"``: what the configuration leaves open, such as `layers` and `offset`; see
            `hyper_parallel.policy_file.mindformers.convert_mindformers`.

    Returns:
        A plan that belongs to no net yet. It can be applied to any number of nets.

    Raises:
        TypeError: The source is neither a path nor a dict.
        PolicyError: The file can't be read, or has mistakes: all of them, each with its place, the value and what was
            expected (also one by one, in the error's `problems`). Or the file has no such stage, or the format is
            unknown.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel import load_policy
        >>> load_policy({"version": 1, "rules": [{"cells": "layers.*", "policy": "must_recompute"}]})
        <PolicyPlan from dict, not applied>
        >>> load_policy({"version": 1, "swap": {"window": "32MX"}})
        Traceback (most recent call last):
        ...
        hyper_parallel.core.errors.PolicyError: dict: swap, window: got '32MX', unknown unit 'MX', \
expected a whole number of bytes or a string like '32MiB'
    """
    reader = _READERS.get(format)
    if reader is None:
        raise PolicyError(f"format: got {format!r}, expected {' or '.join(map(repr, _READERS))}")
    if format == "native":
        if options:
            raise TypeError(f"{', '.join(options)}: options are for format='mindformers'; a native file says it all")
        read = reader(source)
        read.check_stages(stages)
    else:
        read = reader(source, **({} if stages is None else {"stages": stages}), **options)
    if stage is not None:
        read.rules(stage)
    return PolicyPlan(read, stage)


def apply_policy(
    net: nn.Cell,
    source: str | os.PathLike[str] | dict[str, Any] | PolicyPlan,
    *,
    stage: int | None = None,
    stages: int | None = None,
    mode: str | None = None,
) -> PolicyPlan:
    """Put a net under a policy file, before its first step.

    Either all of the plan is applied, or an error is raised and the net is as it was. The net and its cells stay the
    same objects. A deepcopy of the net trains its own weights under the same policies, but it has no plan to remove.

    Args:
        net: The net. Its cells are named by their dotted paths, as `net.cells_and_names()` gives them.
        source: Path of a YAML file, the same content as a dict, or a plan from `load_policy`.
        stage: Which stage of the pipeline the net is, from 0. A file with `stages` needs it, here or in `load_policy`;
            to another one it makes no difference.
        stages: How many stages the pipeline has: a file with another number of `stages` is refused. None: not checked.
        mode: How the net will run: ``"pynative"``; ``"graph"``, compiled in GRAPH_MODE or by `ms.jit`, where policies
            become flags that MindSpore's compiler reads; or ``"auto"``, which is graph if MindSpore is in graph mode
            now, else pynative. By default what the file says, which is auto if it says nothing. `plan.mode` tells.

    Returns:
        The applied plan. That is a new one, but for a plan that was applied and removed: it is applied again.

    Raises:
        TypeError: `net` is no Cell, or the source is of another type.
        PolicyError: The file has mistakes, a rule matches no cell, two policies for one cell contradict each other,
            the swap settings contradict what `SwapManager` was told, the net (or a cell in it) is under a plan
            already, the file has stages and no such one is given, the mode isn't MindSpore's; or, in graph mode, the
            net was compiled already or a policy can't be honoured.
        SwapStateError: Tensors are swapped right now, so the swap settings can't change.
        HostMemoryError: The spill folder can't be written.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from hyper_parallel import CheckpointPolicy, apply_policy
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 1))
        >>> rule = {"cells": "[0-1]", "policy": CheckpointPolicy.MUST_RECOMPUTE, "swap_inputs": True}
        >>> plan = apply_policy(net, {"version": 1, "rules": [rule]})
        >>> [row.policy_text for row in plan.rows]
        ['must_recompute + swapped inputs', 'must_recompute + swapped inputs']
        >>> plan.remove()
    """
    _require_cell(net)
    if not isinstance(source, PolicyPlan):
        plan = load_policy(source, stage=stage, stages=stages)
    elif source.applied:
        raise PolicyError(
            f"the plan from {source.source} is applied to {source._net_name} already; call its remove() first"
        )
    elif stage is not None and source.stage not in (None, stage):
        raise PolicyError(
            f"the plan from {source.source} was loaded for stage {source.stage}, but is applied to {stage}"
        )
    else:
        source._source.check_stages(stages)
        is_new = source._resolution is None or source.stage != (stage if stage is not None else source.stage)
        plan = PolicyPlan(source._source, source.stage if stage is None else stage) if is_new else source
    plan._apply(net, mode)
    return plan


def _read_mindformers(source: Any, **options: Any) -> Source:
    done = convert_mindformers(source, **options)
    origin = source if isinstance(source, str) else done.source
    return read_policy_file(done.policy)._replace(name=done.source, origin=origin)


_READERS: dict[str, Callable[..., Source]] = {"native": read_policy_file, "mindformers": _read_mindformers}
"""What reads a source, by the name of its format."""


def _require_cell(net: object) -> None:
    if not isinstance(net, nn.Cell):
        what = f"the class {net.__name__}; make an instance" if isinstance(net, type) else type(net).__name__
        raise TypeError(f"a policy is applied to a mindspore.nn.Cell, but got {what}")
