"""What a plan does to the bytes that backward needs: estimated from one forward of the plain net.

Note: [Where a saved tensor counts]
The forward runs without any policy, and hooks note each tensor that autograd saves, with the decided cells whose
construct runs. The innermost of them decides: under a saving policy the tensor is kept, under MUST_SWAP it goes to host
if it is large enough, in a replayed region it is replayed. To this come the inputs of replayed regions, the results of
operators that are kept or swapped there, and the outputs of cells that run once. A storage counts once, however many
tensors share it: as kept if anybody keeps it, else as on host, else as replayed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.operator_policy import (
    FORWARD,
    KeepsCollectives,
    OperatorPolicy,
    makes_a_tensor,
)
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.scopes import Kept
from hyper_parallel.core.activation_memory.spec import SPEC, RegionSpec, spec_of
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.trees import leaves
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.keeps import Decision, Regions
from hyper_parallel.policy_file.tensors import TensorSelection
from ms_ops.autograd import alias, is_parameter, saved_tensors_hooks, wait_for_operators
from ms_ops.catalogue import catalogue_name, dispatch_names
from ms_ops.dispatch import Interception, why_not_repeated
from ms_ops.tensors import storage_of

KEPT, HOST, REPLAYED = "kept", "on host", "replayed"
_STRONGEST = (KEPT, HOST, REPLAYED)


@dataclass(frozen=True)
class Bytes:
    """What becomes of the bytes that backward needs."""

    kept: int = 0
    """They stay on the device."""
    host: int = 0
    """They wait on host."""
    replayed: int = 0
    """They are computed again."""


@dataclass(frozen=True)
class OperatorFate:
    """What becomes of the results of one operator in one region."""

    name: str
    """The catalogue's name."""
    dispatch_name: str
    region: str
    """Path of the region in which it runs; empty outside of regions, and in one that is the whole net."""
    in_region: bool
    fate: str
    """`kept`, `on host` or `replayed`; outside of replayed regions what happens to all that is saved there."""
    calls: int
    output_bytes: int


class Measured(NamedTuple):
    """What one forward showed."""

    by_cell: dict[str, Bytes]
    """By the path of a decided cell: everything in it, nested regions included."""
    under_plan: Bytes
    """The whole net."""
    plain_bytes: int
    """What the net keeps without any policy."""
    operators: list[OperatorFate]


class _Active(NamedTuple):
    """A decided cell whose construct runs."""

    decision: Decision
    operators: OperatorPolicy | None


class _Done(Exception):
    """The forward is over; its backward isn't wanted."""


def measure_bytes(
    net: nn.Cell, inputs: tuple[Any, ...], regions: Regions, settings: SwapSettings, besides: Node | None = None
) -> Measured:
    """Run one forward of the plain net, and tell what a plan would do to what it saves.

    Args:
        net: The net; its policies, if it has some, don't act in this forward.
        inputs: What it is called with.
        regions: What the plan decides.
        settings: The swap settings that will be in force.
        besides: A cell that isn't decided, and is to be measured all the same.

    Returns:
        The bytes, by cell and in all.
    """
    watch = _Watch(regions, settings, besides)
    weights = ms.ParameterTuple(net.trainable_params())

    def forward(*args: Any) -> None:
        with watch.watching():
            net(*args)
            wait_for_operators()
        raise _Done

    with _without_policies(net), suppress(_Done):
        ms.value_and_grad(forward, None if weights else 0, weights or None)(*inputs)
    return watch.measured()


