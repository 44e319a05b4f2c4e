"""Random nets under random policies train as plain ones do, to the last bit."""

import os
import traceback
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from mindspore.graph.api import _pynative_executor

from hyper_parallel import NoBenefitWarning, ReplayMismatchError, SwapManager
from tests.exactness.grammar import SETTINGS, Layer, Program, programs, run
from tests.exactness.grammar_containers import CONTAINERS
from tests.exactness.grammar_leaves import LEAVES
from tests.helpers import assert_nothing_live, assert_same

EXAMPLES = {"ci": 120, "full": 3000}
"""By the environment variable HYPOTHESIS_PROFILE. "ci" draws the same examples each time, "full" new ones."""
NEW_PAIRS = {"ci": 2, "full": 0}
"""How many pairs of a layer and its policy a net must have that no net before it had: hypothesis likes to vary what it
has tried. Of 120 such nets that were drawn once 426 pairs were counted, of 300 without that rule about 260."""
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def forget(error: BaseException | None) -> None:
    """What a failed example left must not spoil the smaller ones that hypothesis tries next."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold what is swapped
        error = error.__cause__ or error.__context__
    _pynative_executor.set_grad_flag(False)
    _pynative_executor.clear_res()


def check(program: Program) -> None:
    """Plain's numbers under the program's policies, and nothing left behind."""
    SwapManager().configure(min_bytes=0, **SETTINGS[program.settings])
    try:
        plain = run(program, plain=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoBenefitWarning)
            found = run(program, plain=False)
        assert_same(found, plain)
        assert not _pynative_executor.grad_flag()
        assert_nothing_live()
    except BaseException as error:
        forget(error)
        raise


def layers_of(layer: Layer) -> Iterator[Layer]:
    """A layer and all that is inside."""
    yield layer
    for each in layer.inside:
        yield from layers_of(each)


pairs_before: set[tuple[str, str | None]] = set()
failures: list[Program] = []
"""From the first one on all nets are tried: hypothesis looks for a smaller one."""


@pytest.mark.no_cover  # tracing takes as long as the nets do
@pytest.mark.slow
@settings(
    max_examples=EXAMPLES[PROFILE],
    derandomize=PROFILE == "ci",
    print_blob=PROFILE != "ci",
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
)
@given(programs())
def test_a_random_net_trains_as_plain_does(program: Program) -> None:
    pairs = {(layer.kind, layer.policy) for layer in layers_of(program.net)}
    assume(failures or len(pairs - pairs_before) >= NEW_PAIRS[PROFILE])
    pairs_before.update(pairs)
    try:
        check(program)
    except BaseException:
        failures.append(program)
        raise


FOUND = {
    "an input that waits on host, in half precision": Layer(
        "half precision", Layer("square"), policy="recompute, inputs swapped"
    ),
    "an input that is replayed, in half precision": Layer(
        "half precision", Layer("square", policy="recompute"), policy="recompute"
    ),
    "moving statistics in half precision": Layer("half precision", Layer("batch norm"), policy="recompute"),
    "noise in half precision": Layer("half precision", Layer("noise"), policy="recompute"),
    "half precision inside a replay in full precision": Layer(
        "sequence", Layer("dense"), Layer("half precision", Layer("tanh", policy="recompute")), policy="recompute"
    ),
    "a number beside a tensor, two replays deep": Layer(
        "sequence", Layer("hidden state", policy="recompute"), policy="recompute"
    ),
    "a cache, two replays deep": Layer("sequence", Layer("cache", policy="recompute"), policy="recompute"),
    "a kept result before a write into another tensor": Layer(
        "sequence", Layer("tanh", policy="save"), Layer("index write"), policy="recompute"
    ),
    "a gradient inside, two replays deep": Layer(
        "residual", Layer("residual", Layer("gradient inside", Layer("tanh"), policy="recompute"), policy="recompute")
    ),
    "a custom gradient replayed after a gradient inside": Layer(
        "sequence",
        Layer("scalar", Layer("custom gradient"), policy="recompute"),
        Layer("gradient inside", Layer("dense"), policy="recompute"),
    ),
    "two replays in one step that take a gradient": Layer(
        "called twice", Layer("gradient inside", Layer("tanh"), policy="recompute")
    ),
    "a hidden state in a cell that runs once, but not inside a gradient": Layer(
        "gradient inside", Layer("sequence", Layer("dense"), Layer("hidden state", policy="save")), policy="recompute"
    ),
    "a cell that draws once before one that draws again": Layer(
        "sequence",
        Layer("numpy's and Python's noise", policy="save"),
        Layer("numpy's and Python's noise"),
        policy="recompute",
    ),
    "results that the kernel of BatchNorm leaves unset": Layer(
        "called twice", Layer("batch norm of images", policy="recompute, values checked")
    ),
}
"""What random nets have found wrong, and other tests had not."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", FOUND)
def test_what_random_nets_have_found_stays_right(name: str, training: bool) -> None:
    check(Program(Layer("sequence", FOUND[name]), steps=2, training=training))


def test_a_gradient_through_dropout_that_a_replay_takes_is_refused_by_name() -> None:
    layer = Layer("gradient inside", Layer("ops.dropout"), policy="recompute")
    with pytest.raises(ReplayMismatchError, match=r"gradient through Dropout.*MUST_SAVE, or take Dropout out"):
        check(Program(Layer("sequence", layer), steps=1))


@pytest.mark.parametrize("kind", [*LEAVES, *CONTAINERS])
def test_two_plain_runs_of_every_layer_agree(kind: str) -> None:
    """Without this, no comparison with plain would mean anything."""
    inside = [Layer("dense")] if kind in CONTAINERS else []
    program = Program(Layer("sequence", Layer(kind, *inside)), steps=2, forwards_before=1)
    assert_same(run(program, plain=True), run(program, plain=True))
