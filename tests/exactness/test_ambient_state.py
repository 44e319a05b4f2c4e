"""Randomness, moving statistics, counters and mixed precision: a replay reads or restores what the forward met."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train.amp import auto_mixed_precision

from hyper_parallel import checkpoint
from tests.helpers import (
    PREFER_RECOMPUTE,
    RECOMPUTE,
    SAVE,
    SWAP,
    Layer,
    Stack,
    assert_same,
    gradients,
    numbers,
    on,
    seeded,
    state_of,
    train,
)

X = numbers(6, 4, seed=1)
KINDS: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "recompute": lambda cell: on(cell, RECOMPUTE),
    "prefer recompute": lambda cell: on(cell, PREFER_RECOMPUTE),
    "swap": lambda cell: on(cell, SWAP),
    "swapped inputs": lambda cell: on(cell, RECOMPUTE, swap_inputs=True),
    "recompute in recompute": lambda cell: on(Stack([on(cell, RECOMPUTE)]), RECOMPUTE),
    "save in recompute": lambda cell: on(Stack([on(cell, SAVE)]), RECOMPUTE),
    "swap in recompute": lambda cell: on(Stack([on(cell, SWAP)]), RECOMPUTE),
}


class Random(nn.Cell):
    """A cell that draws numbers with one function."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = Layer(), draw

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.draw(self.layer(x))) * x


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "ops.dropout": lambda x: ops.dropout(x, 0.4),
    "noise that is multiplied": lambda x: x * ops.randn(6, 4),
    "noise that backward doesn't need": lambda x: x + ops.randn(6, 4),
    "uniform": lambda x: x * ops.rand(6, 4),
    "random choice of rows": lambda x: x[ops.randint(0, 6, (6,))],
    "multinomial": lambda x: x[ops.multinomial(ops.exp(x[:, 0]), 6, replacement=True)],
    "two draws": lambda x: ops.dropout(x * ops.randn(6, 4), 0.2),
}


