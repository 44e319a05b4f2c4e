"""Living beside another distribution that owns the same top-level package.

Installed apart (`pip install --target DIR`, DIR first on the path), what only the other one has stays importable: the
packages extend their path. Installed into one folder, each overwrites files of the other, which nobody may use.
"""

from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

OURS = frozenset({"cli", "core", "demo", "graph", "policy_file", "report", "train"})
"""The packages below `hyper_parallel` that belong to this distribution."""
OURS_IN_CORE = frozenset({"activation_checkpoint", "activation_memory"})


Distributions = Callable[[], Iterable[metadata.Distribution]]


def refuse_mixture(folder: Path, distributions: Distributions = metadata.distributions) -> None:
    """Raise ImportError if packages of another distribution lie in this package's own folder.

    Args:
        folder: Of `hyper_parallel`.
        distributions: Gives what is installed.
    """
    foreign = [*_packages(folder, OURS), *_packages(folder / "core", OURS_IN_CORE)]
    if foreign:
        names = sorted({f"{each.name} {each.version}" for each in distributions() if _owns(each, foreign)})
        other = f" ({', '.join(names)})" if names else ""
        packages = ", ".join(str(path.relative_to(folder)) for path in foreign)
        raise ImportError(
            f"hyper_parallel was installed over another distribution{other}: {folder} holds {packages} of it, and each "
            f"has overwritten files of the other. Reinstall that one, and install this one apart: pip install --target "
            f"DIR hyper-parallel, with DIR first on PYTHONPATH"
        )


def _packages(folder: Path, ours: frozenset[str]) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/__init__.py") if path.parent.name not in ours)


def _owns(distribution: metadata.Distribution, foreign: list[Path]) -> bool:
    wanted = {str(path / "__init__.py") for path in foreign}
    return any(str(distribution.locate_file(file)) in wanted for file in distribution.files or ())
