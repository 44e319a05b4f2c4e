"""What a user may give as policies of operators, what it means, and what bad input gets."""

from typing import Any

import mindspore as ms
import pytest
from mindspore import mint, nn, ops

from hyper_parallel import PolicyError, activation_policy, checkpoint, checkpoint_wrapper, load_policy
from hyper_parallel.core.activation_memory.operator_policy import FORWARD, Asked, Operator, Table, operator_policy
from tests.helpers import PREFER_RECOMPUTE, RECOMPUTE, SAVE, SWAP, Layer, numbers


def policy_of(table: Table, name: str) -> Any:
    return table.decide(FORWARD, name, None, (), ())


# ---- what it means


def test_a_catalogue_name_means_every_operator_of_its_family() -> None:
    table = Table({"MatMul": SAVE}, "t")
    names = ("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Dense")
    assert [policy_of(table, name) for name in names] == [SAVE] * 5


def test_what_no_entry_names_is_replayed_unless_the_rest_has_a_policy() -> None:
    assert policy_of(Table({"MatMul": SAVE}, "t"), "Tanh") is PREFER_RECOMPUTE
    assert policy_of(Table({"MatMul": SAVE, "*": SWAP}, "t"), "Tanh") is SWAP


def test_a_dispatch_name_means_that_operator_alone() -> None:
    table = Table({"BatchMatMul": SAVE}, "t")
    assert [policy_of(table, name) for name in ("BatchMatMul", "MatMul")] == [SAVE, PREFER_RECOMPUTE]


@pytest.mark.parametrize(
    "item",
    ["MatMul", ops.MatMul, ops.MatMul(), ops.matmul, mint.matmul],
    ids=["name", "class", "primitive", "ops", "mint"],
)
def test_a_list_takes_names_primitives_and_functions(item: Any) -> None:
    table = operator_policy([item], "t")
    assert isinstance(table, Table)
    assert policy_of(table, "MatMul") is SAVE


def test_a_function_with_underscores_is_its_operator() -> None:
    table = operator_policy([ops.rms_norm], "t")
    assert isinstance(table, Table)
    assert policy_of(table, "RmsNorm") is SAVE


def test_equal_tables_are_equal_and_others_are_not() -> None:
    one, same, other = Table({"Exp": SAVE}, "a"), Table({"Exp": SAVE}, "b"), Table({"Exp": SWAP}, "a")
    assert (one == same, hash(one) == hash(same), one == other) == (True, True, False)


def test_equal_functions_are_equal() -> None:
    def asks(ctx: Any, op: Any, *args: Any) -> Any:
        return SAVE

    assert Asked(asks) == Asked(asks) != Asked(lambda *args: SAVE)
    assert hash(Asked(asks)) == hash(Asked(asks))


def test_an_operator_is_described_by_name_outputs_and_cell() -> None:
    operator = Operator("MatMulExt", [numbers(2, 3), (numbers(2),)], ())
    assert (operator.name, operator.dispatch_name, operator.cell) == ("MatMul", "MatMulExt", "")
    assert operator.outputs == [((2, 3), ms.float32), ((2,), ms.float32)]


def test_a_table_says_what_it_does() -> None:
    cell = activation_policy(ops={"MatMul": SAVE, "*": RECOMPUTE})(Layer())
    with pytest.raises(PolicyError, match=r"operators: MatMul must_save, \* must_recompute"):
        activation_policy(SAVE)(cell)


# ---- bad input

