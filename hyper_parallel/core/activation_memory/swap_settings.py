"""`SwapSettings`: the knobs of the swap manager, validated, with what each of them trades."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, WithJsonSchema, model_validator


def _no_bare_guess(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        raise ValueError("a size is a whole number of bytes or a string like '32MiB'")
    # A float in between would overflow.
    if (isinstance(value, int) and value >= _TOO_LARGE) or (isinstance(value, str) and len(value) > _LONGEST):
        raise ValueError("a size is below 8 EiB, and written in a few characters")
    return value


_TOO_LARGE = 2**63
_LONGEST = 40

Bytes = Annotated[
    ByteSize,
    BeforeValidator(_no_bare_guess),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d*\.?\d+\s*([A-Za-z]+)?\s*$"},
            ]
        }
    ),
]


class SwapSettings(BaseModel):
    """The knobs of the swap manager. Sizes are bytes, or strings like ``"32MiB"``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tier: Literal["file", "host"] = "file"
    """Where swapped tensors wait. `file`: preallocated, unlinked files; on the CPU backend only this lowers the peak.
    `host`: RAM; on the CPU backend it saves nothing and serves tests and accounting. On Ascend it is pinned memory,
    which is also used if nothing is said; `file` lies behind it there."""
    host_budget: Bytes | None = None
    """Most bytes that may wait on host. None: half of the container's memory, divided by the ranks on this host."""
    window: Bytes = Field(default=ByteSize(24 * 2**20), gt=0)
    """Bytes loaded ahead of backward, and not given up yet. More hides more of the reading, and keeps more on the
    device. On Ascend, if it isn't set: what the largest region sends, if that is more."""
    pending: Bytes = Field(default=ByteSize(32 * 2**20), gt=0)
    """Bytes on their way to host before forward waits. More overlaps more, and keeps more on the device. On Ascend, if
    it isn't set: twice what the largest region sends, if that is more."""
    min_bytes: Bytes = Field(default=ByteSize(2**20), ge=0)
    """Smaller tensors stay: they cost more time than they save memory."""
    fuse_below: Bytes = Field(default=ByteSize(2**20), ge=0)
    """Smaller tensors of one region travel together, as far as `min_bytes` lets them go at all: in transfers of at most
    4 MiB, `pending`, and an eighth of `window`. 0: each on its own."""
    folder: Path | None = None
    """Where the `file` tier keeps its files. None: the system's temporary folder."""
    slab: Bytes = Field(default=ByteSize(64 * 2**20), gt=0)
    """Bytes by which the `file` tier grows. More asks the disk less often, and may leave more of it unused."""
    direct_io: bool = Field(default=False, strict=True)
    """Let the `file` tier pass the system's page cache by. It takes no memory for the cache, which counts as the
    container's, and waits for the disk instead."""
    verify: bool = Field(default=False, strict=True)
    """Compare a checksum of every tensor that comes back with that of what left; costs time on the copy thread."""
    when_exhausted: tuple[Literal["recompute", "keep"], ...] = ()
    """What a region does when the budget is exhausted, tried in this order. Empty: HostMemoryError."""

    @model_validator(mode="after")
    def _is_for_the_tier(self) -> "SwapSettings":
        if self.direct_io and self.tier != "file":
            raise ValueError(f"direct_io is for the file tier, but the tier is {self.tier!r}")
        return self
