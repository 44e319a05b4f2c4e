"""The ways to put a policy on a cell, and the policies: the other two sides of the table."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mindspore import nn

from hyper_parallel import (
    CheckpointPolicy,
    activation_policy,
    apply_policy,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)
from tests.exactness.programs.program import Around, Put
from tests.helpers import PREFER_RECOMPUTE, RECOMPUTE, SAVE, SWAP


class Wish(NamedTuple):
    """What one region is to do."""

    policy: CheckpointPolicy
    swap_inputs: bool = False


Mode = tuple[Wish, ...]
"""Regions inside one another, the outermost first."""

MODES: dict[str, Mode] = {
    "recompute": (Wish(RECOMPUTE),),
    "prefer recompute": (Wish(PREFER_RECOMPUTE),),
    "swap": (Wish(SWAP),),
    "swapped inputs": (Wish(RECOMPUTE, swap_inputs=True),),
    "recompute in recompute": (Wish(RECOMPUTE), Wish(RECOMPUTE)),
    "swap in recompute": (Wish(RECOMPUTE), Wish(SWAP)),
    "save in recompute": (Wish(RECOMPUTE), Wish(SAVE)),
    "recompute in swap": (Wish(SWAP), Wish(RECOMPUTE)),
}


class Called(nn.Cell):
    """A net whose `construct` hands its cell to `checkpoint()` or `swap()`."""

    def __init__(self, call: Callable[..., Any], cell: nn.Cell) -> None:
        super().__init__()
        self.call, self.cell = call, cell

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.cell, *args, **kwargs)


def _class(cell: nn.Cell, wish: Wish) -> nn.Cell:
    base: Any = type(cell)

    @activation_policy(wish.policy, swap_inputs=wish.swap_inputs)
    class Decorated(base):
        def construct(self, *args: Any, **kwargs: Any) -> Any:
            return super().construct(*args, **kwargs)

    cell.__class__ = Decorated
    return cell


def _instance(cell: nn.Cell, wish: Wish) -> nn.Cell:
    return activation_policy(wish.policy, swap_inputs=wish.swap_inputs)(cell)


def _wrapper(cell: nn.Cell, wish: Wish) -> nn.Cell:
    return swap_wrapper(cell) if wish.policy.swaps else checkpoint_wrapper(cell, swap_inputs=wish.swap_inputs)


def _function(cell: nn.Cell, wish: Wish) -> nn.Cell:
    return Called(swap if wish.policy.swaps else partial(checkpoint, swap_inputs=wish.swap_inputs), cell)


def _nested(one: Callable[[nn.Cell, Wish], nn.Cell]) -> Callable[[nn.Cell, Mode], nn.Cell]:
    def put(cell: nn.Cell, mode: Mode) -> nn.Cell:
        *outer, innermost = mode
        cell = one(cell, innermost)
        for wish in reversed(outer):
            cell = one(Around(cell), wish)
        return cell

    return put


def _file(cell: nn.Cell, mode: Mode) -> nn.Cell:
    rules, path = [], []
    for wish in mode:
        path.append("cell")
        rule: dict[str, Any] = {"cells": ".".join(path), "policy": wish.policy.name.lower()}
        rules.append({**rule, "swap_inputs": True} if wish.swap_inputs else rule)
        cell = Around(cell)
    apply_policy(cell, {"version": 1, "rules": rules})
    return cell


ENTRIES: dict[str, Callable[[nn.Cell, Mode], nn.Cell]] = {
    "decorated class": _nested(_class),
    "decorated instance": _nested(_instance),
    "wrapper": _nested(_wrapper),
    "function": _nested(_function),
    "policy file": _file,
}


WORDS = dict.fromkeys(("wrapper", "function"), (RECOMPUTE, SWAP))
"""Entries that know no other policy."""

WAYS = [
    (entry, mode)
    for entry in ENTRIES
    for mode, wishes in MODES.items()
    if all(wish.policy in WORDS.get(entry, CheckpointPolicy) for wish in wishes)
]
"""Every mode by every entry that has a word for it."""


def put_by(entry: str, mode: str) -> Put:
    """Puts a mode on a cell, by an entry."""
    return lambda cell: ENTRIES[entry](cell, MODES[mode])
