"""The presets do what their names say, combine, and give plain's bits."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import SwapManager, activation_policy, presets
from hyper_parallel.core.activation_memory.operator_log import LogReader
from ms_ops.catalogue import catalogue_name
from tests.helpers import MlpLayer, Record, Stack, assert_same, gradients, numbers, seeded

X = numbers(2, 6, 8)


class Block(nn.Cell):
    """A transformer block on a batch, with heads as a dimension of their own."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm((width,))
        self.qkv, self.out, self.mlp = nn.Dense(width, 3 * width), nn.Dense(width, width), MlpLayer(width)
        self.softmax = nn.Softmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, s, 3, self.heads, d // self.heads).transpose(2, 0, 3, 1, 4)
        q, k, v = (part.squeeze(0) for part in qkv.split(1, 0))
        a = self.softmax(ops.matmul(q, k.swapaxes(-1, -2)) / (d // self.heads) ** 0.5)
        x = x + self.out(ops.matmul(a, v).transpose(0, 2, 1, 3).reshape(b, s, d))
        return x + self.mlp(x)


def net(keywords: dict[str, Any] | None = None) -> nn.Cell:
    blocks = [seeded(Block(), seed) for seed in (1, 50)]
    return Stack(blocks if keywords is None else [activation_policy(**keywords)(block) for block in blocks])


@pytest.fixture(scope="module")
def plain() -> Record:
    return gradients(net(), X)


@pytest.fixture(autouse=True)
def swaps_everything() -> Iterator[None]:
    SwapManager().configure(min_bytes=0, tier="host")
    SwapManager().reset()
    yield
    SwapManager().configure()


@pytest.fixture
def four_dimensions(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Dispatch names of what replays run again and gives four dimensions, without views."""
    found: set[str] = set()
    ran = LogReader.ran

    def note(reader: Any, name: str, args: tuple, result: Any, parameters: Any = ()) -> None:
        if isinstance(result, Tensor) and result.ndim == 4 and catalogue_name(name) != "View":
            found.add(name)
        ran(reader, name, args, result, parameters)

    monkeypatch.setattr(LogReader, "ran", note)
    return found


def again(replayed: Counter[str]) -> set[str]:
    """The catalogue's names of what was run again."""
    return {catalogue_name(name) for name in replayed if not name.endswith(" read")}


def read(replayed: Counter[str]) -> Counter[str]:
    """The catalogue's names of what was read, with how often."""
    counts = Counter[str]()
    for name, count in replayed.items():
        if name.endswith(" read"):
            counts[catalogue_name(name.removesuffix(" read"))] += count
    return counts


ALL = {
    "full": presets.full(),
    "selective": presets.selective(),
    "every_other_matmul": presets.every_other_matmul(),
    "attention_only": presets.attention_only(),
    "inputs_on_host": presets.inputs_on_host(),
    "full + inputs_on_host": {**presets.full(), **presets.inputs_on_host()},
    "selective + inputs_on_host": {**presets.selective(), **presets.inputs_on_host()},
    "every_other_matmul + inputs_on_host": {**presets.every_other_matmul(), **presets.inputs_on_host()},
    "attention_only + inputs_on_host": {**presets.attention_only(), **presets.inputs_on_host()},
}


@pytest.mark.parametrize("name", ALL)
def test_a_preset_is_exact_in_two_steps(name: str, plain: Record) -> None:
    trained = net(ALL[name])
    for _ in range(2):
        assert_same(gradients(trained, X), plain)


def test_full_reads_nothing(replayed: Counter[str]) -> None:
    gradients(net(presets.full()), X)
    assert read(replayed) == {}
    assert "MatMul" in again(replayed)


def test_selective_runs_no_matrix_product_again(replayed: Counter[str]) -> None:
    gradients(net(presets.selective()), X)
    assert set(read(replayed)) == {"MatMul"}
    assert "MatMul" not in again(replayed)
    assert {"Softmax", "LayerNorm"} <= again(replayed)


def test_every_other_matmul_begins_anew_in_every_call(replayed: Counter[str]) -> None:
    one = activation_policy(**presets.every_other_matmul())(
        nn.SequentialCell(nn.Dense(8, 8), nn.Tanh(), nn.Dense(8, 8), nn.Tanh(), nn.Dense(8, 8), nn.Tanh())
    )
    for _ in range(2):
        ms.grad(one)(numbers(3, 8))
    assert read(replayed) == {"MatMul": 4}
    assert replayed["MatMul"] == 2


def test_attention_only_runs_what_has_heads_again(replayed: Counter[str], four_dimensions: set[str]) -> None:
    gradients(net(presets.attention_only()), X)
    with_heads = {catalogue_name(name) for name in four_dimensions}
    assert again(replayed) - {"View"} == with_heads
    assert {"Softmax", "MatMul"} <= with_heads


def test_inputs_on_host_sends_the_inputs() -> None:
    gradients(net(presets.inputs_on_host()), X, wait=True)
    assert SwapManager().stats().offloaded_bytes >= X.nbytes


def test_two_equal_presets_agree_on_one_cell_and_others_do_not() -> None:
    block = activation_policy(**presets.every_other_matmul())(Block())
    activation_policy(**presets.every_other_matmul())(block)
    with pytest.raises(ValueError, match=r"every second MatMul must_save.*contradicts"):
        activation_policy(**presets.selective())(block)
