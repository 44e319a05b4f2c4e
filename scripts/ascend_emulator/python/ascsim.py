"""Steering and reading the emulated device from inside a program that runs on it: `import ascsim`.

`run.sh` puts this module on the path. A program that runs on a real device can't import it.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

_library = ctypes.CDLL(os.environ["ASCSIM_LIBRARY"])
_library.ascsim_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
_library.ascsim_mark.argtypes = [ctypes.c_char_p]
for _reader in (_library.ascsim_counters_json, _library.ascsim_races_json):
    _reader.argtypes, _reader.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t


def _read(reader: Any) -> Any:
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = reader(buffer, size)
        if needed <= size:
            return json.loads(buffer.value)
        size = needed + (1 << 16)


def set_knob(name: str, value: float) -> None:
    """Change a setting that is a number, for instance `set_knob("ASCSIM_SEED", 7)`.

    Work that is on a stream already may still go by the old value.

    Raises:
        ValueError: There is no such setting, or it can't be changed while the program runs.
    """
    if _library.ascsim_set(name.encode(), value) != 0:
        raise ValueError(f"{name} can't be set to {value} while the program runs")


def mark(text: str) -> None:
    """Write a mark into the trace. Calls that follow, of any thread, carry it, also in the reports of races."""
    _library.ascsim_mark(text.encode())


def counters() -> dict[str, Any]:
    """What was counted since the start, or since `reset_counters`."""
    return _read(_library.ascsim_counters_json)


def reset_counters() -> None:
    """Count from 0 again. What is in use stays, and is the new peak."""
    _library.ascsim_counters_reset()


def races() -> list[dict[str, Any]]:
    """The races found so far."""
    return _read(_library.ascsim_races_json)


def forget_races() -> None:
    """Forget the races found so far: they are neither reported at the end nor do they make the program fail."""
    _library.ascsim_races_reset()
