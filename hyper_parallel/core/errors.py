"""The one family of errors that `hyper_parallel` raises.

Mistakes in arguments (a wrong type, a value out of range) are the built-in TypeError and ValueError; what is about
activation memory derives from `ActivationMemoryError`, so that one `except` clause catches all of it.
"""


class ActivationMemoryError(Exception):
    """Base of every error that is about activation memory."""


class PolicyError(ActivationMemoryError):
    """A policy is no policy, contradicts another one, matches nothing, or can't be honoured."""


class ReplayMismatchError(ActivationMemoryError):
    """A replay did something else than the forward that it repeats."""


class SwapStateError(ActivationMemoryError):
    """A swapped tensor, or the swap manager, was asked for something that its state doesn't allow."""


class HostMemoryError(ActivationMemoryError):
    """The host budget or the disk behind the swap tier is exhausted or can't be used."""
