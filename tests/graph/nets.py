"""Small nets that are compiled, and what a compiler should do with them, worked out from the plain net's graph."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore._c_expression import JitExecutor_, dump_func_graph
from mindspore.graph import api
from mindspore.ops import operations

from ms_ops.graph_compile import graph_of_cell, graph_of_function
from ms_ops.graph_flags import set_scope
from ms_ops.graph_ir import Node, read_graph
from scripts import bench_activation
from tests.helpers import numbers, seeded

WIDTH = 8


class Transformer(bench_activation.Net):
    """The transformer of the benchmarks: attention by functions, the rest by cells; its output is a mean square."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth, WIDTH, 2)


class Net(nn.Cell):
    """Blocks and a sum."""

    def __init__(self, *blocks: nn.Cell) -> None:
        super().__init__()
        self.blocks = nn.CellList(list(blocks))

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Mlp(nn.Cell):
    """Two matrix products around a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.tanh = nn.Dense(4, 4), nn.Dense(4, 4), operations.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.tanh(ops.sigmoid(self.up(x))))


class ConvBlock(nn.Cell):
    """Convolution, BatchNorm, ReLU, dropout, pool."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, has_bias=True), nn.BatchNorm2d(channels)
        self.act, self.drop, self.pool = nn.ReLU(), nn.Dropout(p=0.3), nn.MaxPool2d(2, 1, "same")

    def construct(self, x: Tensor) -> Tensor:
        return self.pool(self.drop(self.act(self.norm(self.conv(x)))))


