"""Whose operators are computed again: of functions, random ones, and those of containers of cells."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from hyper_parallel import apply_policy, verify_policy
from ms_ops.graph_flags import function_primitives
from tests.graph.nets import RECOMPUTE, GradientStep, Mlp, Net, jit_step, mlp, of
from tests.helpers import numbers, seeded

X = numbers(2, 4)
SELECTIVE = of({"cells": "blocks.*", "preset": "selective"})


class OneDense(nn.Cell):
    """What cells have that run operators by functions between two calls of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)


class Dropping(nn.Cell):
    """Dropout by a cell and by a function, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dropout(p=0.5)
        self.calls = ms.Parameter(Tensor([0.0]), requires_grad=False, name="calls")

    def construct(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.down(ops.tanh(ops.dropout(self.drop(self.up(x)), 0.5)) * self.calls)


class TestRandomness:
    def test_dropout_of_cells_and_functions_is_kept(self, either_mode: str) -> None:
        net = seeded(Net(Dropping())).set_train()
        apply_policy(net, RECOMPUTE, mode="graph")
        report = verify_policy(net, X)
        assert report.honoured
        assert "Dropout" not in report.recomputed and "Assign" not in report.recomputed
        assert report.recomputed["Tanh"] == 1

    def test_a_counter_counts_once(self) -> None:
        net = seeded(Net(Dropping())).set_train()
        apply_policy(net, RECOMPUTE, mode="graph")
        jit_step(net)(X)
        assert net.blocks[0].calls.asnumpy() == 1


class TestFunctions:
    def test_a_net_that_is_under_no_plan_is_compiled_without_flags_on_them(self, graph_mode: None) -> None:
        net, other = mlp(1), mlp(1)
        apply_policy(net, RECOMPUTE)
        dropout = function_primitives()["DropoutExt"][0]
        verify_policy(net, X)
        assert dropout.attrs["recompute"] is False
        GradientStep(other).compile(X)
        assert "recompute" not in dropout.attrs

    def test_one_that_a_cell_keeps_and_another_names_as_recomputed_is_told_once(self) -> None:
        keeps, names = {"Sigmoid": "must_save"}, {"Sigmoid": "must_recompute", "*": "must_save"}
        rules = {"cells": "blocks.{0,2}", "ops": names}, {"cells": "blocks.{1,3}", "ops": keeps}
        notes = apply_policy(mlp(4), of(*rules), mode="graph").notes
        assert [note for note in notes if "Sigmoid" in note] == [
            "functions that run Sigmoid keep their results everywhere: blocks.1 keeps them, blocks.0 recomputes them, "
            "and MindSpore has one Primitive for both"
        ]

    def test_two_nets_under_different_plans_keep_their_own(self) -> None:
        class Functions(OneDense):
            """Operators by functions."""

            def construct(self, x: Tensor) -> Tensor:
                return self.dense(ops.tanh(ops.matmul(self.dense(x), x.T)).sum(1, keepdims=True) * x)

        keeps, recomputes = seeded(Net(Functions())), seeded(Net(Functions()))
        apply_policy(keeps, SELECTIVE, mode="graph")
        apply_policy(recomputes, RECOMPUTE, mode="graph")
        assert verify_policy(recomputes, X).recomputed["MatMulExt"] == 1
        report = verify_policy(keeps, X)
        assert "MatMulExt" not in report.recomputed and report.recomputed["Tanh"] == 1

    def test_a_function_that_one_region_keeps_and_another_recomputes_is_reported(self) -> None:
        class Product(OneDense):
            """A matrix product by a function, of which backward needs the result."""

            def construct(self, x: Tensor) -> Tensor:
                return self.dense(ops.tanh(ops.sigmoid(ops.matmul(self.dense(x), x.T))) @ x)

        net = seeded(Net(Product(), Product()))
        rules = (
            {"cells": "blocks.0", "policy": "must_recompute"},
            {"cells": "blocks.1", "ops": {"Sigmoid": "must_save"}},
        )
        apply_policy(net, of(*rules), mode="graph")
        first, second = verify_policy(net, X).rows
        assert (first.verdict, second.verdict) == ("not honoured", "honoured")
        assert first.reason.startswith("kept though: Sigmoid (1); a function or a tensor's method runs it")

    def test_what_a_function_gives_inside_a_cell_that_runs_once_is_reported(self) -> None:
        class Around(nn.Cell):
            """A cell around one that runs once."""

            def __init__(self) -> None:
                super().__init__()
                self.mlp, self.dense = Mlp(), nn.Dense(4, 4)

            def construct(self, x: Tensor) -> Tensor:
                return self.dense(self.mlp(x))

        net = seeded(Net(Around()))
        apply_policy(net, of({"cells": "blocks.0", "policy": "must_recompute", "exclude": "mlp"}), mode="graph")
        row = verify_policy(net, X).rows[1]
        assert (row.plan.path, row.verdict) == ("blocks.0.mlp", "not honoured")
        assert row.reason.startswith("recomputed though: Sigmoid (1); no Primitive of the cell's own runs it")


class TestContainers:
    def test_what_a_container_of_cells_runs_is_recomputed(self) -> None:
        block = nn.SequentialCell(Mlp(), nn.SequentialCell(nn.Dense(4, 4), nn.Tanh()), nn.Dense(4, 4))
        net = seeded(Net(block))
        apply_policy(net, RECOMPUTE, mode="graph")
        report = verify_policy(net, X)
        assert report.honoured
        assert (report.recomputed["Sigmoid"], report.recomputed["Tanh"], report.recomputed["MatMul"]) == (1, 2, 3)
