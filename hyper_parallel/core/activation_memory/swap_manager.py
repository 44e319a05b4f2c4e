"""`SwapManager`: the one place through which a process swaps: settings, statistics, and what a region asks of them."""

import atexit
import errno
import gc
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspore import nn

from hyper_parallel.core.activation_memory import prefetch_layers
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy
from hyper_parallel.core.activation_memory.spec import RegionSpec
from hyper_parallel.core.activation_memory.swap_by_hand import GroupName, SwapByHand
from hyper_parallel.core.activation_memory.swap_configuration import agreed, back_end_of, check_folder
from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapGroup
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.activation_memory.swap_stats import CellStats, SwapStats
from hyper_parallel.core.activation_memory.swap_trace import Trace
from hyper_parallel.core.errors import SwapStateError
from ms_ops.autograd import gradient_depth, wait_for_operators


class SwapManager(SwapByHand):
    """The process's swap manager; every call of `SwapManager()` gives the same object.

    It owns the host side of MUST_SWAP and of `swap_inputs=True`: the tier, its budget, the copy thread, prefetch, and
    the statistics. Offload is grouped at cell boundaries, load runs ahead of backward by bytes.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from hyper_parallel import SwapManager
        >>> SwapManager() is SwapManager()
        True
        >>> SwapManager().stats().live_bytes
        0
    """

    _instance: "SwapManager | None" = None
    _creating = threading.Lock()

    _explicit: dict[str, Any]
    _adopted: list[tuple[str, dict[str, Any]]]
    _engine: SwapEngine | None
    settings: SwapSettings

    def __new__(cls) -> "SwapManager":
        with cls._creating:
            if cls._instance is None:
                self = super().__new__(cls)
                self._explicit, self._adopted, self._engine = {}, [], None
                self._group_name = GroupName()
                self.settings = SwapSettings()
                cls._instance = self
            return cls._instance

    def configure(
        self,
        *,
        tier: str | None = None,
        host_budget: int | str | None = None,
        window: int | str | None = None,
        pending: int | str | None = None,
        min_bytes: int | str | None = None,
        fuse_below: int | str | None = None,
        folder: "str | os.PathLike[str] | None" = None,
        slab: int | str | None = None,
        direct_io: bool | None = None,
        verify: bool | None = None,
        when_exhausted: list[str] | tuple[str, ...] | None = None,
    ) -> None:
        """Choose how this process swaps; what isn't given keeps its default, without arguments all do.

        Args:
            tier: ``"file"`` (the default: unlinked files, truly lowers the peak) or ``"host"`` (RAM). On Ascend pinned
                memory, with files behind it only if ``"file"`` is given.
            host_budget: Most bytes on host, e.g. ``"8GiB"``. Default: half of the container's memory, divided by the
                ranks on this host.
            window: Bytes loaded ahead of backward. Default: ``"24MiB"``; on Ascend more, if regions are larger.
            pending: Bytes on their way to host before forward waits. Default: as for `window`.
            min_bytes: Smaller tensors stay on the device. Default: ``"1MiB"``.
            fuse_below: Smaller tensors of one region travel together, where `min_bytes` lets them go. Default:
                ``"1MiB"``.
            folder: Folder of the file tier. Default: the system's temporary folder.
            slab: Bytes by which the file tier grows. Default: ``"64MiB"``.
            direct_io: Let the file tier pass the system's page cache by. Default: False.
            verify: Compare what comes back with what left, by a checksum. Default: False.
            when_exhausted: What to do when the budget is exhausted, in this order: ``"recompute"``, ``"keep"``.
                Default: nothing, HostMemoryError.

        Raises:
            PolicyError: A value is not valid (also a ValueError; the message names all that aren't), or a policy file
                that is applied chose otherwise.
            SwapStateError: Tensors are swapped right now, or a trace is being recorded.
            HostMemoryError: The folder can't be written.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from hyper_parallel import SwapManager
            >>> SwapManager().configure(tier="host", window="16MiB")
            >>> SwapManager().settings.window.human_readable()
            '16.0MiB'
            >>> SwapManager().configure()
        """
        given = {
            "tier": tier,
            "host_budget": host_budget,
            "window": window,
            "pending": pending,
            "min_bytes": min_bytes,
            "fuse_below": fuse_below,
            "folder": folder,
            "slab": slab,
            "direct_io": direct_io,
            "verify": verify,
            "when_exhausted": when_exhausted,
        }
        given = {key: value for key, value in given.items() if value is not None}
        self._use(given, self._adopted, "configure()")

    def adopt(self, given: dict[str, Any], source: str) -> Callable[[], None]:
        """Take the `swap:` part of a policy file; the returned function takes it back.

        Args:
            given: The keys that the file sets.
            source: The file, for messages.

        Returns:
            A function without arguments that undoes it.

        Raises:
            PolicyError: A value is not valid, or `configure()` or another applied file chose otherwise.
            SwapStateError: Tensors are swapped right now.
            HostMemoryError: The folder can't be written.
        """
        adopted = (source, dict(given))
        self._use(self._explicit, [*self._adopted, adopted], source)

        def undo() -> None:
            rest = [other for other in self._adopted if other is not adopted]
            self._use(self._explicit, rest, source)

        return undo

    def stats(self) -> SwapStats:
        """What was swapped since `reset()`; waits for all dispatched operators, as `reset` does.

        Returns:
            Counters and peaks; see `SwapStats`.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from hyper_parallel import SwapManager
            >>> SwapManager().stats().wait_seconds >= 0
            True
        """
        if self._engine is None:
            return SwapStats()
        wait_for_operators()
        if self.engine.live_bytes():
            gc.collect()  # an exception that was caught may hold the frames of a step
        return self.engine.stats()

    def reset(self) -> None:
        """Begin to count anew, and give host memory that is free back; settings stay.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from hyper_parallel import SwapManager
            >>> SwapManager().reset()
            >>> SwapManager().stats().offloaded_bytes
            0
        """
        if self._engine is not None:
            wait_for_operators()
            self.engine.reset()

    def set_forward_prefetch_layer(self, first: nn.Cell, second: nn.Cell) -> None:
        """Load what `first` has swapped as soon as backward reaches `second`, before anything between the two.

        Without it the engine loads what backward needs next, group by group, as far as the setting `window` allows;
        with it, it still keeps to `window`. What is swapped by operators and cells inside a layer is the layer's.

        Args:
            first: A layer that runs before `second`; it may carry no policy itself.
            second: A later layer.

        Raises:
            TypeError: One of them is no Cell.
            ValueError: Both are the same.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from mindspore import nn
            >>> from hyper_parallel import SwapManager
            >>> layers = nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2), nn.Dense(2, 2)])
            >>> SwapManager().set_forward_prefetch_layer(layers[0], layers[2])
        """
        for cell in (first, second):
            if not isinstance(cell, nn.Cell):
                raise TypeError(
                    f"set_forward_prefetch_layer takes two Cells, but got {cell!r} of {type(cell).__name__}"
                )
        if first is second:
            raise ValueError(f"set_forward_prefetch_layer takes two layers, but got one twice: {type(first).__name__}")
        prefetch_layers.pair(first, second)

    def abort_step(self) -> None:
        """Give up what this thread has swapped, so that a step that failed can be tried again with nothing held.

        What threads have swapped that have ended goes, too; those that train other nets now keep theirs.
        A gradient that reads one of these tensors afterwards raises SwapStateError. After an exception there is
        usually no need for it: what a failed step has swapped goes with its graph.

        Raises:
            SwapStateError: It is called inside of a gradient call, whose backward would need them.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> from hyper_parallel import SwapManager
            >>> SwapManager().abort_step()
            >>> SwapManager().stats().live_bytes
            0
        """
        if gradient_depth():
            raise SwapStateError(
                "abort_step() is called inside of a gradient call, whose backward needs what is swapped; call it when "
                "that has returned or failed"
            )
        if self._engine is not None:
            self.engine.abort()

    def trace(self, file: "str | os.PathLike[str]") -> Trace:
        """Record what is computed, copied and waited for, for Chrome's or Perfetto's viewer.

        Computation is seen as Python sees it: from the begin of a region's forward, or of what backward reads of it, to
        the next; operators run some time after they are dispatched.

        Args:
            file: Where `stop()`, or the end of the `with` block, writes it as JSON; `hyper-parallel report` makes a
                page of it.

        Returns:
            The trace, a context manager with `stop()`.

        Raises:
            SwapStateError: Another trace is being recorded.
            OSError: The file can't be written, or its folder isn't there.

        Supported Platforms:
            ``Ascend`` ``CPU``

        Examples:
            >>> import tempfile, pathlib
            >>> from hyper_parallel import SwapManager
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
            >>> with SwapManager().trace(file):
            ...     pass  # training steps
            >>> file.exists()
            True
        """
        target = Path(file)
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of the trace isn't there", str(target.parent))
        running = self.engine.ledger.trace
        if running is not None:
            raise SwapStateError(f"a trace is being recorded to {running.file}; stop() it first")

        def stop(trace: Trace) -> Any:
            try:
                stats = self.stats()
            finally:
                self.engine.ledger.trace = None  # an operator that failed may be raised where it is waited for
            return asdict(stats)

        about = {"settings": self.settings.model_dump(mode="json"), "limit": self.engine.tier.limit}
        trace = self.engine.ledger.trace = Trace(target, about, stop)
        return trace

    def regions(self) -> Mapping[str, CellStats]:
        """The counters of every region since `reset()`, by its path; waits for nothing, unlike `stats`."""
        if self._engine is None:
            return {}
        with self._engine.back_end.lock:
            return self._engine.ledger.regions()

    # ---- what regions ask

    @property
    def engine(self) -> SwapEngine:
        """The engine of the present settings, made when it is first needed, and anew when it can't be relied on."""
        engine = self._engine
        if engine is not None and engine.ledger.broken is None:
            return engine
        with self._creating:
            engine = self._engine
            if engine is None:
                engine = SwapEngine(self.settings, back_end_of(self.settings))
            elif engine.ledger.broken is not None:
                engine.close()
                engine = SwapEngine(self.settings, back_end_of(self.settings), engine.ledger.continued())
            self._engine = engine
            return engine

    def region_begins(self, path: str) -> None:
        """A region's forward begins: what was swapped before it has computation after it."""
        if self._engine is not None:
            self.engine.region_begins(path)

    def open_group(self, path: str, tensor_policy: Any = None, owner: Any = None) -> SwapGroup:
        """A group for one call of a region, whose code is the cell's or function's `owner`."""
        return self.engine.open_group(
            path,
            tensor_policy=tensor_policy,
            layers=prefetch_layers.running(),
            name=self._group_name.value,
            owner=owner,
        )

    def choose(self, spec: RegionSpec, path: str) -> RegionSpec:
        """What a region does now: as it was told, or down the ladder if the budget is exhausted."""
        ladder = self.settings.when_exhausted
        if not ladder or not (spec.policy.swaps or spec.swap_inputs) or self.engine.has_room(path):
            return spec
        for step in ladder:
            if step == "recompute" and spec.policy.swaps:
                self.engine.count(path, "recomputed_regions", 1)
                return replace(spec, policy=CheckpointPolicy.MUST_RECOMPUTE, tensor_policy=None)
            if step == "keep":
                self.engine.count(path, "kept_regions", 1)
                keep = CheckpointPolicy.MUST_SAVE if spec.policy.swaps else spec.policy
                return replace(spec, policy=keep, swap_inputs=False, tensor_policy=None)
        return spec

    # ---- settings

    def _use(self, explicit: dict[str, Any], adopted: list[tuple[str, dict[str, Any]]], source: str) -> None:
        settings = agreed([("configure()", explicit), *adopted])
        if settings != self.settings:
            if self._engine is not None and (trace := self._engine.ledger.trace) is not None:
                raise SwapStateError(
                    f"swap settings can't change ({source}) while a trace is recorded to {trace.file}; stop() it first"
                )
            check_folder(settings)
            if self._engine is not None:
                live = self.stats().live_bytes
                if live:
                    raise SwapStateError(
                        f"swap settings can't change ({source}) while {live} bytes are swapped; change them before a "
                        f"step, or after its backward"
                    )
                self._engine.close()
                self._engine = None
        self._explicit, self._adopted, self.settings = explicit, adopted, settings

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def _forget_engine_after_fork() -> None:
    SwapManager._creating = threading.Lock()
    manager = SwapManager._instance
    if manager is not None and manager._engine is not None:
        manager._engine.leave_to_the_parent()
        manager._engine = None  # settings stay


def _close_at_exit() -> None:
    if SwapManager._instance is not None:
        SwapManager._instance._close()


os.register_at_fork(after_in_child=_forget_engine_after_fork)
atexit.register(_close_at_exit)