class ConvNet(nn.Cell):
    """Blocks and a mean square."""

    def __init__(self, depth: int = 2, channels: int = 2) -> None:
        super().__init__()
        self.layers = nn.CellList([ConvBlock(channels) for _ in range(depth)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


TOKENS, IMAGES = numbers(2, 4, WIDTH), numbers(2, 2, 5, 5)


def transformer(depth: int = 2) -> nn.Cell:
    return seeded(Transformer(depth))


def mlp(count: int = 2) -> nn.Cell:
    return seeded(Net(*[Mlp() for _ in range(count)]))


def conv_net(depth: int = 2) -> nn.Cell:
    ms.set_seed(3)  # of the dropout
    return seeded(ConvNet(depth)).set_train()


def of(*rules: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules), **more}


FULL = of({"cells": "layers.*", "policy": "must_recompute"})
SELECTIVE = of({"cells": "layers.*", "preset": "selective"})
MIXED = of(
    {"cells": "layers.0", "policy": "must_recompute", "exclude": ["norm*", "act"]},
    {"cells": "layers.1", "ops": {"Softmax": "must_save", "MaxPool": "must_save", "*": "must_recompute"}},
)
RECOMPUTE = of({"cells": "blocks.*", "policy": "must_recompute"})
POLICIES: dict[str, dict[str, Any]] = {"full": FULL, "selective": SELECTIVE, "mixed": MIXED}

COPIES: dict[str, dict[str, tuple[int, int, int]]] = {
    "transformer": {
        "LayerNorm": (4, 4, 2),  # block 0 keeps its norms when mixed
        "MatMul": (6, 0, 6),  # the last of a block's four gives its output, with the sum behind it
        "BiasAdd": (6, 6, 6),
        "MatMulExt": (4, 0, 3),  # block 1 keeps its softmax when mixed, whose backward reads nothing else
        "Divs": (2, 2, 1),
        "Softmax": (2, 2, 1),
        "Add": (2, 2, 2),
        "GeLU": (2, 2, 1),  # block 0 keeps its own when mixed
    },
    "convolutions": {  # BatchNorm and dropout are always kept, and so is the pool, which gives a block's output
        "Conv2D": (2, 0, 2),
        "BiasAdd": (2, 2, 2),
        "ReLU": (2, 2, 1),  # block 0 keeps its own when mixed
    },
}
"""By net and operator: how many two blocks have to compute again when full, selective and mixed, worked out by hand."""


def wanted_copies(net: str, policy: str) -> Counter[str]:
    column = list(POLICIES).index(policy)
    return +Counter({name: counts[column] for name, counts in COPIES[net].items()})


def gradient_of(net: nn.Cell) -> Callable[..., Any]:
    return ms.value_and_grad(net, None, net.trainable_params())


class GradientStep(nn.Cell):
    """A net and its gradient, for GRAPH_MODE."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.net, self.gradient = net, gradient_of(net)

    def construct(self, x: Tensor) -> Any:
        return self.gradient(x)


def jit_step(net: nn.Cell, **options: Any) -> Callable[..., Any]:
    gradient = gradient_of(net)

    def step(x: Tensor) -> Any:
        return gradient(x)

    return ms.jit(step, **options)


def graph_nodes(net: nn.Cell, x: Tensor) -> list[Node]:
    """The nodes of a net and its gradient, as it is flagged now."""
    if ms.get_context("mode") == ms.GRAPH_MODE:
        return read_graph(graph_of_cell(GradientStep(net), (x,), None))
    return read_graph(graph_of_function(jit_step(net), (x,), None))


def labelled(net: nn.Cell) -> nn.Cell:
    """A plain net whose graph names its cells."""
    for path, cell in net.cells_and_names():
        set_scope(cell, path or "net")
    return net


VIEWED = frozenset({"Reshape", "Transpose", "Split", "Squeeze", "ExpandDims"})
"""Operators that give other views of what they read: how many of them the compiler leaves is its affair."""

HANDED_ON = frozenset({"Depend", "Load", "MakeTuple", "TupleGetItem", "UpdateState"})


class PlainGraph:
    """The graph of a plain, labelled net: which operators a recomputation has to run again."""

    def __init__(self, nodes: list[Node]) -> None:
        self.by_name = {node.name: node for node in nodes}
        self.forward = [n for n in nodes if not n.is_backward and n.operator not in HANDED_ON]
        late = [behind for node in nodes if node.is_backward for name in node.inputs for behind in self.behind(name)]
        self.needed = set(late)

    def behind(self, name: str) -> Iterator[str]:
        node = self.by_name.get(name)
        if node is None or node.is_backward or node.operator == "UpdateState":
            return
        if node.operator not in HANDED_ON:
            yield name
            return
        for each in node.inputs[:1] if node.operator == "Depend" else node.inputs:
            yield from self.behind(each)

    def copies(self, is_inside: Callable[[Node], bool], is_output: Callable[[Node], bool], *kept: str) -> Counter[str]:
        """How often each operator is computed again.

        Args:
            is_inside: Whether a node is in a recomputed cell.
            is_output: Whether a node reads the output of one.
            *kept: Operators whose results are kept.
        """
        outputs = {b for node in self.forward if is_output(node) for name in node.inputs for b in self.behind(name)}
        waiting, found = list(self.needed), set[str]()
        while waiting:
            name = waiting.pop()
            node = self.by_name[name]
            if name in found or name in outputs or node.operator in kept or not is_inside(node):
                continue
            found.add(name)
            waiting.extend(behind for each in node.inputs for behind in self.behind(each))
        return Counter(self.by_name[name].operator for name in found)


def copies_in(nodes: list[Node]) -> Counter[str]:
    """How often each operator is computed again in a graph."""
    return Counter(node.operator for node in nodes if node.is_copy and node.operator not in HANDED_ON)


def copies_while(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What a function gives, and the copies in the graphs that were compiled meanwhile, views aside."""
    before = _phases()
    result = run()
    nodes = [node for graph in _phases() - before for node in read_graph(_text(*graph))]
    return result, Counter({name: count for name, count in copies_in(nodes).items() if name not in VIEWED})


def _phases() -> set[tuple[bool, str]]:
    """The graphs there are now: whether of a function under ms.jit, and the name of the phase."""
    cells = {(False, phase) for phases in api.cells_compile_cache.values() for phase in phases or ()}
    return cells | {(True, phase) for phase in api.ms_compile_cache}


def _text(is_function: bool, phase: str) -> str:
    executor = JitExecutor_.get_instance() if is_function else api._cell_graph_executor._graph_executor
    return dump_func_graph(executor.get_func_graph(phase))
