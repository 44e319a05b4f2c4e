"""The example of the page about Ascend runs, here on a CPU: nothing in it names a device."""

import re
from pathlib import Path
from typing import Any

from hyper_parallel import SwapManager

TEXT = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text("utf-8")


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    SwapManager().reset()
    try:
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(code, "docs/ascend.md", "exec"), names)
        assert names["stats"].parameter_bytes > 0  # the layers ran as swapped regions
    finally:
        SwapManager().configure()


def test_every_file_that_it_names_is_there() -> None:
    root = Path(__file__).parents[2]
    names = re.findall(r"`((?:ms_ops|tests)/[\w/.]+)`", TEXT)
    assert names
    assert all((root / name).exists() for name in names)
