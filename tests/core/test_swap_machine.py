"""Random interleavings of forward, backward and dying handles: values are right, and nothing is left."""

import time

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hyper_parallel.core.activation_memory.swap_engine import SwapEngine
from hyper_parallel.core.activation_memory.swap_group import SwapHandle
from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import HostMemoryError
from tests.core.swap_fakes import FakeTier, tensor_of

SIZES = (1, 700, 1024, 3000)


class Swapping(RuleBasedStateMachine):
    """Groups are closed, tensors are read, handles die, while copies stop and go on and fail."""

    handles = Bundle("handles")

    @initialize(
        window=st.integers(1, 40_000),
        pending=st.integers(40_000, 100_000),
        limit=st.sampled_from([2**30, 30_000]),
    )
    def begin(self, window: int, pending: int, limit: int) -> None:
        self.tier = FakeTier(limit)
        chosen = SwapSettings(min_bytes=0, window=window, pending=pending, when_exhausted=("keep",))
        self.engine = SwapEngine(chosen, self.tier)
        self.values = 0
        self.groups: list[list[tuple[SwapHandle, int, int]]] = []

    @rule(
        target=handles,
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
        twice=st.booleans(),
        path=st.sampled_from(["a", "b"]),
    )
    def close_group(self, sizes: list[int], twice: bool, path: str) -> list[tuple[SwapHandle, int, int]]:
        self.tier.failure = None
        group = self.engine.open_group(path)
        made = []
        with group:
            for size in sizes:
                self.values += 1
                tensor = tensor_of(self.values, size)
                made += [(group.add(tensor), self.values, size) for _ in range(1 + twice)]
        self.groups.append(made)
        return made

    @rule()
    def region_begins(self) -> None:
        self.tier.gate.set()  # it may wait for the pending limit
        self.engine.region_begins()

    @rule(group=handles, last=st.booleans())
    def fetch(self, group: list[tuple[SwapHandle, int, int]], last: bool) -> None:
        if group:
            self.tier.gate.set()
            self._check(*group[-1 if last else 0])

    @rule(group=handles, index=st.integers(0, 7))
    def a_handle_dies(self, group: list[tuple[SwapHandle, int, int]], index: int) -> None:
        del group[index : index + 1]

    @rule(group=consumes(handles))
    def backward_of_a_group(self, group: list[tuple[SwapHandle, int, int]]) -> None:
        self.tier.gate.set()
        while group:
            self._check(*group.pop())

    @rule(group=handles)
    def a_read_fails(self, group: list[tuple[SwapHandle, int, int]]) -> None:
        if group:
            self.tier.gate.set()
            self._settle()
            self.tier.failure = OSError(5, "no")
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
        deadline = time.monotonic() + 10
        while self.engine.live_bytes() or self.tier.used:
            assert time.monotonic() < deadline, f"{self.engine.live_bytes()} bytes are live, {self.tier.used} used"
            time.sleep(0.001)
        self.engine.close()
        assert self.tier.broken_rules == []
        assert (self.engine.ledger.now["resident"], self.engine.ledger.now["host"]) == (0, 0)
        assert (self.engine.ledger.now["window"], self.engine._offloads.backlog) == (0, 0)
        assert not self.engine._by_address
        assert not self.engine._groups


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # threads: shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow],
)
