"""What the command line's worker processes find in their environment."""

import os
from pathlib import Path


def worker_environment(log_level: str, **variables: str) -> dict[str, str]:
    """This process's environment for a worker that may run elsewhere.

    Args:
        log_level: MindSpore's, unless the user has set one.
        variables: What the worker is told besides.

    Returns:
        The environment. This package comes first on the path: one found through a relative path, or beside the program,
        would not be found elsewhere.
    """
    environment = {**os.environ, **variables}
    environment.setdefault("GLOG_v", log_level)
    package_parent = str(Path(__file__).resolve().parent.parent)
    known = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package_parent, known] if known else [package_parent])
    return environment
