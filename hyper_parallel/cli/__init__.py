"""The `hyper-parallel` command. Importing this package needs none of the command's own libraries."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the `hyper-parallel` command; without its libraries, say how to get them and exit with status 2."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"hyper-parallel: the command needs {' and '.join(missing)}; install with: "
            "pip install 'hyper-parallel[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from hyper_parallel.cli.commands import command

    command(prog_name="hyper-parallel")
