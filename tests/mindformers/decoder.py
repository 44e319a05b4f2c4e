"""A small decoder, built as MindFormers builds its own: what `apply_ac` looks at has the same names and types."""

from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

from tests.helpers import numbers, seeded

WIDTH, HEADS, LENGTH, DEPTH = 8, 2, 6, 4


class IndexedCells(nn.CellList):
    """Cells by their global number, as `CustomIndexCellList`: assigning one renames no parameter."""

    def __init__(self, cells: list[nn.Cell]) -> None:
        super().__init__()
        for index, cell in enumerate(cells):
            self._cells[str(index)] = cell

    def __setitem__(self, index: int, cell: nn.Cell) -> None:
        self._cells[str(index)] = cell

    def __getitem__(self, index: int) -> nn.Cell:
        return self._cells[str(index)]


def gated(x: Tensor) -> Tensor:
    """A function of several operators, of which backward needs what is in between: x sigmoid(x)."""
    return x * ops.sigmoid(x)


class Masked(_Function):
    """Scores where the mask is 0. As the flash attention operator it saves the mask itself, in its own type."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return ops.masked_fill(scores, mask[0, 0].bool(), -1e4)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (mask,) = ctx.saved_tensors
        return ops.masked_fill(gradient, mask[0, 0].bool(), 0.0), None


class CoreAttention(nn.Cell):
    """softmax(q k^T, masked) v for heads in front; rotates q and k by the table first."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        self.batch_matmul = ops.BatchMatMul()

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        q, k = self.rotated(q, table), self.rotated(k, table)
        scores = self.batch_matmul(q, k.swapaxes(-1, -2)) / q.shape[-1] ** 0.5
        return self.batch_matmul(self.softmax(Masked.apply(scores, mask)), v)

    def rotated(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Half of the numbers rotated against the other half."""
        half = x.shape[-1] // 2
        turned = mint.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * table[0] + turned * table[1]


class SelfAttention(nn.Cell):
    """Attention of one sequence; `gather` stands where tensor parallelism has its communication operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Dense(WIDTH, 3 * WIDTH), nn.Dense(WIDTH, WIDTH)
        self.core_attention = CoreAttention()
        self.gather = gated

    def construct(self, x: Tensor, mask: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        mixed = self.gather(self.linear_qkv(x)).reshape(LENGTH, 3, HEADS, WIDTH // HEADS).transpose(1, 2, 0, 3)
        q, k, v = (part.squeeze(0) for part in mixed.split(1, 0))
        out = self.core_attention(q, k, v, mask, table)
        return self.linear_proj(out.transpose(1, 0, 2).reshape(LENGTH, WIDTH))


class Mlp(nn.Cell):
    """Two linear cells around an activation that is a function; the first one's input goes through its own slot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)
        self.activation_func = gated
        self._comm_ops = {"input.allgather": {"fn": gated, "domain": "tp"}}
        self._gate = ops.tanh

    @property
    def gate(self) -> Any:
        """The last activation, which may be replaced."""
        return self._gate

    @gate.setter
    def gate(self, gate: Any) -> None:
        self._gate = gate

    def construct(self, x: Tensor) -> Tensor:
        x = self._comm_ops["input.allgather"]["fn"](x)
        return self.gate(self.linear_fc2(self.activation_func(self.linear_fc1(x))))


class DecoderLayer(nn.Cell):
    """Pre-norm decoder layer, called as MindFormers calls its own; gives a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.self_attention, self.mlp = SelfAttention(), Mlp()
        self.add = mint.add

    def construct(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Any = None) -> Any:
        attended = self.self_attention(self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb)
        middle = self.add(hidden_states, attended)
        return self.add(middle, self.mlp(self.pre_mlp_layernorm(middle))), None


class Decoder(nn.Cell):
    """What `apply_ac` gets: `layers`, `layer_start`, `layer_end` and `config.num_layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=DEPTH, seq_length=LENGTH)
        self.layer_start, self.layer_end = 0, DEPTH - 1
        self.layers = IndexedCells([DecoderLayer() for _ in range(DEPTH)])
        self.final_layernorm = nn.LayerNorm((WIDTH,))

    def construct(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Any = None) -> Tensor:
        for index in range(self.layer_start, self.layer_end + 1):
            hidden_states, _ = self.layers[index](hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
        return self.final_layernorm(hidden_states)


class Model(nn.Cell):
    """A decoder as it lies in its model: the mask and the table are made once a step and go through every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.later = Tensor(np.triu(np.ones((1, 1, LENGTH, LENGTH), np.int32), 1))
        self.angles = numbers(LENGTH, WIDTH // HEADS, seed=1)
        self.shared: list[Tensor] = []
        """The mask and the two tables of the last forward."""

    def construct(self, x: Tensor) -> Tensor:
        # by operators: a tensor that none has touched has no storage yet, and MindFormers asks for it
        mask, table = ops.cast(self.later, ms.uint8), (ops.cos(self.angles), ops.sin(self.angles))
        self.shared = [mask, *table]
        return self.decoder(x, mask, rotary_pos_emb=table)


def model() -> Model:
    """The same one whenever it is called."""
    return seeded(Model(), 7)


def hidden() -> Tensor:
    """The input of the decoder."""
    return ms.ops.add(numbers(LENGTH, WIDTH, seed=2), 0.0)
