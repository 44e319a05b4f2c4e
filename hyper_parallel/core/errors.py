"""The one family of errors that `hyper_parallel` raises.

What is about activation memory derives from `ActivationMemoryError`, so that one `except` clause catches all of it; a
bad policy is a ValueError or TypeError, too. Other mistakes in arguments are the built-in TypeError and ValueError.
"""

from typing import Any


class ActivationMemoryError(Exception):
    """Base of every error that is about activation memory."""


class PolicyError(ActivationMemoryError, ValueError):
    """A policy is no policy, contradicts another one, matches nothing, or can't be honoured."""

    problems: tuple[Any, ...] = ()
    """Of a policy file: all that is wrong with it, one by one, each with a `message` and a `position` in the file."""


class PolicyTypeError(PolicyError, TypeError):
    """Something of the wrong type stands where a policy, or what it goes on, belongs."""


class ReplayMismatchError(ActivationMemoryError):
    """A replay did something else than the forward that it repeats."""


class SwapStateError(ActivationMemoryError):
    """A swapped tensor, or the swap manager, was asked for something that its state doesn't allow."""


class HostMemoryError(ActivationMemoryError):
    """The host budget or the disk behind the swap tier is exhausted or can't be used."""


class NoBenefitWarning(UserWarning):
    """A policy is honoured, but can't lower the memory that training needs."""


class PolicyOverruledWarning(UserWarning):
    """What a policy function answered for an operator can't be honoured, and something else is done, as it says."""
