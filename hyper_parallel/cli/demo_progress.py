"""The demo's progress: one bar per mode on a terminal, one line per mode elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class DemoProgress:
    """Shows how far each mode is, while the `with` block runs.

    Args:
        console: Where to show it.
        modes: Names of the modes, in the order in which they run.
        steps: Steps of each mode.
    """

    def __init__(self, console: Console, modes: Sequence[str], steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {mode: self._progress.add_task(mode, total=steps, start=False, loss="") for mode in modes}

    def __enter__(self) -> "DemoProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextmanager
    def mode(self, name: str) -> Iterator[Callable[[int, float], None]]:
        """Show one mode while the `with` block runs.

        Args:
            name: The mode.

        Yields:
            A function to call after every step, with its number from 0 and its loss.
        """
        task = self._tasks[name]
        self._progress.start_task(task)
        begin, last_loss = time.perf_counter(), float("nan")

        def on_step(step: int, loss: float) -> None:
            nonlocal last_loss
            last_loss = loss
            self._progress.update(task, completed=step + 1, loss=f"loss {loss:.4f}")

        yield on_step
        if not self._console.is_terminal:
            self._console.print(
                f"{name}: loss {last_loss:.4f} after {time.perf_counter() - begin:.0f} s", highlight=False, markup=False
            )
