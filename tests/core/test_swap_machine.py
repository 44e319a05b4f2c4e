"""Random interleavings of everything that happens to a group: values are right, limits kept, and nothing is left."""

import contextlib
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import HostMemoryError, SwapStateError
from ms_ops.cpu import CpuBackEnd
from tests.core.swap_fakes import FakeTier, tensor_of

SIZES = (1, 700, 1024, 3000)


class Swapping(RuleBasedStateMachine):
    """Groups are closed, moved by hand, read and aborted, handles and holders die; copies stop, go on, and fail."""

    handles = Bundle("handles")

    @initialize(
        window=st.integers(1, 40_000),
        pending=st.integers(40_000, 100_000),
        limit=st.sampled_from([2**30, 30_000]),
        fuse_below=st.sampled_from([0, 4000]),
        verify=st.booleans(),
    )
    def begin(self, window: int, pending: int, limit: int, fuse_below: int, verify: bool) -> None:
        self.tier = FakeTier(limit)
        chosen = SwapSettings(
            min_bytes=0, window=window, pending=pending, fuse_below=fuse_below, verify=verify, when_exhausted=("keep",)
        )
        self.engine = SwapEngine(chosen, CpuBackEnd(self.tier))
        self.values = 0
        self.groups: list[list[tuple[SwapHandle, int, int]]] = []
        self.holders: list[Any] = []
        self.largest = 0
        self.beyond_window = 0
        """Bytes that were read, and whose handles lived on, or that were loaded by hand."""

    @rule(
        target=handles,
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
        twice=st.booleans(),
        aliased=st.booleans(),
        held=st.booleans(),
        path=st.sampled_from(["a", "b"]),
        name=st.sampled_from(["", "", "by hand"]),
    )
    def close_group(
        self, sizes: list[int], twice: bool, aliased: bool, held: bool, path: str, name: str
    ) -> list[tuple[SwapHandle, int, int]]:
        self.tier.failure = None
        group = self.engine.open_group(path, name=name)
        made = []
        with group:
            for size in sizes:
                self.values += 1
                tensor = tensor_of(self.values, size)
                made += [(group.add(tensor), self.values, size) for _ in range(1 + twice)]
                if aliased and size > 1:
                    made.append((group.add(tensor[size // 2 :]), self.values, size - size // 2))
                if held:
                    group.passes(tensor)
                    self.holders.append(tensor)
            del tensor
        self.groups.append(made)
        return made

    @rule()
    def a_holder_lets_go(self) -> None:
        if self.holders:
            self.holders.pop(0)

    @rule(call=st.sampled_from(["launch_offload", "wait_offload", "launch_load", "wait_load"]))
    def moved_by_hand(self, call: str) -> None:
        self.tier.gate.set()
        before = self._loading()
        with contextlib.suppress(SwapStateError):
            self.engine.by_hand("by hand", call)
        self.beyond_window += max(0, self._loading() - before)

    @precondition(lambda self: any(self.groups))
    @rule()
    def the_step_is_given_up(self) -> None:
        read = [handle for group in self.groups for handle, _, _ in group]
        self.engine.abort()
        assert self.engine.live_bytes() == 0
        with pytest.raises(SwapStateError, match="abort_step"):
            read[0].get()
        del read
        for group in self.groups:
            group.clear()

    def _taken_over(self, group: list[tuple[SwapHandle, int, int]]) -> list[tuple[SwapHandle, int, int]]:
        """The group, once the engine has made transfers of it: it may be that nobody had time yet."""
        self.engine.settle()
        self._see(group)
        return group

    def _see(self, group: list[tuple[SwapHandle, int, int]]) -> None:
        found = (handle.entry.nbytes for handle, _, _ in group if handle.tensor is None)
        self.largest = max(self.largest, *found, 0)

    def _loading(self) -> int:
        return self.engine.ledger.now["window"]

    @rule()
    def region_begins(self) -> None:
        self.tier.gate.set()  # it may wait for the pending limit
        self.engine.region_begins()

    @rule(group=handles, last=st.booleans())
    def fetch(self, group: list[tuple[SwapHandle, int, int]], last: bool) -> None:
        if group:
            self.tier.gate.set()
            handle, value, size = group[-1 if last else 0]
            self._check(handle, value, size)
            self._taken_over(group)
            self.beyond_window += handle.entry.nbytes

    @rule(group=handles, index=st.integers(0, 7))
    def a_handle_dies(self, group: list[tuple[SwapHandle, int, int]], index: int) -> None:
        del self._taken_over(group)[index : index + 1]

    @rule(group=consumes(handles))
    def backward_of_a_group(self, group: list[tuple[SwapHandle, int, int]]) -> None:
        self.tier.gate.set()
        self._taken_over(group)
        fused = {id(handle.entry): handle.entry for handle, _, _ in group if len(handle.entry.pieces) > 1}
        self.beyond_window += sum(entry.nbytes for entry in fused.values())  # there until the last of them is read
        fused.clear()
        while group:
            self._check(*group.pop())

    @rule(group=handles)
    def a_read_fails(self, group: list[tuple[SwapHandle, int, int]]) -> None:
        if group:
            self.tier.gate.set()
            self._settle()
            self.tier.failure = OSError(5, "no")
            self.beyond_window += self._taken_over(group)[0][0].entry.nbytes
            try:
                self._check(*group[0])
            except HostMemoryError:
                pass  # or it was on the device already
            finally:
                self._settle()
                self.tier.failure = None

    @rule(go_on=st.booleans())
    def copies_stop_or_go_on(self, go_on: bool) -> None:
        (self.tier.gate.set if go_on else self.tier.gate.clear)()

    @rule()
    def a_moment_passes(self) -> None:
        time.sleep(0.001)

    @invariant()
    def the_rules_of_the_tier_are_kept(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.broken_rules == []

    @invariant()
    def the_limits_are_kept(self) -> None:
        if hasattr(self, "tier"):
            for group in self.groups:
                self._see(group)
            peaks, settings = self.engine.ledger.peaks, self.engine.settings
            assert peaks["pending"] <= settings.pending + self.largest
            assert peaks["window"] <= settings.window + self.largest + self.beyond_window
            assert peaks["host"] <= self.tier.limit

    def _check(self, handle: SwapHandle, value: int, size: int) -> None:
        array = handle.get().asnumpy()
        assert array.shape == (size,)
        assert (array == value).all()

    def _settle(self) -> None:
        """Wait until nothing is written any more: a write that fails would raise elsewhere."""
        deadline = time.monotonic() + 10
        with self.engine._lock:
            self.engine._offloads._launch_all_held()
        while self.engine._offloads.backlog or any(
            entry.busy for group in list(self.engine._groups.values()) for entry in group.entries
        ):
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.gate.set()
        for group in self.groups:  # hypothesis still refers to the lists
            group.clear()
        self.holders.clear()
        deadline = time.monotonic() + 10
        while self.engine.live_bytes() or self.tier.used:
            assert time.monotonic() < deadline, f"{self.engine.live_bytes()} bytes are live, {self.tier.used} used"
            time.sleep(0.001)
        self.engine.close()
        assert self.tier.broken_rules == []
        assert set(self.engine.ledger.now.values()) == {0}
        assert self.engine._offloads.backlog == 0
        self.the_limits_are_kept()
        assert not self.engine._takeovers.by_address
        assert not self.engine._groups


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # threads: shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow],
)
