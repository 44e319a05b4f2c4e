"""`must_swap` where MindSpore's compiler honours it: its moves are counted before the back end, which isn't there."""

from typing import Any

import pytest
from mindspore import Tensor, lazy_inline, nn
from mindspore.ops import operations

from hyper_parallel import PolicyError, apply_policy, verify_policy
from hyper_parallel.graph import verify
from hyper_parallel.graph.swap import Ladder
from hyper_parallel.policy_file import applying
from ms_ops.graph_ir import Node, read_graph
from tests.graph.nets import Net, of
from tests.helpers import numbers, seeded

X = numbers(2, 4)


class Late(nn.Cell):
    """A block that is compiled once for all its instances."""

    @lazy_inline
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.tanh = nn.Dense(4, 4), nn.Dense(4, 4), operations.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        return self.down(self.tanh(self.up(x)))


class Plain(Late):
    """A block that isn't."""

    def __init__(self) -> None:
        nn.Cell.__init__(self)
        self.up, self.down, self.tanh = nn.Dense(4, 4), nn.Dense(4, 4), operations.Tanh()


class Outer(nn.Cell):
    """A block with a cell inside that has cells of its own."""

    @lazy_inline
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.tanh = Plain(), operations.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        return self.tanh(self.inner(x))


@pytest.fixture
def as_on_ascend(graph_mode: None, monkeypatch: pytest.MonkeyPatch) -> list[list[Node]]:
    """GRAPH_MODE, and swapping taken for possible; gives the graphs that are read."""
    seen: list[list[Node]] = []
    for module in (applying, verify):
        monkeypatch.setattr(module, "ladder_of", lambda settings: Ladder())
    monkeypatch.setattr(verify, "read_graph", lambda text: seen.append(read_graph(text)) or seen[-1])
    return seen


def swaps(**graph: Any) -> dict[str, Any]:
    return {"cells": "blocks.*", "policy": "must_swap"} | ({"graph": graph} if graph else {})


def test_the_compiler_moves_tensors_out_and_back(as_on_ascend: list[list[Node]]) -> None:
    net = seeded(Net(Late(), Late()))
    apply_policy(net, of(swaps(backward_prefetch=2)))
    report = verify_policy(net, X)
    assert report.moves["CPU"] == report.moves["Ascend"] > 0
    assert [row.verdict for row in report.rows] == ["honoured", "honoured"]
    assert net.blocks[0].tanh.attrs["backward_prefetch"] == 2
    assert report.describe().endswith(f"moves: Ascend {report.moves['Ascend']}, CPU {report.moves['CPU']}")


def test_without_a_number_mindspore_chooses_when_to_load(as_on_ascend: list[list[Node]]) -> None:
    net = seeded(Net(Late()))
    apply_policy(net, of(swaps())).remove()
    assert "backward_prefetch" not in net.blocks[0].tanh.attrs
    apply_policy(net, of(swaps()))
    assert net.blocks[0].tanh.attrs["backward_prefetch"] == "Auto"


@pytest.mark.usefixtures("as_on_ascend")
def test_what_is_inside_of_a_kept_cell_is_not_moved() -> None:
    net = seeded(Net(Outer()))
    apply_policy(net, of(swaps(), {"cells": "blocks.*.inner", "policy": "must_save"}))
    assert net.blocks[0].tanh.attrs["offload"] is True
    assert "offload" not in net.blocks[0].inner.up.matmul.attrs


@pytest.mark.usefixtures("as_on_ascend")
def test_a_cell_that_is_not_inlined_late_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"blocks\.1 \(rule 1\): must_swap isn't honoured here: .* under lazy_inline"):
        apply_policy(seeded(Net(Late(), Plain())), of(swaps()))


@pytest.mark.usefixtures("as_on_ascend")
def test_a_cell_inside_a_recomputed_one_is_refused() -> None:
    rules = {"cells": "blocks.*", "policy": "must_recompute"}, {"cells": "blocks.*.up", "policy": "must_swap"}
    with pytest.raises(PolicyError, match=r"blocks\.0\.up \(rule 2\): must_swap inside a recomputed cell: Mind"):
        apply_policy(seeded(Net(Late())), of(*rules))


@pytest.mark.usefixtures("graph_mode")
def test_cells_under_lazy_inline_and_different_policies_share_no_graph() -> None:
    net = seeded(Net(Late(), Late()))
    before = net.blocks[0]._cell_init_args
    plan = apply_policy(net, of({"cells": "blocks.0", "policy": "must_recompute"}))
    assert net.blocks[0]._cell_init_args != net.blocks[1]._cell_init_args
    plan.remove()
    assert net.blocks[0]._cell_init_args == net.blocks[1]._cell_init_args == before
