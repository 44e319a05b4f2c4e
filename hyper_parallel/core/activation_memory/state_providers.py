"""State that the code of a region depends on and nobody can find by looking: given by its owner as a get and a set."""

import contextlib
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hyper_parallel.core.errors import PolicyError


class StateProvider:
    """One piece of state; made by `register_state_provider`.

    Args:
        name: What it is, for messages.
        get: Gives the state.
        set: Makes what `get` gave the state again.
        same: Whether two things that `get` gave are the same state; by default, nobody knows.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        same: Callable[[Any, Any], bool] = lambda one, other: False,
    ) -> None:
        self.name = name
        self.get = get
        self.set = set
        self.same = same

    def remove(self) -> None:
        """Forget it; replays of forwards that have run still use it."""
        _providers.pop(self.name, None)

    def __repr__(self) -> str:
        return f"StateProvider({self.name!r})"


_providers: dict[str, StateProvider] = {}


def register_state_provider(name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> StateProvider:
    """Have every replay run under a state as it was in its forward: a generator, a thread-local flag, a counter.

    numpy's global generator, Python's `random`, MindSpore's default generator and mixed precision are covered without
    this, and so are attributes of the cells in a region and variables that its functions close over.

    Args:
        name: What it is, for messages; unique.
        get: Called without arguments when the forward of a replayed region begins; must give a value that later changes
            of the state don't change. Called again when its replay begins.
        set: Called with what `get` gave: before the replay with the forward's state, after it with the present one.

    Returns:
        A handle; `.remove()` ends it.

    Raises:
        PolicyError: The name is taken, or `get` or `set` can't be called.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel import register_state_provider
        >>> state = {"scale": 1.0}
        >>> provider = register_state_provider("scale", lambda: state["scale"], lambda x: state.update(scale=x))
        >>> provider.remove()
    """
    if not callable(get) or not callable(set):
        raise PolicyError(f"state provider {name!r}: get and set must be callable, but got {get!r} and {set!r}")
    if name in _providers or name in (built_in.name for built_in in _BUILT_IN):
        raise PolicyError(f"state provider {name!r} is registered already; remove that one first, or use another name")
    provider = _providers[name] = StateProvider(name, get, set)
    return provider


_numpy_generator: Any = np.random.mtrand._rand


def _is_same_numpy_state(one: Any, other: Any) -> bool:
    rest = ("bit_generator", "has_gauss", "gauss")
    return all(one[name] == other[name] for name in rest) and _flat(one["state"]) == _flat(other["state"])


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in state.items()}


_BUILT_IN = (
    StateProvider(
        "numpy.random",
        lambda: _numpy_generator.get_state(legacy=False),
        lambda state: _numpy_generator.set_state(state),
        _is_same_numpy_state,
    ),
    StateProvider("random", random.getstate, random.setstate, operator.eq),
)


class ProvidedState:
    """The state of every provider, as it is when this object is made."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states = [(provider, provider.get()) for provider in (*_BUILT_IN, *_providers.values())]

    def since(self, before: "ProvidedState") -> "ProvidedState | None":
        """This without what was the same before; None if nothing is left."""
        self._states = [
            (provider, state)
            for provider, state in self._states
            if not any(provider is other and provider.same(state, held) for other, held in before._states)
        ]
        return self if self._states else None

    def set(self) -> None:
        """Make it the state."""
        for provider, state in self._states:
            provider.set(state)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The state as it was, inside; as it is, afterwards."""
        with contextlib.ExitStack() as after:  # every state is put back, even if putting one back fails
            for provider, state in self._states:
                after.callback(provider.set, provider.get())
                provider.set(state)
            yield
