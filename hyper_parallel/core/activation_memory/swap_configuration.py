"""From what the user and policy files say to the settings of the swap manager, and to the back end they describe."""

from typing import Any

from pydantic import ValidationError

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import HostMemoryError, PolicyError, SwapStateError
from ms_ops.back_ends import back_end_for
from ms_ops.backend import BackEnd, NotSupported
from ms_ops.file_tier import FileTier
from ms_ops.host import HostTier, TierFull, WrittenTier
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
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])  # none: it is about several
            lines.append(f"{where}={item['input']!r}: {item['msg']}" if where else item["msg"])
        raise PolicyError(f"{source}: " + "; ".join(lines)) from None


def back_end_of(settings: SwapSettings) -> BackEnd:
    """The back end for the present device target, as the settings describe it.

    Raises:
        HostMemoryError: Its folder can't be used, or it would take more memory than there is.
        SwapStateError: There is none for this device, or MindSpore lacks something.
    """
    budget = settings.host_budget
    limit = int(container_bytes() * _BUDGET_SHARE / ranks_on_this_host()) if budget is None else int(budget)
    try:
        wants_file = settings.tier == "file" and "tier" in settings.model_fields_set
        return back_end_for(limit, settings.verify, lambda: _tier_of(settings, limit), wants_file)
    except NotSupported as error:
        raise SwapStateError(str(error)) from error
    except TierFull as full:
        raise HostMemoryError(f"{full.reason}; set host_budget to less") from full


def check_folder(settings: SwapSettings) -> None:
    """Raise HostMemoryError if the folder of the file tier can't be used."""
    if settings.tier == "file":
        _tier_of(settings, 0).close()


def _tier_of(settings: SwapSettings, limit: int) -> WrittenTier:
    if settings.tier == "host":
        return HostTier(limit)
    try:
        return FileTier(settings.folder, limit, int(settings.slab), settings.direct_io)
    except OSError as error:
        raise HostMemoryError(
            f"the folder of the file tier can't be used: {settings.folder or 'the temporary folder'}: "
            f"{error.strerror}; give another one with folder=, or use tier='host'"
        ) from error
