"""`GraphOptions`: what only a compiled graph knows of a region."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class GraphOptions:
    """Flags of a cell that MindSpore reads when it compiles, by MindSpore's own names; None leaves one alone."""

    mp_comm_recompute: bool | None = None
    """Whether communication in the region that model parallelism needs is recomputed, too."""
    recompute_comm_op: bool | None = None
    """The same for operators that the cell itself holds, without those of cells inside."""
    recompute_slice_activation: bool | None = None
    """Whether what stays in memory of the region is sliced over the ranks of model parallelism."""
    backward_prefetch: int | None = None
    """Of a swapped cell: how many operators ahead its tensors are loaded; None lets MindSpore choose."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {str(value).lower()}" for name, value in self.given().items())

    def given(self) -> dict[str, bool | int]:
        """What isn't None."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in every.items() if value is not None}
