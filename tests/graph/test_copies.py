"""The compiled graph computes again what a plan says, no more and no less: worked out from the plain net's graph."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from mindspore import Tensor, nn

from hyper_parallel import apply_policy, verify_policy
from hyper_parallel.graph import verify
from hyper_parallel.graph.report import GraphReport
from ms_ops.graph_ir import Node, read_graph
from tests.graph.nets import (
    FULL,
    IMAGES,
    SELECTIVE,
    TOKENS,
    PlainGraph,
    conv_net,
    copies_in,
    graph_nodes,
    labelled,
    transformer,
)

pytestmark = pytest.mark.xdist_group("copies in graphs")  # one program serves them all

PRODUCTS = ("MatMul", "MatMulExt")


def in_a_block(node: Node) -> bool:
    return node.scope.startswith("layers.")


def reads_a_block(node: Node) -> bool:
    """Of the transformer: the first operator of a block, and the first after the last one."""
    return node.scope.endswith(".norm1") or node.operator == "Pow"


def reads_a_conv_block(node: Node) -> bool:
    return node.operator in ("Conv2D", "Pow")


@pytest.fixture(scope="module")
def plain() -> PlainGraph:
    return PlainGraph(graph_nodes(labelled(transformer()), TOKENS))


@pytest.fixture(scope="module")
def plain_conv() -> PlainGraph:
    return PlainGraph(graph_nodes(labelled(conv_net()), IMAGES))


Under = Callable[..., tuple[Counter[str], GraphReport]]


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Under:
    """Gives the copies in the graph of a net under a policy, counted here, and the report."""

    def verified(net: nn.Cell, policy: dict[str, Any], x: Tensor) -> tuple[Counter[str], GraphReport]:
        seen: list[list[Node]] = []
        monkeypatch.setattr(verify, "read_graph", lambda text: seen.append(read_graph(text)) or seen[-1])
        apply_policy(net, policy, mode="graph")
        report = verify_policy(net, x)
        return copies_in(seen[-1]), report

    return verified


def test_full_recomputation_computes_again_what_backward_needs(
    plain: PlainGraph, under: Under, either_mode: str
) -> None:
    expected = plain.copies(in_a_block, reads_a_block)
    copies, report = under(transformer(), FULL, TOKENS)
    assert copies == expected == report.recomputed == report.planned
    assert report.honoured
    assert expected["GeLU"] == 2 and expected["MatMul"] == 6 and expected["MatMulExt"] == 4


def test_selective_recomputation_keeps_matrix_products(plain: PlainGraph, under: Under, either_mode: str) -> None:
    expected = plain.copies(in_a_block, reads_a_block, *PRODUCTS)
    copies, report = under(transformer(), SELECTIVE, TOKENS)
    assert copies == expected == report.recomputed == report.planned
    assert report.honoured
    assert not copies.keys() & set(PRODUCTS)
    first, second = (row.recomputed for row in report.rows)
    assert first == second


def test_full_recomputation_of_convolutions_keeps_batch_norm_and_dropout(plain_conv: PlainGraph, under: Under) -> None:
    expected = plain_conv.copies(in_a_block, reads_a_conv_block, "BatchNorm", "Dropout")
    copies, report = under(conv_net(), FULL, IMAGES)
    assert copies == expected == report.recomputed == report.planned
    assert report.honoured
    assert copies["Conv2D"] and copies["ReLU"]


def test_selective_recomputation_keeps_convolutions(plain_conv: PlainGraph, under: Under) -> None:
    expected = plain_conv.copies(in_a_block, reads_a_conv_block, "BatchNorm", "Dropout", "Conv2D")
    copies, report = under(conv_net(), SELECTIVE, IMAGES)
    assert copies == expected == report.recomputed == report.planned
    assert report.honoured
