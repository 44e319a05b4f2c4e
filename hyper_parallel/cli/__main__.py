"""``python -m hyper_parallel.cli`` is the `hyper-parallel` command."""

from hyper_parallel.cli import main

main()
