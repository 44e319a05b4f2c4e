"""What cell patterns match."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import PolicyError
from hyper_parallel.policy_file.patterns import parse_pattern

names = st.text(alphabet="abxyz_0123456789", min_size=1, max_size=6)
paths = st.lists(names, min_size=1, max_size=5).map(".".join)


@given(paths, paths)
def test_a_literal_path_matches_itself_and_nothing_else(pattern: str, path: str) -> None:
    assert parse_pattern(pattern).matches(pattern)
    assert parse_pattern(pattern).matches(path) == (pattern == path)


@given(paths)
def test_two_stars_match_every_path(path: str) -> None:
    assert parse_pattern("**").matches(path)


@given(paths, paths)
def test_two_stars_stand_for_any_number_of_segments(head: str, tail: str) -> None:
    assert parse_pattern("**." + tail).matches(f"{head}.{tail}")
    assert parse_pattern(head + ".**").matches(f"{head}.{tail}")
    assert parse_pattern(f"{head}.**.{tail}").matches(f"{head}.x.y.{tail}")


@given(paths)
def test_two_stars_stand_for_no_segment_too(path: str) -> None:
    assert parse_pattern("**." + path).matches(path)
    assert parse_pattern(path + ".**").matches(path)


@given(paths)
def test_as_many_stars_as_segments_match(path: str) -> None:
    depth = path.count(".") + 1
    assert parse_pattern(".".join("*" * depth)).matches(path)
    assert not parse_pattern(".".join("*" * (depth + 1))).matches(path)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_range_includes_both_ends(one: int, other: int, index: int) -> None:
    low, high = sorted((one, other))
    assert parse_pattern(f"layers.[{low}-{high}].mlp").matches(f"layers.{index}.mlp") == (low <= index <= high)


@given(st.lists(st.sampled_from(["*", "a", "b", "ab", "."]), min_size=1, max_size=12), st.text("ab.", max_size=12))
def test_stars_match_what_the_regular_expression_matches(parts: list[str], path: str) -> None:
    text = re.sub(r"\*+", "*", "".join(parts))
    if not all(text.split(".")) or not all(path.split(".")):
        return
    expected = re.fullmatch(text.replace(".", r"\.").replace("*", "[^.]*"), path) is not None
    assert parse_pattern(text).matches(path) == expected


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers.*", "layers.3"),
        ("layers.*.norm*", "layers.3.norm2"),
        ("*_proj", "q_proj"),
        ("**.mlp", "mlp"),
        ("**.mlp", "a.b.mlp"),
        ("a.**.b.**.c", "a.b.b.x.c"),
        ("layers.[3]", "layers.3"),
        ("block[0-3].mlp", "block2.mlp"),
        ("*[1-2]", "block2"),
        ("[0-2]*", "1x"),
        ("[1]x[2]", "1x2"),
    ],
)
def test_a_pattern_matches(pattern: str, path: str) -> None:
    assert parse_pattern(pattern).matches(path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers.*", "layers"),
        ("layers.*", "layers.3.mlp"),
        ("layers", "layers.3"),
        ("layer", "layers"),
        ("**.mlp", "a.mlp.b"),
        ("**.mlp", "a.xmlp"),
        ("layers.[0-5]", "layers.6"),
        ("layers.[0-5]", "layers.x"),
        ("layers.[0-5]", "layers.03"),
        ("layers.[0]", "layers.00"),
        ("*[1-2]", "block12"),
        ("[1-2]*", "10"),
        ("a.**.b", "a"),
    ],
)
def test_a_pattern_does_not_match(pattern: str, path: str) -> None:
    assert not parse_pattern(pattern).matches(path)


@pytest.mark.parametrize("pattern", ["**", "*", "**.**"])
def test_no_pattern_names_the_net_itself(pattern: str) -> None:
    assert not parse_pattern(pattern).matches("")


def test_a_pattern_with_many_stars_is_not_slow() -> None:
    assert not parse_pattern("*a" * 100).matches("a" * 1000 + "b")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "it is empty"),
        (".a", "a segment is empty"),
        ("a..b", "a segment is empty"),
        ("a.", "a segment is empty"),
        ("a**", "'**' must stand alone"),
        ("a.***", "'**' must stand alone"),
        ("a.[", "expected an index [a] or a range [a-b] of whole numbers at '['"),
        ("a.[]", "expected an index"),
        ("a.[x]", "expected an index"),
        ("a.[0-]", "expected an index"),
        ("a.[-1]", "expected an index"),
        ("a.[0-5", "expected an index"),
        ("a.[0,1]", "expected an index"),
        ("a.[0.5]", "expected an index"),
        ("a.[٣]", "expected an index"),
        ("a.[" + "9" * 900 + "]", "expected an index"),
        ("a.0]", "']' closes a range that no '[' opened"),
        ("a.[5-2]", "the range [5-2] is empty; write [2-5]"),
        ("block1[2-3]", "no digit or second range may touch it"),
        ("block[2-3]0", "no digit or second range may touch it"),
        ("block[0-1][2-3]", "no digit or second range may touch it"),
    ],
)
def test_a_malformed_pattern_is_an_error_that_says_why(pattern: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(reason)) as caught:
        parse_pattern(pattern)
    assert repr(pattern) in str(caught.value)


def test_a_pattern_prints_as_it_was_written() -> None:
    assert str(parse_pattern("layers.[0-5].*")) == "layers.[0-5].*"
