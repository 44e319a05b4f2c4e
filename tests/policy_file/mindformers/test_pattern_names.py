"""What MindFormers' regular expressions name, written as cells and operators of a policy file."""

import re
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.policy_file.mindformers.names import OPERATORS, Names, Place
from hyper_parallel.policy_file.patterns import parse_pattern
from ms_ops.catalogue import dispatch_names

GRAPH, PYNATIVE = Names({}, split_on_escaped_dots=True), Names({}, split_on_escaped_dots=False)

PATHS = [
    "mlp",
    "mlp.linear_fc1",
    "mlp.experts",
    "mlp.experts.0",
    "mlp.experts.0.linear_fc1",
    "input_layernorm",
    "self_attention",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.core_attention.layernorm",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "mlp",
        "mlp.*",
        r"mlp\..*",
        ".*",
        ".*layernorm",
        r".*\.linear_fc1",
        r"mlp\..*\.linear_fc1",
        r"self_attention.*\.layernorm",
        "mlp|input_layernorm",
        r"(?:mlp|self_attention)\.(linear_fc1|linear_qkv)",
        r"^self_attention\.core_attention$",
        r"mlp\.experts\.\d+\.linear_fc1",
        r"self_attention\.[a-z]+_attention",
    ],
)
def test_cells_are_those_that_the_expression_matches_or_that_are_in_one(pattern: str) -> None:
    matched = {path for path in PATHS if re.fullmatch(pattern, path)}
    places = [parse_pattern(place.cells) for place in PYNATIVE.places(pattern)]
    named = {path for path in PATHS if any(place.matches(path) for place in places)}
    assert _with_what_is_below(named) == _with_what_is_below(matched)


def _with_what_is_below(paths: set[str]) -> set[str]:
    return {path for path in PATHS if any(path == outer or path.startswith(outer + ".") for outer in paths)}


@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (r"feed_forward\.mul", Place("feed_forward", ("Mul",))),
        (r"feed_forward\.w1\.activation\.silu", Place("feed_forward", ("SiLU",))),
        (r".*\.norm", Place("*", ("RmsNorm", "LayerNorm"))),
        (r".*\.flash_attention", Place("*", ("Attention",))),
        ("add2", Place("", ("Add",))),
        ("attention", Place("attention")),
        (r"feed_forward\.w1", Place("feed_forward.w1")),
    ],
)
def test_an_operator_counts_for_the_part_of_the_layer_that_it_is_in(pattern: str, place: Place) -> None:
    assert GRAPH.places(pattern) == [place]


def test_a_user_says_what_an_attribute_holds() -> None:
    names = Names({"activation_func": ("SiLU",), "norm": ()}, split_on_escaped_dots=True)
    assert names.places(r"mlp\.activation_func") == [Place("mlp", ("SiLU",))]
    assert names.places(r"input_layernorm\.norm") == [Place("input_layernorm.norm")]


def test_every_operator_has_a_name_that_policies_know() -> None:
    assert all(dispatch_names(operator) for operators in OPERATORS.values() for operator in operators)


def test_what_dotted_patterns_cannot_say_stays_an_expression() -> None:
    assert PYNATIVE.places(r"mlp\.\w+") == [Place(r"re:mlp\.\w+")]


@pytest.mark.parametrize("pattern", ["", "   ", "(", "a" * 401])
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"regular expression"):
        PYNATIVE.places(pattern)


def test_a_dot_in_a_name_of_graph_mode_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"between two names write \\\."):
        GRAPH.places("feed_forward.mul")


@settings(deadline=None)
@given(st.text(alphabet="abm.*|()\\?+[]^$0", max_size=30))
def test_any_text_is_read_or_refused(pattern: str) -> None:
    for names in (GRAPH, PYNATIVE):
        with suppress(ValueError):
            assert names.places(pattern)
