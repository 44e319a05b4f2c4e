"""The page of a run: its figures, and that it needs nothing else."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CheckpointPolicy, SwapManager, activation_policy
from hyper_parallel.report.page import page
from hyper_parallel.report.run import Run, read_run
from hyper_parallel.report.run_plot import run_as_svg
from hyper_parallel.report.run_summary import summarize
from tests.helpers import Stack, gradients, numbers
from tests.report.runs import MB, Page, a_trace, levels, span, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write(tmp_path_factory.mktemp("run"), a_trace()))


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return page(run, summarize(run), "run.json")


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


@pytest.fixture
def page_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Run | dict], Page]:
    """Makes the page of a run or trace, without the picture, which takes a second."""
    monkeypatch.setattr("hyper_parallel.report.page.run_as_svg", lambda run: "<svg></svg>")

    def make(given: Run | dict) -> Page:
        run = given if isinstance(given, Run) else read_run(write(tmp_path, given))
        return Page(page(run, summarize(run), "run.json"))

    return make


def test_the_figures_at_the_top_are_those_of_the_trace(parsed: Page) -> None:
    assert parsed.figures == {"recorded": "2.000", "offloaded": "7.0", "loaded": "4.0", "waited": "30.0"}
    assert "MB in 3 copies" in parsed.text
    assert "waited, ms (1.5%)" in parsed.text


def test_residency_stands_against_its_limits(parsed: Page) -> None:
    assert [[row[0], *row[2:]] for row in parsed.tables["places"][1:]] == [
        ["resident", "6.0", "none", ""],
        ["pending", "3.0", "4.0", "75.0%"],
        ["window", "4.0", "2.0", "200.0%"],
        ["host", "7.0", "8.0", "87.5%"],
    ]


def test_waits_have_a_row_per_cell_and_cause(parsed: Page) -> None:
    assert parsed.tables["waits"][1:] == [
        ["layers.0", "forward waits for copies to host (limit: pending)", "1", "15.0", "15.0", "0.8%"],
        ["layers.1", "backward waits for a tensor", "2", "15.0", "10.0", "0.8%"],
    ]


def test_the_largest_tensors_are_named_with_their_cells(parsed: Page) -> None:
    assert parsed.tables["tensors"][1:] == [
        ["layers.0", "shape (4,), dtype float32", "3.0", "2", "1"],
        ["layers.1", "shape (2,), dtype float32", "1.0", "1", "1"],
    ]


def test_cells_have_a_row_each_with_what_was_left_alone(parsed: Page) -> None:
    assert parsed.tables["cells"] == [
        ["cell", "to host MB", "back MB", "waits ms", "parameters MB"],
        ["layers.0", "6.0", "3.0", "15.0", "1.0"],
        ["layers.1", "1.0", "1.0", "15.0", "0.0"],
    ]


def test_every_setting_is_there_in_words(parsed: Page) -> None:
    settings = dict(parsed.tables["settings"])
    assert set(settings) == set(SwapManager().settings.model_dump())
    assert (settings["pending"], settings["window"]) == ("4.0MiB", "2.0MiB")
    assert (settings["when_exhausted"], settings["verify"], settings["folder"]) == (
        "recompute, then keep",
        "no",
        "default",
    )


def test_the_page_needs_no_network_and_runs_no_script(text: str, parsed: Page) -> None:
    assert all(target.startswith(("#", "data:")) for target in parsed.targets)
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_page_is_readable_in_light_and_dark(text: str, parsed: Page) -> None:
    assert '<meta name="color-scheme" content="light dark">' in text
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert "fill: currentColor" in svg
    assert not re.search(r"(fill|stroke): #(000000|ffffff)", svg)


def test_every_id_of_the_page_is_there_once(text: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_picture_names_tracks_places_peaks_and_limits(parsed: Page) -> None:
    for words in ("compute", "wait", "offload", "load", "peak 6.0 MB", "peak 4.0 MB", "limit 2 MB", "limit 8 MB"):
        assert words in parsed.text


def test_names_are_escaped(page_of: Callable[[dict], Page]) -> None:
    trace = a_trace()
    trace["traceEvents"].append(span("offload", "<script>alert(1)</script>", 1.0, 0.1, bytes=9 * MB, cell="<b>"))
    found = page_of(trace)
    assert "script" not in found.tags
    assert found.tables["tensors"][1][:2] == ["<b>", "<script>alert(1)</script>"]


def test_a_trace_in_which_nothing_was_swapped_says_so(page_of: Callable[[dict], Page]) -> None:
    trace = a_trace()
    trace["traceEvents"] = []
    trace["otherData"]["stats"] = {}
    found = page_of(trace)
    assert "Nothing was copied while this was recorded." in found.text
    assert set(found.tables) == {"places", "settings"}


def test_counters_that_could_not_be_read_are_missed_aloud(page_of: Callable[[dict], Page]) -> None:
    trace = a_trace()
    trace["otherData"]["stats"] = None
    found = page_of(trace)
    assert "The counters could not be read when the trace was stopped" in found.text
    assert "cells" not in found.tables


def test_counters_that_began_before_the_trace_are_told(page_of: Callable[[dict], Page]) -> None:
    trace = a_trace()
    trace["otherData"]["stats"]["offloaded_bytes"] *= 2
    assert ", so that they hold more than the figures above" in page_of(trace).text


def test_a_part_of_a_run_says_which(run: Run, page_of: Callable[[Run], Page]) -> None:
    assert "The part from 0.500 to 1.000 seconds of the trace." in page_of(run.between(0.5, 1.0)).text


def test_the_picture_of_a_long_run_stays_small(tmp_path: Path) -> None:
    trace = a_trace()
    for step in range(2500):
        trace["traceEvents"] += [
            span("load", "t", step / 1250, 1e-4, bytes=1),
            levels(step / 1250, resident=step % 7 * MB),
        ]
    assert len(run_as_svg(read_run(write(tmp_path, trace)))) < 300_000


def test_a_run_gives_the_same_picture_twice(run: Run, text: str) -> None:
    assert run_as_svg(run) in text


class Tanh(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


def test_the_page_of_a_real_step_has_the_figures_of_stats(tmp_path: Path, page_of: Callable[[Run], Page]) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager.reset()
    try:
        with manager.trace(tmp_path / "run.json"):
            net = Stack([activation_policy(CheckpointPolicy.MUST_SWAP)(Tanh()) for _ in range(3)])
            gradients(net, numbers(512, 512), wait=True)
        stats = manager.stats()
    finally:
        manager.configure()
    found = page_of(read_run(tmp_path / "run.json"))
    assert found.figures["offloaded"] == f"{stats.offloaded_bytes / MB:.1f}" == "3.0"
    assert found.figures["loaded"] == f"{stats.loaded_bytes / MB:.1f}" == "3.0"
    peaks = {row[0]: row[2] for row in found.tables["places"][1:]}
    assert peaks == {place: f"{getattr(stats, f'{place}_peak_bytes') / MB:.1f}" for place in peaks}
    assert found.tables["cells"][1][:3] == ["Tanh", "3.0", "3.0"]
