"""How much memory there is, and how much this process uses."""

import os
from pathlib import Path

_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def container_bytes() -> int:
    """Bytes of memory this process may use: the control group's limit, or the machine's memory if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMIT_FILES:
        try:
            return min(total, int(file.read_text()))
        except (OSError, ValueError):  # no such file; "max" when unlimited
            continue
    return total


def ranks_on_this_host() -> int:
    """How many training processes share this host, by the variables that MindSpore's launcher and MPI set."""
    for name in ("MS_LOCAL_WORKER_NUM", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1
