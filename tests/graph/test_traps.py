"""What MindSpore passes over without a word, or gets wrong, is an error here, or right."""

import copy
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn
from mindspore.ops import operations

from hyper_parallel import CheckpointPolicy, PolicyError, activation_policy, apply_policy, verify_policy
from ms_ops.graph_flags import own_primitives
from tests.graph.nets import RECOMPUTE, GradientStep, Mlp, Net, jit_step, mlp, of
from tests.helpers import numbers, seeded

X = numbers(2, 4)
SELECTIVE = of({"cells": "blocks.*", "preset": "selective"})


def snapshot(net: nn.Cell) -> list[Any]:
    """All that flags may change."""
    found: list[Any] = []
    for path, cell in net.cells_and_names():
        values = {name: repr(value) for name, value in vars(cell).items() if name != "_func_graph_flags"}
        found.append((path, type(cell), values, dict(getattr(cell, "_func_graph_flags", {}))))
        found += [(path, dict(each.attrs), set(vars(each))) for each in own_primitives(cell)]
    return found


class TestTooLate:
    @pytest.mark.usefixtures("graph_mode")
    def test_a_cell_that_was_compiled_is_refused(self) -> None:
        net = mlp(1)
        net(X)
        with pytest.raises(PolicyError, match=r"the net was compiled in graph mode already, so it is too late for the"):
            apply_policy(net, RECOMPUTE)

    @pytest.mark.usefixtures("graph_mode")
    def test_a_net_that_was_compiled_inside_another_cell_is_refused(self) -> None:
        net = mlp(1)
        nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))(X)
        with pytest.raises(PolicyError, match=r"the cell of blocks\.0\..* was compiled in graph mode already"):
            apply_policy(net, RECOMPUTE)

    def test_a_net_that_was_compiled_by_a_jit_function_is_refused(self) -> None:
        net = mlp(1)
        jit_step(net)(X)
        before = snapshot(net)
        with pytest.raises(PolicyError, match="apply a policy to a net that hasn't run, before its first step"):
            apply_policy(net, RECOMPUTE, mode="graph")
        assert snapshot(net) == before

    def test_a_net_that_is_made_like_a_compiled_one_is_fine(self) -> None:
        jit_step(mlp(1))(X)
        assert apply_policy(mlp(1), RECOMPUTE, mode="graph").applied

    def test_a_plan_whose_net_was_compiled_is_not_removed(self) -> None:
        net = mlp(1)
        plan = apply_policy(net, RECOMPUTE, mode="graph")
        jit_step(net)(X)
        with pytest.raises(PolicyError, match="so it is too late to remove the plan"):
            plan.remove()
        assert plan.applied


class TestRemoving:
    @pytest.mark.parametrize("policy", [RECOMPUTE, SELECTIVE], ids=["full", "selective"])
    def test_before_a_compilation_everything_comes_back(self, policy: Any) -> None:
        net = mlp()
        before = snapshot(net)
        plan = apply_policy(net, policy, mode="graph")
        assert snapshot(net) != before
        plan.remove()
        assert snapshot(net) == before

    def test_a_verified_plan_can_be_removed_and_another_applied(self) -> None:
        net = mlp()
        plan = apply_policy(net, SELECTIVE, mode="graph")
        assert "MatMul" not in verify_policy(net, X).recomputed
        plan.remove()
        apply_policy(net, RECOMPUTE, mode="graph")
        assert verify_policy(net, X).recomputed["MatMul"] == 2

    def test_a_net_under_a_plan_takes_no_other(self) -> None:
        net = mlp()
        apply_policy(net, RECOMPUTE, mode="graph")
        with pytest.raises(PolicyError, match="is under the plan from dict already"):
            apply_policy(net, SELECTIVE, mode="graph")

    def test_recompute_of_a_primitive_can_be_called_afterwards(self) -> None:
        net = mlp()
        apply_policy(net, of({"cells": "blocks.*", "ops": {"Tanh": "must_save"}}), mode="graph").remove()
        primitive = net.blocks[0].tanh
        assert primitive.recompute(True) is primitive

    def test_a_removed_net_is_let_go(self) -> None:
        net = mlp()
        apply_policy(net, SELECTIVE, mode="graph")
        gone = weakref.ref(net.blocks[0])
        del net
        gc.collect()
        assert gone() is None


