"""The page about swapping names everything that there is, and nothing else."""

import re
from pathlib import Path

import pytest

from hyper_parallel import SwapManager
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import CellStats, SwapStats

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "swap.md").read_text("utf-8")


def rows_of(heading: str) -> list[list[str]]:
    """The first table below a heading, without its head."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (table, *_) = re.findall(r"(?:^\|.*\n)+", section, re.M)
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()[2:]]


def test_every_setting_has_a_row() -> None:
    assert [row[0].strip("` ") for row in rows_of("Settings")] == list(SwapSettings.model_fields)


@pytest.mark.parametrize("setting", ["window", "pending", "min_bytes", "fuse_below", "slab"])
def test_sizes_have_the_default_that_the_page_says(setting: str) -> None:
    says = {row[0].strip("` "): row[1] for row in rows_of("Settings")}[setting]
    assert getattr(SwapSettings(), setting) == int(says.removesuffix(" MiB")) * 2**20


def test_every_counter_of_what_was_not_moved_has_a_row() -> None:
    moved = {"offloaded_bytes", "loaded_bytes", "evicted_bytes"}
    left = {name for name in CellStats.__dataclass_fields__ if name.endswith("_bytes")} - moved
    assert {row[0].strip("` ") for row in rows_of("What is left alone")} == left


def test_every_place_has_its_peak() -> None:
    peaks = [row[2].strip("`") for row in rows_of("Limits")]
    assert peaks == [name for name in SwapStats.__dataclass_fields__ if name.endswith("_peak_bytes")]


def test_every_call_by_hand_exists() -> None:
    calls = [re.sub(r"\(.*", "", row[0].strip("` ")) for row in rows_of("Moving groups by hand")]
    assert calls == ["launch_offload", "wait_offload", "launch_load", "wait_load", "is_last_group"]
    assert all(callable(getattr(SwapManager, call)) for call in calls)


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text("utf-8"), flags=re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        there = (DOCS / target) if target else DOCS / page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.M)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], anchor
