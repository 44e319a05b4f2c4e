"""Random small nets as plain data: what a layer may be, what a policy may be, and the net that a description means.

A description prints as the expression that makes it, so that a failing one can be pasted into a test.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from hyper_parallel import (
    CheckpointPolicy,
    activation_policy,
    apply_policy,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)
from hyper_parallel.core.activation_memory.operator_policy import makes_a_tensor
from tests.exactness.grammar_containers import CONTAINERS, Call, Caller, straight
from tests.exactness.grammar_leaves import (
    EVERY,
    LEAVES,
    SIZE,
    TWICE_DIFFERENTIABLE,
    CountsInPython,
    HiddenState,
    Tokens,
)
from tests.helpers import (
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Record,
    flat,
    mean_square,
    numbers,
    on,
    seeded,
    settled,
    state_of,
)


def _on_its_class(cell: nn.Cell, policy: Any) -> None:
    kind: Any = type(cell)
    cell.__class__ = activation_policy(policy)(type(kind.__name__, (kind,), {}))


def by_the_letters(ctx: Any, op: Any, *args: Any) -> CheckpointPolicy:
    """Keeps, replays and swaps about a third of the operators each, by their names; asks for nothing impossible."""
    if not makes_a_tensor(op.dispatch_name):
        return PREFER_RECOMPUTE
    return (SAVE, PREFER_RECOMPUTE, SWAP)[sum(map(ord, op.dispatch_name)) % 3]


ON_CELL: dict[str, Callable[[nn.Cell], Any]] = {
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "save": lambda cell: on(cell, SAVE),
    "recompute, inputs swapped": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
    "prefer recompute": lambda cell: on(cell, PREFER_RECOMPUTE),
    "prefer save": lambda cell: on(cell, PREFER_SAVE),
    "recompute, values checked": lambda cell: on(cell, RECOMPUTE, determinism_check="values"),
    "recompute its class": lambda cell: _on_its_class(cell, RECOMPUTE),
    "swap its class": lambda cell: _on_its_class(cell, SWAP),
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper, whole replay": lambda cell: checkpoint_wrapper(cell, early_stop=False),
    "checkpoint_wrapper, inputs swapped": lambda cell: checkpoint_wrapper(cell, swap_inputs=True),
    "recompute, matrix products kept": activation_policy(ops=["MatMul"]),
    "recompute, operators swapped": activation_policy(ops={"*": SWAP}),
    "recompute, operators asked": activation_policy(policy_fn=by_the_letters),
    "prefer recompute, operators kept, inputs swapped": lambda cell: on(
        cell, PREFER_RECOMPUTE, swap_inputs=True, ops={"*": SAVE}
    ),
    "checkpoint_exclude_wrapper": checkpoint_exclude_wrapper,
    "checkpoint_exclude_wrapper, output perhaps": lambda cell: checkpoint_exclude_wrapper(cell, save_output=False),
    "swap_wrapper": swap_wrapper,
    "swap_wrapper of checkpoint_wrapper": lambda cell: swap_wrapper(checkpoint_wrapper(cell)),
    "checkpoint_wrapper of swap_wrapper": lambda cell: checkpoint_wrapper(swap_wrapper(cell)),
}
IN_FILE: dict[str, dict[str, Any]] = {
    "file: must_recompute": {"policy": "must_recompute"},
    "file: must_swap": {"policy": "must_swap"},
    "file: must_save": {"policy": "must_save"},
    "file: recompute, operators": {"ops": {"MatMul": "must_save", "Mul": "must_swap", "*": "prefer_recompute"}},
    "file: prefer_recompute, inputs swapped": {"policy": "prefer_recompute", "swap_inputs": True},
}


def _through(function: Callable[..., Any], **options: Any) -> Callable[[Call], Call]:
    return lambda call: lambda *args, **kwargs: function(call, *args, **options, **kwargs)


IN_CALL: dict[str, Callable[[Call], Call]] = {
    "checkpoint()": _through(checkpoint),
    "checkpoint(), inputs swapped": _through(checkpoint, swap_inputs=True),
    "checkpoint(), matrix products kept": _through(checkpoint, ops=["MatMul"]),
    "swap()": _through(swap),
}
POLICIES = (*ON_CELL, *IN_FILE, *IN_CALL)
REPLAYING = tuple(
    policy for policy in POLICIES if ("recompute" in policy or "checkpoint" in policy) and "exclude" not in policy
)

SETTINGS: dict[str, dict[str, Any]] = {
    "file": {},
    "host": {"tier": "host"},
    "one tensor at a time": {"window": 1, "pending": 1},
    "room for two tensors": {"tier": "host", "host_budget": 128, "when_exhausted": ["recompute", "keep"]},
}
"""How is swapped."""


class Layer:
    """A cell: its kind, the layers inside, and a policy by its name in `POLICIES`."""

    def __init__(self, kind: str, *inside: "Layer", policy: str | None = None) -> None:
        self.kind, self.inside, self.policy = kind, inside, policy

    def __repr__(self) -> str:
        policy = [] if self.policy is None else [f"policy={self.policy!r}"]
        return f"Layer({', '.join([repr(self.kind), *map(repr, self.inside), *policy])})"


@dataclass(frozen=True)
class Program:
    """A net and how it is trained."""

    net: Layer
    steps: int = 1
    inputs_gradient: bool = True
    """Take the gradient of the input, too."""
    training: bool = True
    wait: bool = False
    """Let what is swapped reach the host before backward begins."""
    forwards_before: int = 0
    """Forwards without a gradient that go before."""
    settings: str = "file"
    """How is swapped, by its name in `SETTINGS`."""


@st.composite
def layers(draw: st.DrawFn, depth: int, replayed: bool, leaves: Sequence[str] = EVERY) -> Layer:
    """A layer of some leaves with at most `depth` levels inside; `replayed` says whether a region around it is."""
    if depth == 0 or not draw(st.booleans()):
        return Layer(draw(st.sampled_from(leaves)), policy=draw(policies()))
    derived = set(leaves) <= set(TWICE_DIFFERENTIABLE)
    kind = draw(st.sampled_from([kind for kind in CONTAINERS if not (derived and kind == "gradient inside")]))
    # what a list gets in a cell that runs once would be missing in a replay around it: that is refused
    policy = draw(policies(REPLAYING if replayed and kind == "appends to a list" else POLICIES))
    some = [leaf for leaf in leaves if leaf in CONTAINERS[kind].takes]
    inside = st.lists(
        layers(depth - 1, replayed or policy in REPLAYING, some), min_size=1, max_size=CONTAINERS[kind].most
    )
    return Layer(kind, *draw(inside), policy=policy)


def policies(among: Sequence[str] = POLICIES) -> st.SearchStrategy[str | None]:
    """No policy, or one of some."""
    return st.none() | st.sampled_from(among)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A net of a few layers, four levels deep at most."""
    policy = draw(policies())
    first = [Layer("tokens", policy=draw(policies()))] if draw(st.booleans()) else []
    rest = draw(st.lists(layers(3, replayed=policy in REPLAYING), min_size=1, max_size=3))
    return Program(
        Layer("sequence", *first, *rest, policy=policy),
        steps=draw(st.integers(1, 2)),
        inputs_gradient=draw(st.booleans()),
        training=draw(st.booleans()),
        wait=draw(st.booleans()),
        forwards_before=draw(st.integers(0, 1)),
        settings=draw(st.sampled_from([*SETTINGS])),
    )


