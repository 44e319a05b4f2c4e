"""Real text that every machine has: the source of Python's standard library, as characters."""

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = "\n" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
"""The characters that the demo knows: the newline and printable ASCII. Everything else is left out of the text."""

_INDEX_OF_BYTE = np.full(256, -1, np.int32)
_INDEX_OF_BYTE[np.frombuffer(VOCABULARY.encode("ascii"), np.uint8)] = np.arange(len(VOCABULARY), dtype=np.int32)

Array = npt.NDArray[np.int32]


def load_text(folder: Path | None = None, limit: int = 1_000_000) -> Array:
    """Read the Python files right in a folder, in the order of their names, as indices into `VOCABULARY`.

    The same interpreter gives the same text on every call.

    Args:
        folder: Where the files are. None: the standard library of the running interpreter.
        limit: Most characters to return.

    Returns:
        One index per character, of type int32.

    Raises:
        ValueError: The folder holds no Python source.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from hyper_parallel.demo.text import VOCABULARY, load_text
        >>> text = load_text(limit=1000)
        >>> text.shape, text.max() < len(VOCABULARY)
        ((1000,), True)
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    pieces: list[Array] = []
    found = 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        indices = encode(path.read_bytes())
        pieces.append(indices)
        found += indices.size
        if found >= limit:
            break
    if not found:
        raise ValueError(f"expected Python source files (*.py) in {folder}, but found none")
    return np.concatenate(pieces)[:limit]


def encode(source: bytes) -> Array:
    """Turn bytes into indices into `VOCABULARY`; what isn't in it is left out.

    Args:
        source: Text in any encoding that extends ASCII.

    Returns:
        One index per character that is in the vocabulary, of type int32.
    """
    indices = _INDEX_OF_BYTE[np.frombuffer(source, np.uint8)]
    return indices[indices >= 0]


class Batches:
    """Batches of sequences and of the characters that follow; the same seed and step give the same batch.

    Args:
        text: Indices into `VOCABULARY`.
        batch: Sequences in a batch.
        seq: Characters in a sequence.
        seed: Of the choice of places in the text.
    """

    def __init__(self, text: Array, batch: int, seq: int, seed: int = 0) -> None:
        if text.size < seq + 2:
            raise ValueError(f"a text of {text.size} characters is too short for sequences of {seq}")
        self._text, self._batch, self._seq, self._seed = text, batch, seq, seed

    def __getitem__(self, step: int) -> tuple[Array, Array]:
        """Give the batch of one step.

        Args:
            step: Number of the step, from 0.

        Returns:
            Inputs and targets of shape (batch, seq), of type int32; the targets are the inputs one character on.
        """
        places = np.random.RandomState([self._seed, step]).randint(0, self._text.size - self._seq - 1, self._batch)
        rows = np.stack([self._text[place : place + self._seq + 1] for place in places])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