@pytest.mark.parametrize("kind", ["recompute", "swap", "swapped inputs", "recompute in recompute", "swap in recompute"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_replay_draws_nothing_anew(draw: str, kind: str) -> None:
    def run(put: Callable[[nn.Cell], nn.Cell]) -> Any:
        ms.set_seed(5)
        net = Stack([put(Random(DRAWS[draw])), Random(DRAWS["ops.dropout"])])
        first = gradients(net, X)
        return {**first, **{f"second {name}": value for name, value in gradients(net, X).items()}}

    def around(cell: nn.Cell) -> nn.Cell:
        return Stack([cell]) if " in " in kind else cell

    assert_same(run(KINDS[kind]), run(around))


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_of_the_gradient_is_the_mask_of_the_forward(kind: str) -> None:
    """MindSpore's nn.Dropout on CPU draws another mask in every call and can't be seeded."""
    outputs: list[np.ndarray] = []

    class Drops(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(p=0.5)

        def construct(self, x: Tensor) -> Tensor:
            y = self.dropout(x)
            return y * y

    net, ones = KINDS[kind](Drops()).set_train(), ops.ones((6, 4), ms.float32)

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        outputs.append(y.asnumpy().copy())
        return y.sum()

    for _ in range(3):
        gradient = ms.grad(forward)(ones).asnumpy()
        mask = outputs[-1] != 0
        assert 0 < mask.sum() < mask.size
        assert np.array_equal(gradient, mask * np.float32(8))  # 2 y / keep, with y = 1 / keep


@pytest.mark.parametrize("kind", ["recompute", "swapped inputs", "recompute in recompute"])
def test_dropout_of_an_input_that_another_layer_computed(kind: str) -> None:
    """MindSpore waits forever if a dispatch callback answers for nn.Dropout here."""

    class Drops(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(p=0.5)

        def construct(self, x: Tensor) -> Tensor:
            return self.dropout(x) ** 2

    net = KINDS[kind](Drops()).set_train()
    gradient = ms.grad(lambda x: net(x * 2).sum())(ops.ones((6, 4), ms.float32)).asnumpy()
    assert set(np.unique(gradient)) == {0.0, 32.0}


@pytest.mark.parametrize("computed", ["in the forward", "before it"])
def test_dropout_of_a_tensor_that_comes_through_a_closure(computed: str) -> None:
    """The same, where no argument of the region could be changed."""
    before = ops.ones((6, 4), ms.float32)

    def forward(x: Tensor) -> Tensor:
        h = x * 2
        return checkpoint(lambda x: ops.dropout(h if computed == "in the forward" else before, 0.5) ** 2 * x, x).sum()

    gradient = ms.grad(forward)(ops.ones((6, 4), ms.float32)).asnumpy()
    assert set(np.unique(gradient)) == ({0.0, 48.0} if computed == "in the forward" else {0.0, 4.0})


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_generator_is_where_the_forward_left_it(kind: str) -> None:
    net = KINDS[kind](Layer())
    ms.manual_seed(1)

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        ms.manual_seed(2)
        return y.sum()

    ms.grad(forward)(X)
    after = ms.get_rng_state().asnumpy()
    ms.manual_seed(2)
    assert np.array_equal(after, ms.get_rng_state().asnumpy())


def test_a_replay_meets_the_default_generator_of_its_forward() -> None:
    states: list[np.ndarray] = []

    class Looks(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            states.append(ms.get_rng_state().asnumpy().copy())
            return ops.tanh(x)

    net = on(Looks(), RECOMPUTE)
    ms.manual_seed(1)

    def forward(x: Tensor) -> Tensor:
        y = net(x)
        ms.manual_seed(2)
        return y.sum()

    ms.grad(forward)(X)
    assert len(states) == 2 and np.array_equal(*states)


def norm_last() -> nn.Cell:
    return Stack([Layer(), seeded(nn.BatchNorm1d(4))])


def norm_first() -> nn.Cell:
    return Stack([seeded(nn.BatchNorm1d(4)), Layer()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [norm_first, norm_last])
def test_batch_norm_is_updated_once_per_step(build: Callable[[], nn.Cell], kind: str) -> None:
    def run(put: Callable[[nn.Cell], nn.Cell]) -> Any:
        net = put(build()).set_train()
        record = train(net, X, steps=2, position=0)
        return {name.replace("layers.0.", "", name.count("layers.") - 1): value for name, value in record.items()}

    assert_same(run(KINDS[kind]), run(lambda cell: cell))


def test_batch_norm_is_updated_once_by_a_forward_alone() -> None:
    def run(policy: Any) -> Any:
        net = on(norm_first(), policy).set_train()
        net(X)
        return state_of(net)

    assert_same(run(RECOMPUTE), run(None))


@pytest.mark.parametrize("kind", ["recompute", "swap", "recompute in recompute"])
def test_a_counter_parameter_is_written_once_per_step(kind: str) -> None:
    class Counts(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            self.count = Parameter(Tensor(0.0, ms.float32), name="count", requires_grad=False)
            self.total = Parameter(Tensor(0.0, ms.float32), name="total", requires_grad=False)

        def construct(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            ops.assign_add(self.count, Tensor(1.0, ms.float32))
            ops.assign(self.total, self.total + y.sum())
            return y * y

    cell, plain = Counts(), Counts()
    net = KINDS[kind](cell)
    for _ in range(3):
        found, want = gradients(net, X), gradients(plain, X)
        assert_same(found, want)
    assert cell.count.asnumpy() == 3
    assert_same(state_of(cell.layer), state_of(plain.layer))
    assert cell.total.asnumpy().tobytes() == plain.total.asnumpy().tobytes()


class Half(nn.Cell):
    """A layer in half precision between float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Stack([Layer(seed=1), Layer(seed=2)]).to_float(ms.float16)

    def construct(self, x: Tensor) -> Tensor:
        return self.layer(x).astype(ms.float32)


@pytest.mark.parametrize("where", ["the half cell", "inside it", "around it"])
@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP], ids=lambda policy: policy.name)
def test_half_precision_cells(policy: Any, where: str) -> None:
    net = Half()
    target = {"the half cell": net.layer, "inside it": net.layer.layers[1], "around it": net}[where]
    on(target, policy)

    assert_same(gradients(net, X), gradients(Half(), X))


@pytest.mark.parametrize(
    ("order", "level"),
    # O1 rewrites the source of classes and can't read one that a policy has put there: policies go on afterwards
    [
        ("precision first", "O1"),
        *((order, level) for order in ("policy first", "precision first") for level in ("O2", "O3")),
    ],
)
@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP], ids=lambda policy: policy.name)
def test_auto_mixed_precision(policy: Any, level: str, order: str) -> None:
    def run(policy: Any) -> Any:
        net = Stack([Layer(seed=1), Layer(seed=2)])
        if order == "policy first":
            on(net.layers[0], policy)
        net = auto_mixed_precision(net, level)
        if order == "precision first":
            on(net.layers[0] if hasattr(net, "layers") else next(iter(net.cells())).layers[0], policy)
        return gradients(net, X, loss=lambda y: (y.astype(ms.float32) ** 2).mean())

    assert_same(run(policy), run(None))


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP], ids=lambda policy: policy.name)
def test_operators_after_a_half_precision_replay_are_float32(policy: Any) -> None:
    net = Half()
    on(net.layer, policy)
    a, b = numbers(3, 3, seed=1), numbers(3, 3, seed=2)
    before = ops.matmul(a, b)
    gradients(net, X)
    after = ops.matmul(a, b)
    assert after.dtype == before.dtype == ms.float32
    assert np.array_equal(before.asnumpy(), after.asnumpy())


def test_a_replay_leaves_train_and_eval_mode_alone() -> None:
    net = on(norm_first(), RECOMPUTE).set_train()
    gradients(net, X)
    assert all(cell.training for _, cell in net.cells_and_names())
