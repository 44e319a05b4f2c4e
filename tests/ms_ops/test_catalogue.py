"""One name per operator: families, variants, and the closest names."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter

from ms_ops.catalogue import (
    _FAMILIES,
    COLLECTIVES,
    MATRIX_PRODUCTS,
    ONLY_IN_2_10,
    VIEWS,
    all_names,
    catalogue_name,
    close_names,
    dispatch_names,
    why_refused,
)
from ms_ops.dispatch import MATRIX_PRODUCTS as PLAIN_PRODUCTS
from ms_ops.dispatch import RANDOM_OPERATORS
from tests.ms_ops.dispatched import (
    IS_2_9,
    numbers,
    seen,
)


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_family_names_operators_that_exist(family: str) -> None:
    members = frozenset(_FAMILIES[family].split())
    assert members - all_names() <= (ONLY_IN_2_10 if IS_2_9 else frozenset())
    assert dispatch_names(family) >= members & all_names()
    assert {catalogue_name(member) for member in members} == {family}


def test_no_operator_is_in_two_families() -> None:
    members = [member for family in _FAMILIES.values() for member in family.split()]
    assert len(members) == len(set(members))


@pytest.mark.parametrize("family", sorted(set(_FAMILIES) - {"View", "Collective"}))
def test_a_family_holds_nothing_that_writes_or_views(family: str) -> None:
    assert not [name for name in dispatch_names(family) if name.startswith(("Assign", "Inplace", "Scatter"))]
    assert not dispatch_names(family) & (VIEWS | COLLECTIVES)


def test_a_family_is_random_as_a_whole_or_not_at_all() -> None:
    for name in all_names():
        others = dispatch_names(catalogue_name(name)) - {name}
        if name in RANDOM_OPERATORS and others and catalogue_name(name) not in ("Attention", "Dropout"):
            assert others <= RANDOM_OPERATORS, name


def test_every_operator_with_view_or_comm_in_its_name_is_in_its_family() -> None:
    assert {name for name in all_names() if name.endswith("View")} <= VIEWS
    assert {name for name in all_names() if name.startswith(("DistComm", "InnerComm"))} <= COLLECTIVES


def test_products_that_save_just_their_factors_are_products() -> None:
    assert PLAIN_PRODUCTS <= MATRIX_PRODUCTS


@pytest.mark.parametrize(
    ("dispatched", "name"),
    [
        ("TraceExt", "Trace"),
        ("FillV2", "Fill"),
        ("RemainderTensorScalar", "Remainder"),
        ("InnerIndex", "Index"),
        ("MaskedFillScalar", "MaskedFill"),
        ("InplaceAddExt", "InplaceAddExt"),
        ("ScatterAddExt", "ScatterAddExt"),
        ("TupleToTensor", "TupleToTensor"),
        ("NormalFloatTensor", "NormalFloatTensor"),
        ("MyOwn", "MyOwn"),
        ("MyOwnV2", "MyOwnV2"),
        ("make_range", "make_range"),
        ("", ""),
    ],
)
def test_a_variant_goes_by_the_name_of_its_operator(dispatched: str, name: str) -> None:
    assert catalogue_name(dispatched) == name


def test_a_dispatch_name_that_is_no_concept_means_itself() -> None:
    assert dispatch_names("MatMulExt") == {"MatMulExt"}
    assert dispatch_names("Embedding") == dispatch_names("Gather")


@pytest.mark.parametrize("name", ["", "Matmul", "matmul", "make_range", "Primitive", "View ", "*"])
def test_what_nothing_dispatches_means_nothing(name: str) -> None:
    assert dispatch_names(name) == frozenset()


@given(st.sampled_from(sorted(all_names())))
def test_a_rule_that_names_an_operator_s_concept_matches_it(dispatched: str) -> None:
    assert dispatched in dispatch_names(catalogue_name(dispatched))
    assert dispatched in dispatch_names(dispatched)
    assert why_refused(dispatched) == ""
    assert catalogue_name(catalogue_name(dispatched)) == catalogue_name(dispatched)


@given(st.text() | st.sampled_from(sorted(all_names())).map(str.swapcase))
def test_any_text_gets_an_answer(name: str) -> None:
    catalogue_name(name)
    why_refused(name)
    assert len(close_names(name)) <= 3
    assert all(dispatch_names(close) for close in close_names(name))


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("matmul", "MatMul"),
        ("ops.matmul", "MatMul"),
        ("MatMull", "MatMul"),
        ("mint.nn.functional.layer_norm", "LayerNorm"),
        ("rms_norm", "RmsNorm"),
        ("gelu", "GeLU"),
        ("flash_attention_score", "FlashAttentionScore"),
        ("attention", "Attention"),
        ("alltoall", "AlltoAll"),
    ],
)
def test_the_closest_name_comes_first(name: str, close: str) -> None:
    assert close_names(name)[0] == close


def test_nothing_is_close_to_nonsense() -> None:
    assert close_names("zzzzzz") == []
    assert close_names("") == []


def test_a_parameter_that_is_made_is_not_dispatched() -> None:
    assert seen(lambda: Parameter(numbers(3)).set_data(numbers(3))) == []


def test_importing_the_catalogue_imports_no_mindspore() -> None:
    code = "import importlib.util as u, sys; s = u.spec_from_file_location('c', sys.argv[1]); m = u.module_from_spec(s)"
    code += "; sys.modules['c'] = m; s.loader.exec_module(m); print('mindspore' in sys.modules)"
    path = sys.modules["ms_ops.catalogue"].__file__
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
