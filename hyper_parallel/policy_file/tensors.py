"""`TensorSelection`: which tensors of a region go to host, as a policy that is asked for each of them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hyper_parallel.core.activation_memory.policy import CheckpointPolicy

DtypeName = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "complex64",
    "complex128",
]
DTYPE_NAMES: tuple[str, ...] = get_args(DtypeName)


@dataclass(frozen=True)
class TensorSelection:
    """Sends the tensors to host that are large enough and of one of some dtypes; the others stay."""

    min_bytes: int = 0
    """Smaller tensors stay on the device."""
    dtypes: tuple[str, ...] = ()
    """Names of the dtypes that go; empty: all."""

    def selects(self, size: int, dtype: Any) -> bool:
        """Whether a tensor of `size` bytes and this dtype goes to host."""
        return size >= self.min_bytes and (not self.dtypes or str(dtype).lower() in self.dtypes)

    def __call__(self, tensor: Any) -> CheckpointPolicy:
        """Answer for one saved tensor, as the engine asks."""
        goes = self.selects(tensor.nbytes, tensor.dtype)
        return CheckpointPolicy.MUST_SWAP if goes else CheckpointPolicy.MUST_SAVE

    def __str__(self) -> str:
        parts = [f">= {self.min_bytes} bytes"] if self.min_bytes else []
        return " and ".join([*parts, *(["of " + " or ".join(self.dtypes)] if self.dtypes else [])])