class _Watch:
    def __init__(self, regions: Regions, settings: SwapSettings, besides: Node | None) -> None:
        self._regions = regions
        self._besides = besides if besides is not None and regions.of(besides) is None else None
        self._settings = settings
        self._active: list[_Active] = []
        self._open: list[str] = []
        """Paths of the cells to measure that run now."""
        self._sizes: dict[int, int] = {}
        self._plain: set[int] = set()
        self._placed: list[tuple[int, str, tuple[str, ...]]] = []
        self._operators: dict[tuple[str, str, bool, str], list[int]] = {}
        self._alive: list[Tensor] = []  # so that no address is used again

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as undo:
            if self._besides is not None:
                cell, path = self._besides.cell, self._besides.path
                undo.callback(cell.register_forward_pre_hook(lambda *_: self._open.append(path)).remove)
                undo.callback(cell.register_forward_hook(lambda *_: self._close()).remove)
            for decision in self._regions.decisions:
                cell = decision.node.cell
                undo.callback(cell.register_forward_pre_hook(self._entering(decision), with_kwargs=True).remove)
                undo.callback(cell.register_forward_hook(self._leaving(decision)).remove)
            undo.enter_context(saved_tensors_hooks(self._saved, Kept.get))
            undo.enter_context(Interception(self._ran))
            yield

    def measured(self) -> Measured:
        everything: dict[int, str] = {}
        by_cell: dict[str, dict[int, str]] = {decision.node.path: {} for decision in self._regions.decisions}
        if self._besides is not None:
            by_cell[self._besides.path] = {}
        for storage, fate, paths in self._placed:
            for fates in [everything, *(by_cell[path] for path in paths)]:
                fates[storage] = min(fates.get(storage, REPLAYED), fate, key=_STRONGEST.index)
        operators = [
            OperatorFate(catalogue_name(name), name, region, inside, fate, calls, size)
            for (name, region, inside, fate), (calls, size) in self._operators.items()
        ]
        return Measured(
            {path: self._bytes(fates) for path, fates in by_cell.items()},
            self._bytes(everything),
            sum(self._sizes[storage] for storage in self._plain),
            operators,
        )

    def _bytes(self, fates: dict[int, str]) -> Bytes:
        sums = dict.fromkeys(_STRONGEST, 0)
        for storage, fate in fates.items():
            sums[fate] += self._sizes[storage]
        return Bytes(sums[KEPT], sums[HOST], sums[REPLAYED])

    # ---- what the forward does

    def _saved(self, tensor: Tensor) -> Any:
        if not is_parameter(tensor):
            storage = self._place(tensor, self._fate(tensor))
            self._plain.update({storage} - {0})
        return Kept(tensor)

    def _ran(self, name: str, run: Callable[..., Any], args: tuple) -> Any:
        result = run(*args)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if not dispatch_names(name) and not tensors:
            return result  # Python that MindSpore computes with
        inner = self._inner()
        if inner is None or not inner.decision.spec.policy.replays:
            fate = KEPT if inner is None or inner.decision.spec.policy.saves else HOST
        else:
            fate = self._fate_of_result(inner, name, result, args)
            for tensor in tensors:
                if fate != REPLAYED:
                    self._place(tensor, fate if fate == KEPT else self._on_host(tensor, inner.decision.spec))
        key = name, inner.decision.node.path if inner is not None else "", inner is not None, fate
        counts = self._operators.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += sum(tensor.nbytes for tensor in tensors) if makes_a_tensor(name) else 0
        return result

    def _fate_of_result(self, inner: _Active, name: str, result: Any, args: tuple) -> str:
        if why_not_repeated(name):
            return KEPT
        if inner.operators is None or not makes_a_tensor(name):
            return REPLAYED
        said = inner.operators.decide(FORWARD, name, result, (), args)
        return REPLAYED if said.replays else HOST if said.swaps else KEPT

    def _entering(self, decision: Decision) -> Callable[..., None]:
        spec = decision.spec

        def enter(cell: nn.Cell, args: tuple, kwargs: dict[str, Any]) -> None:
            outer = self._inner()
            self._open.append(decision.node.path)
            within = outer.decision.spec.policy if outer is not None else CheckpointPolicy.PREFER_SAVE
            operators = spec.operators.for_call() if spec.operators is not None else None
            self._active.append(_Active(decision, KeepsCollectives(operators) if spec.keep_collectives else operators))
            if spec.policy.replays and not within.replays:
                for tensor in leaves((args, kwargs)):
                    if isinstance(tensor, Tensor) and not is_parameter(tensor):
                        goes = spec.swap_inputs or within.swaps
                        self._place(tensor, self._on_host(tensor, spec) if goes else KEPT)

        return enter

    def _leaving(self, decision: Decision) -> Callable[..., None]:
        spec = decision.spec

        def leave(cell: nn.Cell, args: tuple, output: Any) -> None:
            self._active.pop()
            self._close()
            outer = self._inner()
            if outer is not None and outer.decision.spec.policy.replays and not spec.policy.replays:
                for tensor in leaves(output):
                    if isinstance(tensor, Tensor):
                        self._place(tensor, self._on_host(tensor, spec) if spec.policy.swaps else KEPT)

        return leave

    def _close(self) -> None:
        self._open.pop()

    # ---- where a tensor goes

    def _inner(self) -> _Active | None:
        return self._active[-1] if self._active else None

    def _fate(self, tensor: Tensor) -> str:
        inner = self._inner()
        if inner is None or inner.decision.spec.policy.saves:
            return KEPT
        if inner.decision.spec.policy.replays:
            return REPLAYED
        return self._on_host(tensor, self._group_spec())

    def _group_spec(self) -> RegionSpec:
        """The spec whose policy of tensors holds: a swapped cell in a swapped cell joins the outer one's group."""
        found = self._active[-1].decision.spec
        for active in reversed(self._active[:-1]):
            if found.tensor_policy is not None or not active.decision.spec.policy.swaps:
                break
            found = active.decision.spec
        return found

    def _on_host(self, tensor: Tensor, spec: RegionSpec) -> str:
        selection = spec.tensor_policy
        selected = not isinstance(selection, TensorSelection) or selection.selects(tensor.nbytes, tensor.dtype)
        return HOST if selected and tensor.nbytes >= max(1, self._settings.min_bytes) else KEPT

    def _place(self, tensor: Tensor, fate: str) -> int:
        storage = storage_of(tensor)
        if storage:
            self._alive.append(alias(tensor, tracked=False))
            self._sizes[storage] = max(self._sizes.get(storage, 0), tensor.nbytes)
            self._placed.append((storage, fate, tuple(self._open)))
        return storage


@contextmanager
def _without_policies(net: nn.Cell) -> Iterator[None]:
    """Let every cell of a net run as if it carried nothing."""
    with ExitStack() as undo:
        for _, cell in net.cells_and_names():
            if spec_of(cell) is not None:
                before = cell.__dict__.get(SPEC)
                object.__setattr__(cell, SPEC, RegionSpec(CheckpointPolicy.PREFER_SAVE, source="measured"))
                undo.callback(_put_back, cell, before)
        yield


def _put_back(cell: nn.Cell, spec: RegionSpec | None) -> None:
    if spec is None:
        cell.__dict__.pop(SPEC, None)
    else:
        object.__setattr__(cell, SPEC, spec)
