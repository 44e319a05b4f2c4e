"""What is read from MindSpore's dumps is there, under these names; if that changes, this says where to look."""

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import operations

from ms_ops.graph_compile import graph_of_function
from ms_ops.graph_flags import RECOMPUTED, set_attribute, set_flag, set_scope
from ms_ops.graph_ir import Node, read_graph
from tests.helpers import numbers, seeded


class Block(nn.Cell):
    """A Primitive of its own, a function, a kept Primitive."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.tanh, self.relu = nn.Dense(4, 4), operations.Tanh(), operations.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.dense(self.relu(ops.sigmoid(self.tanh(self.dense(x)))))


@pytest.fixture(scope="module")
def text() -> str:
    net = seeded(nn.SequentialCell(Block(), nn.Dense(4, 1)))
    for path, cell in net[0].cells_and_names():
        set_scope(cell, f"{RECOMPUTED}block.{path}")
    set_flag(net[0], output_recompute=False)
    set_attribute(net[0].relu, "recompute", False)
    gradient = ms.value_and_grad(net, None, net.trainable_params())

    def step(x: Tensor) -> Tensor:
        return gradient(x)

    return graph_of_function(step, (numbers(2, 4),), None)


@pytest.fixture(scope="module")
def nodes(text: str) -> list[Node]:
    return read_graph(text)


LOOK = (
    "MindSpore's dump has changed: look at what stands there now (ms_ops.graph_compile.graph_of_function gives it), "
    "adapt ms_ops/graph_ir.py, and its docstring"
)


def only(nodes: list[Node], operator: str, **wanted: object) -> Node:
    found = [
        node
        for node in nodes
        if node.operator == operator and all(getattr(node, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, f"{operator} with {wanted} is there {len(found)} times. {LOOK}"
    return found[0]


def test_a_recomputed_operator_and_its_copy_share_an_id(nodes: list[Node]) -> None:
    first, copy = only(nodes, "Tanh", is_copy=False), only(nodes, "Tanh", is_copy=True)
    assert first.copy_id == copy.copy_id != "", LOOK
    assert first.region == copy.region is not None, LOOK
    assert first.recompute is True, LOOK


def test_a_kept_operator_has_no_copy(nodes: list[Node]) -> None:
    assert only(nodes, "ReLU").recompute is False, LOOK


def test_a_scope_names_the_cell(nodes: list[Node]) -> None:
    assert only(nodes, "Tanh", is_copy=False).scope == "recompute_block.", LOOK


def test_a_primitive_of_a_cell_is_told_from_one_of_a_function(nodes: list[Node]) -> None:
    assert only(nodes, "Tanh", is_copy=False).is_own, LOOK
    assert not only(nodes, "Sigmoid", is_copy=False).is_own, LOOK


def test_the_backward_is_told_from_the_forward(nodes: list[Node]) -> None:
    assert only(nodes, "TanhGrad").is_backward, LOOK
    assert not only(nodes, "Tanh", is_copy=True).is_backward, LOOK


def test_copies_are_held_back(nodes: list[Node]) -> None:
    gates = [node for node in nodes if node.is_gate]
    assert gates and all(gate.operator == "Depend" for gate in gates), LOOK
    assert any(gate.name in copy.inputs for gate in gates for copy in nodes if copy.is_copy), LOOK


def test_inputs_lead_to_what_computes_them(nodes: list[Node]) -> None:
    by_name = {node.name: node for node in nodes}
    assert by_name[only(nodes, "Sigmoid", is_copy=False).inputs[0]].operator == "Tanh", LOOK


def test_every_operator_of_the_text_is_read(text: str, nodes: list[Node]) -> None:
    assert len(nodes) == sum(line.startswith("  %") for line in text.splitlines()), LOOK


def test_a_move_names_its_target() -> None:
    line = '  %1(moved) = PrimFunc_MoveTo(%0, "CPU, (host)", Bool(0)) cnode_attrs: {backward_prefetch: I64(2)}'
    (node,) = read_graph(line.replace("CPU, (host)", "CPU"))
    assert (node.operator, node.target, node.inputs) == ("MoveTo", "CPU", (":%0",))


@pytest.mark.parametrize("text", ["", "a text", "subgraph @1() {\n}"])
def test_what_is_no_dump_says_where_to_look(text: str) -> None:
    with pytest.raises(ValueError, match=r"no operator is found in a graph of .* look at ms_ops/graph_ir\.py"):
        read_graph(text)
