"""`SwapManager().configure()`, `adopt()`, `reset()`: settings are validated, agree, and change only between steps."""

import dataclasses
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor

from hyper_parallel import (
    CheckpointPolicy,
    HostMemoryError,
    PolicyError,
    SwapManager,
    SwapStateError,
    activation_policy,
)
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import SwapStats
from tests.helpers import Layer, Stack, gradients, numbers

P = CheckpointPolicy


def test_there_is_one_manager() -> None:
    assert SwapManager() is SwapManager()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tier": "ram"}, "tier='ram'.*'file' or 'host'"),
        ({"tier": 3}, "tier=3"),
        ({"window": "32MX"}, "window='32MX'.*byte unit"),
        ({"window": 0}, "window=0.*greater than 0"),
        ({"window": -1}, "window=-1"),
        ({"window": 1.5}, "window=1.5.*whole number of bytes or a string like '32MiB'"),
        ({"window": True}, "window=True.*whole number"),
        ({"pending": 0}, "pending=0"),
        ({"host_budget": -1}, "host_budget=-1"),
        ({"host_budget": "-3MiB"}, "host_budget='-3MiB'"),
        ({"min_bytes": "many"}, "min_bytes='many'"),
        ({"folder": 3}, "folder=3"),
        ({"when_exhausted": "keep"}, "when_exhausted='keep'"),
        ({"tier": "host", "direct_io": True}, "Value error, direct_io is for the file tier"),
        ({"when_exhausted": ["recompute", "wait"]}, "when_exhausted.1='wait'"),
    ],
)
def test_a_bad_value_is_named_and_changes_nothing(manager: SwapManager, given: dict[str, Any], named: str) -> None:
    before = manager.settings
    with pytest.raises(ValueError, match=rf"configure\(\): .*{named}"):
        manager.configure(**given)
    assert manager.settings is before


def test_every_bad_value_is_named_at_once(manager: SwapManager) -> None:
    with pytest.raises(ValueError, match=r"window=0.*pending='x'"):
        manager.configure(window=0, pending="x")


def test_an_unknown_keyword_is_refused(manager: SwapManager) -> None:
    with pytest.raises(TypeError, match="windows"):
        manager.configure(windows="32MiB")  # type: ignore[call-arg]


def test_an_unknown_key_of_a_file_is_named(manager: SwapManager) -> None:
    with pytest.raises(ValueError, match=r"p\.yaml: windows=1"):
        manager.adopt({"windows": 1}, "p.yaml")


@pytest.mark.parametrize(("given", "size"), [("1MiB", 2**20), ("1MB", 10**6), (4096, 4096), ("1.5KiB", 1536)])
def test_sizes_are_bytes_or_strings_with_a_unit(manager: SwapManager, given: Any, size: int) -> None:
    manager.configure(window=given, pending=given, min_bytes=given, host_budget=given)
    chosen = manager.settings
    assert [chosen.window, chosen.pending, chosen.min_bytes, chosen.host_budget] == [size] * 4


def test_configure_without_arguments_gives_the_defaults_back(manager: SwapManager) -> None:
    manager.configure(tier="host", window=1)
    manager.configure()
    assert manager.settings == SwapSettings()


