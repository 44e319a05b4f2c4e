"""Processes of the scripts that run on the emulated Ascend device. Doesn't import MindSpore."""

import os
import sys
from pathlib import Path


def need_emulator() -> None:
    """End this program, unless it was started on the emulated device."""
    if not os.environ.get("ASCSIM_LIBRARY"):
        sys.exit("no emulated device; start it with: bash scripts/ascend_emulator/run.sh python " + " ".join(sys.argv))


def environment(**variables: str) -> dict[str, str]:
    """The environment of a script's own processes: this one's, with the repository on the path and MindSpore quiet."""
    path = f"{Path(__file__).resolve().parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "GLOG_v": "4", "PYTHONPATH": path, **variables}
