"""`SwapTensor`: its states and the one table of transitions."""

import itertools
from types import SimpleNamespace

import mindspore as ms
import pytest

from hyper_parallel import SwapStateError
from hyper_parallel.core.activation_memory.swap_tensor import LEGAL, Piece, SwapState, SwapTensor
from ms_ops.storage import Layout

S = SwapState
ALLOWED = {
    (S.RESIDENT, S.OFFLOADING),
    (S.RESIDENT, S.RELEASED),
    (S.OFFLOADING, S.ON_HOST),
    (S.OFFLOADING, S.RESIDENT),
    (S.OFFLOADING, S.RELEASED),
    (S.ON_HOST, S.LOADING),
    (S.ON_HOST, S.RELEASED),
    (S.LOADING, S.LOADED),
    (S.LOADING, S.ON_HOST),
    (S.LOADING, S.RELEASED),
    (S.LOADED, S.ON_HOST),
    (S.LOADED, S.RELEASED),
}
PAIRS = list(itertools.product(S, S))


def entry(state: SwapState = S.RESIDENT) -> SwapTensor:
    piece = Piece(SimpleNamespace(nbytes=24, address=64, layout=Layout((2, 3), ms.float32)), None)
    made = SwapTensor([piece], SimpleNamespace(path="layers.4"))
    made.state = state
    return made


def test_a_saved_tensor_begins_on_the_device() -> None:
    assert entry().state is S.RESIDENT


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair in ALLOWED])
def test_a_legal_transition_is_made(old: SwapState, new: SwapState) -> None:
    tensor = entry(old)
    tensor.move(new)
    assert tensor.state is new


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if pair not in ALLOWED])
def test_every_other_transition_raises_and_names_tensor_cell_and_states(old: SwapState, new: SwapState) -> None:
    tensor = entry(old)
    with pytest.raises(SwapStateError) as caught:
        tensor.move(new)
    assert tensor.state is old
    texts = ("layers.4", "(2, 3)", "float32", "24 bytes", f"{old.value} can't become {new.value}")
    assert all(text in str(caught.value) for text in texts)


@pytest.mark.parametrize("state", S)
def test_the_message_lists_what_is_legal(state: SwapState) -> None:
    tensor = entry(state)
    with pytest.raises(SwapStateError) as caught:
        tensor.move(state)
    legal = str(caught.value).split("legal from here: ")[1]
    assert legal == (", ".join(sorted(new.value for old, new in ALLOWED if old is state)) or "nothing")


def test_every_state_has_a_row() -> None:
    assert set(LEGAL) == set(S)