class TestGradientOutside:
    def test_of_a_jit_function_that_holds_the_recomputed_cells(self) -> None:
        net = mlp(1)
        apply_policy(net, RECOMPUTE, mode="graph")

        @ms.jit
        def forward(x: Tensor) -> Tensor:
            return net(x)

        with pytest.raises(PolicyError, match=r"blocks\.0 \(MUST_RECOMPUTE, rule 1\) is compiled on its own, and "):
            ms.grad(forward, None, net.trainable_params())(X)

    def test_of_a_block_whose_construct_is_under_jit(self) -> None:
        class Jitted(Mlp):
            @ms.jit
            def construct(self, x: Tensor) -> Tensor:
                return self.down(self.tanh(self.up(x)))

        net = seeded(Net(Jitted()))
        apply_policy(net, RECOMPUTE, mode="graph")
        with pytest.raises(PolicyError, match=r"blocks\.0 .* no ms\.jit on the construct of a block"):
            ms.grad(net, None, net.trainable_params())(X)

    def test_a_forward_alone_compiles(self) -> None:
        net = mlp(1)
        apply_policy(net, RECOMPUTE, mode="graph")

        @ms.jit
        def forward(x: Tensor) -> Tensor:
            return net(x)

        assert forward(X).shape == ()

    def test_a_net_that_runs_in_pynative_mode_is_refused(self) -> None:
        net = mlp(1)
        apply_policy(net, RECOMPUTE, mode="graph")
        assert net(X).shape == ()
        with pytest.raises(PolicyError, match=r"blocks\.0 \(MUST_RECOMPUTE, rule 1\) runs in PyNative mode, which pas"):
            ms.grad(net, None, net.trainable_params())(X)


class TestPynativePolicies:
    @pytest.mark.usefixtures("graph_mode")
    def test_one_on_a_cell_in_graph_mode_stops_the_compilation(self) -> None:
        net = mlp()
        activation_policy(CheckpointPolicy.MUST_RECOMPUTE)(net.blocks[1])
        with pytest.raises(RuntimeError, match=r"a Mlp \(MUST_RECOMPUTE, decorator\) is under a PyNative policy"):
            net(X)

    def test_of_a_decorator_becomes_flags_with_the_plan(self, either_mode: str) -> None:
        @activation_policy(CheckpointPolicy.MUST_RECOMPUTE)
        class Decorated(Mlp):
            """A block whose class is under a policy."""

            def construct(self, x: Tensor) -> Tensor:
                return self.down(self.tanh(self.up(x)))

        net = seeded(Net(Decorated(), Mlp()))
        activation_policy(ops={"MatMul": CheckpointPolicy.MUST_SAVE})(net.blocks[1])
        plan = apply_policy(net, {"version": 1}, mode="graph")
        report = verify_policy(net, X)
        assert report.honoured
        assert [row.recomputed.get("MatMul") for row in report.rows] == [1, None]
        assert [row.recomputed["Tanh"] for row in report.rows] == [1, 1]
        plan.remove()
        before = type(net.blocks[0])
        assert hasattr(before.construct, "_hp_region")


class TestNative:
    def test_neighbours_stay_regions_of_their_own(self) -> None:
        net = mlp(3)
        apply_policy(net, RECOMPUTE, mode="graph")
        assert verify_policy(net, X).gates == 3

    @pytest.mark.parametrize("options", [{}, {"output_recompute": True}])
    def test_cells_under_recompute_of_mindspore_are_refused(self, options: dict[str, Any]) -> None:
        net = mlp()
        for block in net.blocks:
            block.recompute(**options)
        with pytest.raises(PolicyError, match=r"blocks\.0.*carries MindSpore's own recompute\(\) already"):
            apply_policy(net, RECOMPUTE, mode="graph")

    def test_recompute_that_is_called_after_the_plan_stops_the_compilation(self, either_mode: str) -> None:
        net = mlp()
        apply_policy(net, RECOMPUTE, mode="graph")
        net.blocks[0].recompute(output_recompute=True)
        with pytest.raises(PolicyError, match=r"blocks\.0 \(MUST_RECOMPUTE, rule 1\) carries MindSpore's own recomp"):
            verify_policy(net, X)

    def test_what_mindspore_flags_besides_is_not_as_planned(self) -> None:
        net = mlp()
        apply_policy(net, of({"cells": "blocks.0", "policy": "must_recompute"}), mode="graph")
        net.blocks[1].tanh.add_prim_attr("recompute", True)
        report = verify_policy(net, X)
        assert not report.honoured
        with pytest.raises(PolicyError, match="Tanh is recomputed 1 times outside of the plan"):
            report.require_honoured()


class Shares(nn.Cell):
    """A block that has its Primitive from elsewhere."""

    def __init__(self, tanh: Any) -> None:
        super().__init__()
        self.dense, self.tanh = nn.Dense(4, 4), tanh

    def construct(self, x: Tensor) -> Tensor:
        return self.dense(self.tanh(self.dense(x)))