def test_a_second_configure_replaces_the_first(manager: SwapManager) -> None:
    manager.configure(window=5)
    manager.configure(pending=7)
    assert (manager.settings.window, manager.settings.pending) == (SwapSettings().window, 7)


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_that_is_none_raises_now_and_names_it(manager: SwapManager, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "spill"
    if kind == "a file":
        folder.write_text("")
    before = manager.settings
    with pytest.raises(HostMemoryError, match=rf"can't be used: {folder}: not a folder; give another one with folder="):
        manager.configure(folder=folder)
    assert manager.settings is before


def test_a_folder_whose_disk_refuses_files_raises_now(
    manager: SwapManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(HostMemoryError, match=r"Permission denied.*or use tier='host'"):
        manager.configure(folder=tmp_path)


def test_a_file_that_says_the_same_agrees(manager: SwapManager) -> None:
    manager.configure(window="1MiB")
    undo = manager.adopt({"window": 2**20, "tier": "host"}, "p.yaml")
    assert (manager.settings.window, manager.settings.tier) == (2**20, "host")
    undo()
    assert (manager.settings.window, manager.settings.tier) == (2**20, "file")


def test_a_file_that_contradicts_configure_names_key_and_both(manager: SwapManager) -> None:
    manager.configure(window="1MiB")
    with pytest.raises(PolicyError, match=r"'window': configure\(\) says 1048576, p\.yaml says 5; they must agree"):
        manager.adopt({"window": 5}, "p.yaml")
    assert manager.settings.window == 2**20


def test_configure_that_contradicts_an_applied_file_is_refused(manager: SwapManager) -> None:
    undo = manager.adopt({"window": 5}, "p.yaml")
    try:
        with pytest.raises(PolicyError, match=r"configure\(\) says 6, p\.yaml says 5"):
            manager.configure(window=6)
        assert manager.settings.window == 5
    finally:
        undo()


def test_two_files_that_contradict_are_refused_until_one_is_gone(manager: SwapManager) -> None:
    undo_first = manager.adopt({"pending": 5}, "a.yaml")
    with pytest.raises(PolicyError, match=r"a\.yaml says 5, b\.yaml says 6"):
        manager.adopt({"pending": 6}, "b.yaml")
    undo_first()
    undo_second = manager.adopt({"pending": 6}, "b.yaml")
    assert manager.settings.pending == 6
    undo_second()


def test_equal_files_are_undone_one_by_one(manager: SwapManager) -> None:
    undo_first, undo_second = (manager.adopt({"pending": 5}, "a.yaml") for _ in range(2))
    undo_first()
    assert manager.settings.pending == 5
    undo_second()
    assert manager.settings.pending == SwapSettings().pending


def live_step(manager: SwapManager, act: Any) -> None:
    """Call `act` while tensors are swapped."""
    net = Stack([activation_policy(P.MUST_SWAP)(Layer()) for _ in range(2)])

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        assert manager.stats().live_bytes > 0
        act()
        return y

    ms.grad(forward)(numbers(4, 4))


def test_settings_do_not_change_while_tensors_are_swapped(manager: SwapManager) -> None:
    before = manager.settings

    def act() -> None:
        with pytest.raises(SwapStateError, match=r"can't change \(configure\(\)\) while \d+ bytes are swapped"):
            manager.configure(window=77)
        assert manager.settings is before

    live_step(manager, act)


def test_the_same_settings_may_be_given_while_tensors_are_swapped(manager: SwapManager) -> None:
    live_step(manager, lambda: manager.configure(min_bytes=0))


def test_reset_during_a_step_keeps_what_is_live(manager: SwapManager) -> None:
    def act() -> None:
        live = manager.stats().live_bytes
        manager.reset()
        assert manager.stats().live_bytes == live

    live_step(manager, act)


def test_statistics_before_anything_was_swapped_are_zero(manager: SwapManager) -> None:
    manager.configure(window=1234)
    assert manager.stats() == SwapStats()
    manager.reset()
    assert manager.stats() == SwapStats()


def test_reset_zeroes_the_counters_and_keeps_the_settings(manager: SwapManager) -> None:
    gradients(Stack([activation_policy(P.MUST_SWAP)(Layer()) for _ in range(3)]), numbers(4, 4), wait=True)
    settings = manager.settings
    assert manager.stats().offloaded_bytes > 0
    manager.reset()
    assert manager.stats() == SwapStats()
    assert manager.settings is settings


def test_statistics_are_frozen_and_have_the_promised_fields(manager: SwapManager) -> None:
    stats = manager.stats()
    for name in [
        "live_bytes",
        "host_live_bytes",
        "offloaded_bytes",
        "loaded_bytes",
        "duplicate_bytes",
        "resident_peak_bytes",
        "host_peak_bytes",
        "wait_seconds",
    ]:
        assert getattr(stats, name) == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.live_bytes = 1  # type: ignore[misc]


def test_the_default_budget_is_half_of_the_memory_divided_by_the_ranks(
    manager: SwapManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyper_parallel.core.activation_memory.swap_configuration.container_bytes", lambda: 1000)
    monkeypatch.setattr("hyper_parallel.core.activation_memory.swap_configuration.ranks_on_this_host", lambda: 4)
    manager.configure(tier="host")
    assert manager.engine.tier.limit == 125
