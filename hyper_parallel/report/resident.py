"""Resident memory of this process: now, at its peak, and against time."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Give the resident memory of this process.

    Returns:
        Bytes.

    Raises:
        RuntimeError: The system has no ``/proc/self/statm``.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.report.resident import peak_resident_bytes, resident_bytes
        >>> 0 < resident_bytes() <= peak_resident_bytes()
        True
    """
    return int(_read(_STATM).split()[1]) * _PAGE


def peak_resident_bytes() -> int:
    """Give the highest resident memory that this process has had.

    It is VmHWM of ``/proc/self/status``: `getrusage` gives a child the peak of the process that started it, which
    hides what a small child needs.

    Returns:
        Bytes.

    Raises:
        RuntimeError: The system has no ``/proc/self/status``.

    Supported Platforms:
        ``CPU``
    """
    for line in _read(_STATUS).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected a line VmHWM in {_STATUS}, but found none")


def reset_peak() -> bool:
    """Bring the peak of resident memory down to what is resident now, where the system allows it.

    Returns:
        Whether it was allowed. If not, the peak includes what was resident for a moment earlier.

    Supported Platforms:
        ``CPU``
    """
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError as error:
        raise RuntimeError(f"memory figures come from {path}, which can't be read here: {error.strerror}") from error


class ResidentSampler:
    """Samples the resident memory of this process on a thread, while the `with` block runs.

    Args:
        interval: Seconds between two samples. A shorter one shows shorter peaks and takes more of the interpreter.
        clock: What gives the time, in seconds.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.report.resident import ResidentSampler
        >>> with ResidentSampler(interval=0.001) as sampler:
        ...     pass
        >>> len(sampler.samples) >= 2
        True
    """

    def __init__(self, interval: float = 0.01, clock: Callable[[], float] = time.perf_counter) -> None:
        self.samples: list[tuple[float, int]] = []
        """Pairs of the clock's time and bytes."""
        self._interval, self._clock = interval, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident-sampler", daemon=True)

    def __enter__(self) -> "ResidentSampler":
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        self.samples.append((self._clock(), resident_bytes()))
