"""`Written`: a tensor that is about to be written, and what else the write reaches."""

from mindspore import Parameter, Tensor

from ms_ops.autograd import is_parameter
from ms_ops.tensors import storage_of


class Written:
    """A tensor that is about to be written.

    Args:
        tensor: The tensor.
        how: By what, for messages.
        rebinds: The object gets a new storage; who else holds the old one doesn't notice.
    """

    def __init__(self, tensor: Tensor, how: str, rebinds: bool) -> None:
        self.tensor = tensor
        self.how = how
        self.parameter = tensor.param_info
        """MindSpore's record of the parameter, the same object for every alias; None if it is no parameter."""
        self.rebinds = rebinds
        self._storage: int | None = None

    @property
    def counts_as_new_version(self) -> bool:
        """Whether MindSpore itself sees the write, where there are no saved-tensor hooks."""
        return self.how == "Tensor.copy_"

    def reaches(self, other: Tensor) -> bool:
        """Whether `other` is written, too."""
        if other is self.tensor:
            return True
        if self.parameter is not None or is_parameter(other):
            return self.parameter is not None and other.param_info is self.parameter
        return self.reaches_storage_of(other)

    def reaches_storage_of(self, other: Tensor) -> bool:
        """Whether both lie in one storage, whatever is known of them."""
        if self.rebinds or other.dtype != self.tensor.dtype:
            return False
        return self.reaches_storage(storage_of(other))

    def reaches_storage(self, storage: int) -> bool:
        """Whether the tensor whose storage begins here is written; 0 is none."""
        if self.rebinds or self.parameter is not None:
            return False
        if self._storage is None:
            self._storage = storage_of(self.tensor)
        return self._storage != 0 and self._storage == storage

    def __str__(self) -> str:
        name = f"parameter {self.tensor.name}, " if isinstance(self.tensor, Parameter) else ""
        return f"({name}shape {self.tensor.shape}, dtype {self.tensor.dtype})"
