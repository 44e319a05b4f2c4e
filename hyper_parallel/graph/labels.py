"""The scopes of a flagged net's cells: they name the cells by path, and the recomputed ones as MindSpore wants it."""

from ms_ops.graph_flags import RECOMPUTED
from ms_ops.graph_ir import BACKWARD

_NET = "(net)"
"""What the net itself runs: no path, which a cell might have."""
_PLAIN = "="
"""Stands before a path that begins as the scopes do in which the compiler sees something else."""


def label_of(path: str, recomputed: bool) -> str:
    """The scope of what a cell runs.

    Args:
        path: Of the cell.
        recomputed: Whether it is computed again.
    """
    name = (_PLAIN if path.startswith((RECOMPUTED[:-1], BACKWARD, _PLAIN)) else "") + (path or _NET)
    return (RECOMPUTED if recomputed else "") + name


def path_in(scope: str) -> tuple[str, bool]:
    """The path that a scope names, and whether it is that of a recomputed cell.

    Args:
        scope: Of a node; it may be none of a flagged net's.
    """
    label = scope.partition("/")[0]
    name = label.removeprefix(RECOMPUTED)
    return ("" if name == _NET else name.removeprefix(_PLAIN)), label.startswith(RECOMPUTED)
