"""The demo's net: a small GPT that predicts the next character."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from hyper_parallel.demo.settings import DemoSettings


class Attention(nn.Cell):
    """Causal self-attention: a position sees itself and what stands before it.

    Args:
        dim: Width of the net.
        heads: Number of heads; divides `dim`.
        mask: What is added to the scores, of shape (seq, seq): 0 where a position may look, else very negative.
    """

    def __init__(self, dim: int, heads: int, mask: Tensor) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.mask = mask
        self.qkv, self.out = nn.Dense(dim, 3 * dim), nn.Dense(dim, dim)
        self.softmax = nn.Softmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        """Mix the positions of `x`, of shape (batch, seq, dim)."""
        batch, seq, dim = x.shape
        split = self.qkv(x).reshape(batch, seq, 3, self.heads, self.head_dim).transpose(2, 0, 3, 1, 4)
        query, key, value = (part.squeeze(0) for part in split.split(1, 0))
        scores = ops.matmul(query * self.head_dim**-0.5, key.swapaxes(-1, -2)) + self.mask
        mixed = ops.matmul(self.softmax(scores), value)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, seq, dim))


class MLP(nn.Cell):
    """Two dense layers with a GELU between them.

    Args:
        dim: Width of the net; the hidden layer is four times as wide.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Dense(dim, 4 * dim), nn.GELU(), nn.Dense(4 * dim, dim)

    def construct(self, x: Tensor) -> Tensor:
        """Transform each position of `x`, of shape (batch, seq, dim), by itself."""
        return self.down(self.act(self.up(x)))


class Block(nn.Cell):
    """A transformer block that normalizes before attention and before the MLP.

    Args:
        dim: Width of the net.
        heads: Number of attention heads.
        mask: See `Attention`.
    """

    def __init__(self, dim: int, heads: int, mask: Tensor) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((dim,)), nn.LayerNorm((dim,))
        self.attention = Attention(dim, heads, mask)
        self.mlp = MLP(dim)

    def construct(self, x: Tensor) -> Tensor:
        """Mix, then transform, the positions of `x`, of shape (batch, seq, dim)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Cell):
    """A small GPT over characters that returns its loss.

    Args:
        settings: The size of the net, and the seed of its weights.
    """

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        dim, seq = settings.dim, settings.seq
        mask = Tensor(np.triu(np.full((seq, seq), -1e9, np.float32), 1))
        self.token = nn.Embedding(settings.vocabulary, dim)
        self.position = nn.Embedding(seq, dim)
        self.positions = Tensor(np.arange(seq, dtype=np.int32))
        self.layers = nn.CellList([Block(dim, settings.heads, mask) for _ in range(settings.layers)])
        self.norm = nn.LayerNorm((dim,))
        self.head = nn.Dense(dim, settings.vocabulary)
        self._seed_weights(settings.seed)

    def _seed_weights(self, seed: int) -> None:
        for index, parameter in enumerate(self.get_parameters()):
            name = parameter.name.rsplit(".", 1)[-1]
            if name in ("gamma", "beta"):
                continue
            # Biases too: MindSpore draws a Dense layer's bias from its own generator.
            values = np.random.RandomState([seed, index]).standard_normal(parameter.shape) * 0.02
            parameter.set_data(Tensor(values.astype(np.float32)))

    def construct(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss per character.

        Args:
            tokens: Indices of characters, of shape (batch, seq), int32.
            targets: The characters that follow, of the same shape, int32.

        Returns:
            The loss, a float32 scalar in nats.
        """
        x = self.token(tokens) + self.position(self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build_model(settings: DemoSettings | None = None) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Build the demo's net; it is also a model for ``hyper-parallel check``.

    Args:
        settings: The size of the net. None: the demo's defaults.

    Returns:
        The net, and inputs that fit it.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.demo.model import build_model
        >>> from hyper_parallel.demo.settings import DemoSettings
        >>> net, inputs = build_model(DemoSettings(layers=1, dim=32, batch=2, seq=8))
        >>> float(net(*inputs)) < 5
        True
    """
    settings = DemoSettings() if settings is None else settings
    tokens = Tensor(np.zeros((settings.batch, settings.seq), np.int32))
    ms.set_seed(settings.seed)
    return GPT(settings), (tokens, tokens)