class TestOnePrimitive:
    def test_under_two_policies_is_an_error_that_names_both_cells(self) -> None:
        tanh = operations.Tanh()
        net = Net(Shares(tanh), Shares(tanh))
        rules = {"cells": "blocks.0", "policy": "must_recompute"}, {"cells": "blocks.1", "ops": {"Tanh": "must_save"}}
        before = snapshot(net)
        with pytest.raises(PolicyError, match=r"blocks\.0 and blocks\.1 share one Tanh Primitive, but it is recompute"):
            apply_policy(net, of(*rules), mode="graph")
        assert snapshot(net) == before

    def test_of_a_cell_that_keeps_it_and_one_that_is_plain_is_fine(self) -> None:
        tanh = operations.Tanh()
        net = Net(Shares(tanh), Shares(tanh))
        apply_policy(net, of({"cells": "blocks.1", "ops": {"Tanh": "must_save"}}), mode="graph")
        assert tanh.attrs["recompute"] is False

    def test_a_plain_cell_that_has_it_too_hides_no_contradiction(self) -> None:
        tanh = operations.Tanh()
        net = Net(Shares(tanh), Shares(tanh), Shares(tanh))
        rules = {"cells": "blocks.1", "policy": "must_recompute"}, {"cells": "blocks.2", "ops": {"Tanh": "must_save"}}
        with pytest.raises(PolicyError, match=r"blocks\.1 and blocks\.2 share one Tanh Primitive"):
            apply_policy(net, of(*rules), mode="graph")

    def test_of_two_cells_that_recompute_it_in_two_ways_is_fine(self) -> None:
        tanh = operations.Tanh()
        rest = {"Tanh": "must_recompute", "*": "must_save"}
        rules = {"cells": "blocks.0", "policy": "must_recompute"}, {"cells": "blocks.1", "ops": rest}
        apply_policy(Net(Shares(tanh), Shares(tanh)), of(*rules), mode="graph")
        assert tanh.attrs["recompute"] is True


class TestCopies:
    def test_a_copy_of_a_flagged_net_is_refused_when_it_is_compiled(self) -> None:
        net = mlp(1)
        apply_policy(net, SELECTIVE, mode="graph")
        other = copy.deepcopy(net)
        with pytest.raises(PolicyError, match=r"a copy of blocks\.0 .* is compiled, which has only a part of "):
            jit_step(other)(X)


def python_calls(run: Callable[[], Any]) -> list[str]:
    """Functions of this package that are called meanwhile."""
    found: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and ("/hyper_parallel/" in name or "/ms_ops/" in name):
            found.append(f"{name}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


class TestNames:
    def test_a_cell_that_is_named_net_is_not_taken_for_the_net(self) -> None:
        class Outer(nn.Cell):
            """A cell named net, and an operator of its own."""

            def __init__(self) -> None:
                super().__init__()
                self.net, self.tanh = Shares(operations.Tanh()), operations.Tanh()

            def construct(self, x: Tensor) -> Tensor:
                return self.tanh(self.net(x))

        net = seeded(Outer())
        apply_policy(net, of({"cells": "net", "policy": "must_recompute"}), mode="graph")
        report = verify_policy(net, X)
        assert report.honoured
        assert report.rows[0].recomputed["Tanh"] == 1

    @pytest.mark.parametrize("name", ["recompute_part", "recomputed", "Gradients"])
    def test_a_cell_whose_name_means_something_to_the_compiler_is_as_planned(self, name: str) -> None:
        part = Shares(operations.Tanh())
        net = seeded(nn.SequentialCell(OrderedDict([(name, part), ("other", Shares(operations.Tanh()))])))
        apply_policy(net, of({"cells": "other", "policy": "must_recompute"}), mode="graph")
        report = verify_policy(net, X)
        assert report.honoured
        assert report.recomputed["Tanh"] == 1


class TestCost:
    def test_a_step_under_jit_runs_no_python_of_ours(self) -> None:
        net = mlp()
        apply_policy(net, SELECTIVE, mode="graph")
        step = jit_step(net)
        assert python_calls(lambda: step(X))  # it is compiled
        assert python_calls(lambda: step(X)) == []

    @pytest.mark.usefixtures("graph_mode")
    def test_a_step_in_graph_mode_runs_no_more_python_than_a_plain_one(self) -> None:
        def calls(policy: Any) -> list[str]:
            net = mlp()
            if policy is not None:
                apply_policy(net, policy)
            step = GradientStep(net)
            step(X)
            return python_calls(lambda: step(X))

        assert calls(SELECTIVE) == calls(None)
