"""Telling MindSpore's compiler from Python. Seen in MindSpore 2.9.0 and 2.10.0.

A function passed to a constant expression arrives as None when a graph is compiled, and as itself in PyNative mode;
the comment `@jit.cond: True` behind an `if` has the compiler decide it while it reads the source.
"""

from typing import Any

from mindspore.ops.primitive import constexpr


def probe() -> int:
    """The function that is passed; never called."""
    return 0


@constexpr(check=False)
def compiling(function: Any) -> bool:
    """Whether the code that asks is being compiled into a graph (the argument is `probe`)."""
    return function is None


@constexpr(check=False)
def refuse_in_graph(where: str) -> None:
    """Stop the compilation: a PyNative policy would be ignored in the graph.

    Raises:
        RuntimeError: Always; MindSpore hands built-in types through unchanged.
    """
    raise RuntimeError(
        f"{where} is under a PyNative policy, which a compiled graph would ignore; give the plan mode='graph' "
        f"(apply_policy(net, {{'version': 1}}, mode='graph') for decorators), remove the policy before compiling "
        f"(plan.remove()), or run the cell in PyNative mode outside of ms.jit"
    )
