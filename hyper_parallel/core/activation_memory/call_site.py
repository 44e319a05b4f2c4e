"""Where in the user's code something happens, for messages."""

import sys

_OURS = ("hyper_parallel.core.", "ms_ops.", "mindspore.")


def call_site() -> str:
    """The innermost line that is neither ours nor MindSpore's, with its function and the class of its `self`."""
    frame = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    owner = frame.f_locals.get("self")
    cell = f" of {type(owner).__name__}" if owner is not None else ""
    return f" (at {frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}{cell})"