BAD_TABLES: dict[str, tuple[Any, str]] = {
    "empty": ({}, "a table of operators must name one"),
    "unknown": ({"MatMull": SAVE}, r"operator 'MatMull': MindSpore dispatches no such operator; did you mean MatMul"),
    "nothing like it": ({"Qqqqqqq": SAVE}, "operator 'Qqqqqqq': MindSpore dispatches no such operator"),
    "expanded": ({"ops.gelu": SAVE}, r"operator 'ops.gelu': .*Erf"),
    "unseen": ({"ops.ones": SAVE}, r"operator 'ops.ones': "),
    "a bool": ({"MatMul": True}, "operator 'MatMul' must have a CheckpointPolicy, but has True"),
    "a string": ({"MatMul": "must_save"}, "operator 'MatMul' must have a CheckpointPolicy, but has 'must_save'"),
    "a number as a name": ({3: SAVE}, "an operator is named by a string, a Primitive or a function, but got 3"),
    "twice": (
        {ops.matmul: SAVE, "MatMul": SWAP},
        "two entries mean MatMul, and one says .*MUST_SAVE, the other .*MUST_SWAP",
    ),
    "a pair": ([("MatMul", SAVE)], r"an operator is named by a string, .* but got \('MatMul', .* of type tuple"),
    "a cell": ([nn.Dense], "Dense is a Cell, and no operator: MindSpore runs nn.Dense as MatMul, BiasAdd"),
    "another cell": ([nn.GELU()], "GELU is a Cell, and no operator: give the cell a policy of its own"),
    "contradiction": ({"MatMul": SAVE, "MatMulExt": SWAP}, "'MatMul' says MUST_SAVE and 'MatMulExt' says MUST_SWAP"),
    "random": ({"Dropout": RECOMPUTE}, "Dropout can't be MUST_RECOMPUTE: it is random"),
    "prints": ({"Print": RECOMPUTE}, "Print can't be MUST_RECOMPUTE: it prints"),
    "writes": ({"Assign": RECOMPUTE}, "Assign can't be MUST_RECOMPUTE: it writes a parameter"),
    "a view kept": ({"Reshape": SAVE}, "Reshape can't be MUST_SAVE: Reshape gives no tensor of its own"),
    "a write swapped": ({"Assign": SWAP}, "Assign can't be MUST_SWAP: Assign gives no tensor of its own"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_that_can_not_be_honoured_is_refused(name: str) -> None:
    table, message = BAD_TABLES[name]
    with pytest.raises(PolicyError, match=message):
        activation_policy(ops=table)
    with pytest.raises(PolicyError, match=message):
        checkpoint_wrapper(Layer(), policy_fn=table)
    with pytest.raises(PolicyError, match=message):
        checkpoint(ops.tanh, numbers(2), ops=table)


@pytest.mark.parametrize("given", [True, "MatMul", 3, nn.Cell])
def test_something_else_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="given as a function, a table or a list of operators, but got"):
        checkpoint_wrapper(Layer(), policy_fn=given)


def test_a_function_as_a_table_is_pointed_to_policy_fn() -> None:
    with pytest.raises(TypeError, match="a function is policy_fn="):
        activation_policy(ops=lambda ctx, op, *args: SAVE)  # type: ignore[arg-type]


def test_a_table_and_a_function_are_not_taken_together() -> None:
    with pytest.raises(PolicyError, match="give ops= or policy_fn=, not both"):
        activation_policy(ops=["MatMul"], policy_fn=lambda ctx, op, *args: SAVE)


@pytest.mark.parametrize("policy", [SAVE, SWAP])
def test_operators_of_a_cell_that_is_not_replayed_have_no_policies(policy: Any) -> None:
    with pytest.raises(PolicyError, match=rf"for a replayed region, but the policy is {policy.name}"):
        activation_policy(policy, ops=["MatMul"])


def test_neither_a_policy_nor_operators_is_refused() -> None:
    with pytest.raises(TypeError, match="policy must be a CheckpointPolicy"):
        activation_policy()


def test_another_table_on_the_same_cell_is_refused_and_the_same_is_not() -> None:
    cell = activation_policy(ops=["MatMul"])(Layer())
    activation_policy(ops={"MatMul": SAVE})(cell)
    with pytest.raises(PolicyError, match="contradicts"):
        activation_policy(ops={"MatMul": SWAP})(cell)


def test_allow_cache_entry_mutation_is_a_bool() -> None:
    with pytest.raises(TypeError, match="allow_cache_entry_mutation must be a bool, but got 1"):
        activation_policy(ops=["MatMul"], allow_cache_entry_mutation=1)  # type: ignore[arg-type]


# ---- policy files


def rule(**keys: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"cells": "0", **keys}]}


def test_a_rule_with_operators_means_must_recompute() -> None:
    plan = load_policy(rule(ops={"MatMul": "must_save", "*": "prefer_recompute"}))
    (row,) = plan.resolve(nn.SequentialCell(Layer()))
    assert row.policy is RECOMPUTE
    assert row.keeps.endswith("operators: MatMul must_save, * prefer_recompute")
    assert "must_recompute + operators: MatMul must_save" in plan.describe()


def test_a_list_in_a_file_names_what_is_kept() -> None:
    plan = load_policy(rule(ops=["MatMul", "Tanh"]))
    assert plan.resolve(nn.SequentialCell(Layer()))[0].keeps.endswith("operators: MatMul must_save, Tanh must_save")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ops": {}}, "ops: a table of operators must name one"),
        ({"ops": {"MatMull": "must_save"}}, "did you mean MatMul"),
        ({"ops": {"MatMul": "save"}}, "expected one of must_save"),
        ({"ops": "MatMul"}, "expected a mapping from operators to policies, or a list of operators"),
        ({"ops": []}, "ops: got [], a table of operators must name one"),
        ({"ops": [3]}, "expected the name of an operator, but the list has 3"),
        ({"ops": ["MatMull"]}, "did you mean MatMul"),
        ({"ops": {"Dropout": "must_recompute"}}, "it is random"),
        ({"ops": {"MatMul": "must_save"}, "policy": "must_swap"}, "but must_swap replays nothing"),
        ({"policy": "must_save", "allow_cache_entry_mutation": True}, "but must_save replays nothing"),
        ({"policy": "must_recompute", "allow_cache_entry_mutation": 1}, "expected true or false"),
    ],
)
def test_a_bad_rule_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(rule(**keys))
    assert message in str(caught.value)
