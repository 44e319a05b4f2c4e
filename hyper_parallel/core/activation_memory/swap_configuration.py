"""From what the user and policy files say to the settings of the swap manager, and to the tier that they describe."""

from typing import Any

from pydantic import ValidationError

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import HostMemoryError, PolicyError
from ms_ops.file_tier import FileTier
from ms_ops.host import HostTier, Tier
from ms_ops.memory import container_bytes, ranks_on_this_host

_BUDGET_SHARE = 0.5
"""The part of the container's memory that may be used on host when no `host_budget` is given."""


def agreed(said: list[tuple[str, dict[str, Any]]]) -> SwapSettings:
    """The settings that several sources give together.

    Args:
        said: Each source, for messages, and the keys that it gives.

    Raises:
        PolicyError: A value is not valid, or two sources contradict each other.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    for name, values in said:
        one = _validated(values, name)
        for key in values:
            value = getattr(one, key)
            other, by = chosen.setdefault(key, (value, name))
            if other != value:
                raise PolicyError(
                    f"swap setting {key!r}: {by} says {other}, {name} says {value}; they must agree, or one of them "
                    f"must leave it out"
                )
    sources = " and ".join(dict.fromkeys(by for _, by in chosen.values()))
    return _validated({key: value for key, (value, _) in chosen.items()}, sources)


def _validated(values: dict[str, Any], source: str) -> SwapSettings:
    try:
        return SwapSettings(**values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc'])}={item['input']!r}: {item['msg']}" for item in error.errors()
        ]
        raise PolicyError(f"{source}: " + "; ".join(lines)) from None


def tier_of(settings: SwapSettings) -> Tier:
    """The tier that the settings describe.

    Raises:
        HostMemoryError: Its folder can't be used.
    """
    budget = settings.host_budget
    limit = int(container_bytes() * _BUDGET_SHARE / ranks_on_this_host()) if budget is None else int(budget)
    if settings.tier == "host":
        return HostTier(limit)
    try:
        return FileTier(settings.folder, limit, int(settings.slab), settings.direct_io)
    except OSError as error:
        raise HostMemoryError(
            f"the folder of the file tier can't be used: {settings.folder or 'the temporary folder'}: "
            f"{error.strerror}; give another one with folder=, or use tier='host'"
        ) from error
