"""`Regions`: the cells that are decided, how they lie in each other, and what each keeps, in words."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mindspore import nn

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.policy_file.cells import Node
from hyper_parallel.policy_file.sizes import size_in_words
from hyper_parallel.policy_file.tensors import TensorSelection


class Decision(NamedTuple):
    """What was decided about one cell."""

    node: Node
    spec: RegionSpec
    why: str
    """Who decided."""
    attach: bool
    """Whether the plan puts the spec on the cell; a decorator has done so already."""
    preset: tuple[str, ...] = ()
    """Names of the presets that its rule has."""
    rules: tuple[str, ...] = ()
    """The rules that decided, as plans name them."""


class Regions:
    """The decided cells of a net.

    Args:
        decisions: What was decided, in the order of the net.
        nodes_of: The nodes of every cell, by its id.
    """

    def __init__(self, decisions: Sequence[Decision], nodes_of: dict[int, list[Node]]) -> None:
        self.decisions = decisions
        self.nodes_of = nodes_of
        self._of_cell = {id(decision.node.cell): decision for decision in decisions}

    def of(self, node: Node) -> Decision | None:
        """The decision about a cell, if there is one."""
        return self._of_cell.get(id(node.cell))

    def around(self, node: Node) -> Decision | None:
        """The decision about the nearest cell above that has one: the region in which this one runs."""
        return next((found for above in node.above() if (found := self.of(above)) is not None), None)

    def keeps(self, decision: Decision, settings: SwapSettings) -> str:
        """Say what a decided cell keeps between forward and backward."""
        node, spec = decision.node, decision.spec
        host = f"on host ({settings.tier} tier)"
        outer = self.around(node)
        within = outer.spec.policy if outer is not None else CheckpointPolicy.PREFER_SAVE
        once = "; runs once" if within.replays else ""
        if spec.policy.replays:
            count = len({id(cell) for cell in self._replayed(node)})
            if outer is not None and within.replays:
                inputs = f"inputs replayed with {place(outer.node)}"
            else:
                inputs = f"inputs {host if spec.swap_inputs or within.swaps else 'on device'}"
            checked = ", values compared" if spec.determinism_check == "values" else ""
            return f"{inputs}; {count} cell{'s' if count > 1 else ''} replayed{checked}{_besides(decision)}"
        if spec.policy.swaps:
            size = f" >= {size_in_words(settings.min_bytes)}" if settings.min_bytes else ""
            selection = _tensors(spec) or f"saved tensors{size}"
            return f"{'output and ' if once else ''}{selection} {host}{once}"
        return f"everything{', and its output' if once else ''}{once}"

    def _replayed(self, node: Node) -> Iterator[nn.Cell]:
        """Walk the cells that a replay of this one runs: not those that a saving or swapping policy lets run once."""
        if node.runs:
            yield node.cell
        for child in node.children:
            decision = self.of(child)
            if decision is None or decision.spec.policy.replays:
                yield from self._replayed(child)


def place(node: Node) -> str:
    """The path of a cell, for a sentence."""
    return node.path or "the net"


def _besides(decision: Decision) -> str:
    spec = decision.spec
    by_name = [name for name in decision.preset if name not in ("full", "inputs_on_host")]
    if spec.operators is not None:
        operators = f"; operators: {f'preset {by_name[0]}' if by_name else spec.operators}"
    else:
        operators = ""
    tensors = f"; on host go {_tensors(spec)}" if _tensors(spec) else ""
    return operators + ("; collectives kept" if spec.keep_collectives else "") + tensors


def _tensors(spec: RegionSpec) -> str:
    selection = spec.tensor_policy
    if not isinstance(selection, TensorSelection):
        return ""
    size = f" >= {size_in_words(selection.min_bytes)}" if selection.min_bytes else ""
    return f"saved tensors{size}{' of ' + ' or '.join(selection.dtypes) if selection.dtypes else ''}"