def itself(call: Call) -> Call:
    """No policy around a call."""
    return call


def built(layer: Layer, plain: bool, rules: list[tuple[nn.Cell, dict]]) -> nn.Cell:
    """The cell that a description means, without its policies if `plain`; `rules` gets those of a policy file."""
    inside = [built(each, plain, rules) for each in layer.inside]
    if layer.kind in CONTAINERS:
        container = CONTAINERS[layer.kind]
        cell, use = container.make(*inside), container.use
    else:
        cell, use = {"tokens": Tokens, **LEAVES}[layer.kind](), straight
    through = itself
    if plain or layer.policy is None:
        pass
    elif layer.policy in ON_CELL:
        ON_CELL[layer.policy](cell)
    elif layer.policy in IN_FILE:
        rules.append((cell, IN_FILE[layer.policy]))
    else:
        through = IN_CALL[layer.policy]
    return Caller(cell, use, through)


def net_of(program: Program, plain: bool) -> nn.Cell:
    """The net, its weights the same each time."""
    rules: list[tuple[nn.Cell, dict]] = []
    net = nn.SequentialCell(built(program.net, plain, rules)).set_train(program.training)
    seeded(net)
    if rules:
        path_of = {id(cell): path for path, cell in net.cells_and_names()}
        apply_policy(net, {"version": 1, "rules": [{"cells": path_of[id(cell)], **rule} for cell, rule in rules]})
    return net


def run(program: Program, plain: bool) -> Record:
    """Train the net as the program says and write everything down."""
    # before the net is built: MindSpore's random layers draw their seeds then, and again when they are called
    ms.set_seed(1)
    random.seed(1)
    net = net_of(program, plain)
    try:
        return {**_trained(net, program), **state_of(net), **_python_state(net), **_generators()}
    finally:
        for _, cell in net.cells_and_names():
            if isinstance(cell, CountsInPython):
                cell.provider.remove()


def _trained(net: nn.Cell, program: Program) -> Record:
    tokens = program.net.inside[0].kind == "tokens"
    x = Tensor([5, 0, 3, 5], ms.int32) if tokens else numbers(SIZE, SIZE)
    weights = net.trainable_params()

    def forward(x: Tensor) -> Tensor:
        loss = mean_square(net(x))
        return settled(loss) if program.wait else loss

    position = 0 if not tokens and (program.inputs_gradient or not weights) else None
    step = ms.value_and_grad(forward, position, weights or None)
    record: Record = {}
    for index in range(program.forwards_before):
        record.update(flat(net(x), f"forward {index}"))
    for index in range(program.steps):
        result = step(x)
        record.update(flat(result, f"step {index}, loss and gradients"))
        of_weights = result[1] if position is None else result[1][1] if weights else ()
        for weight, gradient in zip(weights, of_weights, strict=True):
            weight.set_data(weight - 0.1 * gradient)
        del result, of_weights
    return record


def _python_state(net: nn.Cell) -> Record:
    record: Record = {}
    for path, cell in net.cells_and_names():
        if isinstance(cell, (CountsInPython, HiddenState)):
            record[f"{path}.calls"] = np.array(cell.calls)
        if isinstance(cell, HiddenState):
            record.update(flat([cell.state, *cell.seen], f"{path}.state"))
    return record


def _generators() -> Record:
    return {
        "MindSpore's generator": ms.get_rng_state().asnumpy(),
        "numpy's generator": np.append(np.random.get_state()[1], np.random.get_state()[2]),
        "Python's generator": np.array(random.getstate()[1]),
    }
