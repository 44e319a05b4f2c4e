"""`DemoSettings`: the size of the demo's net and of its training, validated."""

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hyper_parallel.demo.text import VOCABULARY


class DemoSettings(BaseModel):
    """The size of the net and of the training.

    The defaults make activations dominate, and tensors of 1 MiB and more of them, which is what is worth swapping.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(default=8, ge=1, le=1000)
    """Blocks in the net."""
    dim: int = Field(default=256, ge=1, le=65536)
    """Width of the net; a multiple of `heads`."""
    heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads of a block."""
    batch: int = Field(default=4, ge=1, le=65536)
    """Sequences in a step."""
    seq: int = Field(default=256, ge=1, le=65536)
    """Characters in a sequence."""
    steps: int = Field(default=6, ge=1, le=1_000_000)
    """Optimizer steps. The first one is left out of the step time if there are others."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of Adam."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the weights and of the choice of text."""

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> "DemoSettings":
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of the number of heads ({self.heads}), but got {self.dim}")
        return self

    @property
    def vocabulary(self) -> int:
        """Number of different characters."""
        return len(VOCABULARY)


def describe_errors(error: ValidationError) -> str:
    """Say in one line what is wrong with which setting.

    Args:
        error: What pydantic raised.

    Returns:
        For example ``layers: Input should be greater than or equal to 1, but got 0``.
    """
    parts = []
    for found in error.errors():
        where = ".".join(str(part) for part in found["loc"])
        message = found["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}, but got {found['input']!r}" if where else message)
    return "; ".join(parts)
