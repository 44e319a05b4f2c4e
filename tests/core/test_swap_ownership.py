"""Storages are moved once, and what other code holds isn't moved at all: nothing of it is ever copied."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import auto_mixed_precision

from hyper_parallel import SwapManager
from ms_ops.autograd import wait_for_operators
from ms_ops.tensors import storage_of
from tests.core.swap_fakes import FakeTier, engine_with, group_of, on_host, tensor_of, value_of, wait_for
from tests.core.swap_nets import Sent, assert_exact_and_swapped
from tests.helpers import (
    SWAP,
    Layer,
    Stack,
    assert_same,
    gradients,
    mean_square,
    numbers,
    on,
    seeded,
    settled,
)

X = numbers(8, 8)


# ---- aliases, in the engine


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "a reshape": lambda t: t.reshape(-1),
    "a transpose": lambda t: t.T,
    "a slice with an offset": lambda t: t[3:5],
    "a column": lambda t: t[:, 2],
    "every second row": lambda t: t[::2],
    "broadcast": lambda t: ops.broadcast_to(t[0:1], (4, 8)),
    "a slice of a transpose": lambda t: t.T[1:, 2:4],
}


def test_all_views_of_a_storage_are_one_transfer_and_come_back_as_aliases() -> None:
    base = numbers(8, 8)
    views = {name: view(base) for name, view in VIEWS.items()}
    assert {storage_of(view) for view in views.values()} == {storage_of(base)}
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles = group_of(engine, *views.values())
        on_host(handles)
        assert (engine.ledger.counts["offloaded_bytes"], len(tier.log)) == (base.nbytes, 1)
        assert engine.ledger.counts["duplicate_bytes"] == sum(v.nbytes for v in list(views.values())[1:])
        back = [handle.get() for handle in handles]
        assert len({storage_of(tensor) for tensor in back}) == 1
        assert engine.ledger.counts["loaded_bytes"] == base.nbytes
        for tensor, (name, view) in zip(back, views.items(), strict=True):
            assert np.array_equal(tensor.asnumpy(), view.asnumpy()), name
            assert (tensor.stride(), tensor.storage_offset()) == (view.stride(), view.storage_offset()), name


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_alone_brings_its_whole_storage(name: str) -> None:
    base = numbers(8, 8)
    view, want = VIEWS[name](base), VIEWS[name](base).asnumpy().copy()
    with engine_with(FakeTier()) as engine:
        (handle,) = group_of(engine, view)
        del view, base
        on_host([handle])
        assert engine.ledger.counts["offloaded_bytes"] == 256
        assert np.array_equal(handle.get().asnumpy(), want)


def test_views_of_one_storage_in_two_groups_are_one_transfer() -> None:
    base = numbers(8, 8)
    tier = FakeTier()
    with engine_with(tier) as engine:
        tier.gate.clear()
        first, second = group_of(engine, base), group_of(engine, base.T)
        tier.gate.set()
        on_host([*first, *second])
        first.clear()
        assert np.array_equal(second[0].get().asnumpy(), base.asnumpy().T)
    assert len(tier.first_values("write")) == 1


def test_an_address_that_is_used_again_is_another_storage() -> None:
    """Freed as soon as it is on host, so that the next tensor may lie where it was."""
    tier = FakeTier()
    with engine_with(tier) as engine:
        handles, addresses = [], set()
        for value in range(20):
            tensor = tensor_of(value) * 1
            addresses.add(storage_of(tensor))
            handles += group_of(engine, tensor)
            del tensor
            on_host(handles)
        assert len(addresses) < 20, "no address was used again: this shows nothing"
        assert [value_of(handle) for handle in reversed(handles)] == list(range(19, -1, -1))
        assert engine.ledger.counts["duplicate_bytes"] == 0


def test_the_memory_of_what_is_on_host_is_free() -> None:
    """A weak reference to the buffer under the tensor: dead as soon as it is on host."""
    array = np.full(1024, 3, np.float32)
    gone = weakref.ref(array)
    with engine_with(FakeTier()) as engine:
        (handle,) = group_of(engine, Tensor.from_numpy(array))
        del array
        on_host([handle])
        wait_for(lambda: gone() is None)
        assert value_of(handle) == 3


# ---- weights


class Precise(nn.Cell):
    """Matrix products with a weight, with its transpose, and with a part of another weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.dense = nn.Dense(8, 8)
        self.table = Parameter(numbers(12, 8, seed=seed + 50), name="table")
        seeded(self, seed)

    def construct(self, x: Tensor) -> Tensor:
        y = self.dense(ops.tanh(x))
        y = ops.matmul(y, self.table[2:10].T)
        return (ops.matmul(y, self.dense.weight.T) + x).astype(ms.float32)


def precise(put: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
    return Stack([put(Precise(1)), Layer(8), put(Precise(2)), Layer(8, seed=1)])


def assert_no_weight_is_copied(sent: Sent, net: nn.Cell, views: bool) -> None:
    for weight in net.get_parameters():
        for dtype in (ms.float32, ms.float16):
            values = weight.astype(dtype)
            for view in (values, values.T, values[2:10], values[2:10].T)[: 4 if views else 1]:
                assert not sent.has(view), f"{weight.name} in {dtype}"


def as_float16(cell: nn.Cell) -> nn.Cell:
    return cell.to_float(ms.float16)


MIXED: dict[str, Callable[[nn.Cell], nn.Cell]] = {
    "float32": lambda net: net,
    "to_float": lambda net: [as_float16(cell) for cell in net.layers[::2]] and net,
    **{level: lambda net, level=level: auto_mixed_precision(net, level, ms.float16) for level in ("O1", "O2", "O3")},
    "auto": lambda net: auto_mixed_precision(net, "auto", ms.float16),
}


def loss(output: Tensor) -> Tensor:
    return mean_square(output.astype(ms.float32))


@pytest.mark.parametrize(
    ("mixed", "frozen"),
    [(mixed, frozen) for mixed in MIXED for frozen in ("none", "all", "some")],
)
def test_weights_their_views_and_casts_are_left_alone(
    mixed: str, frozen: str, sent: Sent, manager: SwapManager
) -> None:
    def make(put: Callable[[nn.Cell], nn.Cell]) -> nn.Cell:
        net = precise(lambda cell: cell)
        for weight in net.get_parameters():
            if frozen == "all" or (frozen == "some" and "dense" in weight.name):
                weight.requires_grad = False
        net = MIXED[mixed](net)
        stack = next(cell for _, cell in net.cells_and_names() if "layers" in cell._cells)
        for layer in list(stack.layers)[::2]:
            put(layer)
        return net

    nets = [make(lambda cell: on(cell, SWAP)), make(lambda cell: cell)]
    got, want = (gradients(net, X, wait=net is nets[0], loss=loss) for net in nets)
    assert_same(got, want)
    assert manager.stats().offloaded_bytes > 0
    # a kernel may take a contiguous copy of a view: that of a frozen weight has no history, and is the region's own
    assert_no_weight_is_copied(sent, nets[1], views=frozen == "none")
    assert sum(cell.parameter_bytes for cell in manager.stats().cells.values()) > 0


# ---- gathered weights, as FSDP has them


class Sharded(nn.Cell):
    """Its weight is whole between a pre-hook and a post-hook only, in a storage of its own each time."""

    def __init__(self, seed: int, as_attribute: bool) -> None:
        super().__init__()
        self.whole = numbers(8, 8, seed=seed)
        self.weight = Parameter(self.whole[:4].copy(), name=f"w{seed}")
        self.as_attribute, self.gathered = as_attribute, None
        self.storages: list[int] = []
        self.register_forward_pre_hook(self.gather)
        self.register_forward_hook(self.reshard)
        if not as_attribute:
            self.register_backward_pre_hook(self.gather)

    def gather(self, cell: nn.Cell, inputs: Any) -> None:
        whole = ops.stop_gradient(self.whole * 1)
        self.storages.append(storage_of(whole))
        if self.as_attribute:
            self.gathered = whole
        else:
            self.weight.set_data(whole, slice_shape=True)

    def reshard(self, cell: nn.Cell, inputs: Any, output: Any) -> None:
        if self.as_attribute:
            self.gathered = None
        else:
            self.weight.set_data(self.whole[:4].copy(), slice_shape=True)

    def construct(self, x: Tensor) -> Tensor:
        weight = self.gathered if self.as_attribute else self.weight
        return ops.tanh(ops.matmul(x, weight)) * x


@pytest.mark.parametrize(("as_attribute", "around"), [(False, "each"), (False, "all"), (True, "each")])
def test_gathered_weights_are_left_alone(sent: Sent, manager: SwapManager, as_attribute: bool, around: str) -> None:
    def make(policy: Any) -> nn.Cell:
        cells = [Sharded(seed, as_attribute) for seed in range(3)]
        if around == "each":
            return Stack([on(cell, policy) for cell in cells])
        return Stack([on(Stack(cells), policy), Layer(8)])

    swapping, plain = make(SWAP), make(None)
    grads = [ms.grad(lambda x, net=net: mean_square(net(x)))(X).asnumpy() for net in (swapping, plain)]
    assert np.array_equal(*grads)
    stats = manager.stats()
    assert stats.live_bytes == 0
    for seed in range(3):
        assert not sent.has(numbers(8, 8, seed=seed))
    assert sum(cell.parameter_bytes + cell.held_bytes for cell in stats.cells.values()) > 0


class Freed(nn.Cell):
    """Its weight's storage is filled by a pre-hook, freed by a post-hook, and filled again for backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = ops.stop_gradient(numbers(8, 8, seed=seed) * 1)
        self.values = self.weight.asnumpy().copy()
        self.holder = [self.weight]  # no tensor of the cell: only the storage tells
        del self.weight
        self.register_forward_pre_hook(self.gather)
        self.register_backward_pre_hook(self.gather)
        self.register_forward_hook(self.free)

    def gather(self, cell: nn.Cell, inputs: Any) -> None:
        storage = self.holder[0].untyped_storage()
        if not storage.nbytes():
            storage.resize_(256)
            ctypes.memmove(storage.data_ptr(), self.values.ctypes.data, 256)

    def free(self, cell: nn.Cell, inputs: Any, output: Any) -> None:
        wait_for_operators()
        self.holder[0].untyped_storage().resize_(0)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(ops.matmul(x, self.holder[0])) * x


def test_a_storage_that_was_freed_before_its_region_ended_is_left_alone(sent: Sent, manager: SwapManager) -> None:
    nets = [Stack([on(Stack([Freed(seed) for seed in range(3)]), policy), Layer(8)]) for policy in (SWAP, None)]
    got, want = (ms.grad(lambda x, net=net: mean_square(net(x)))(X).asnumpy().copy() for net in nets)
    assert np.array_equal(got, want)
    assert manager.stats().held_bytes > 0
    assert b"" not in sent


def test_a_freed_storage_gives_what_was_filled_in_again() -> None:
    tensor = numbers(8, 8) * 1
    want = tensor.asnumpy().copy()
    with engine_with(FakeTier()) as engine:
        group = engine.open_group("layer")
        with group:
            handle = group.add(tensor)
            wait_for_operators()
            tensor.untyped_storage().resize_(0)
        engine.region_begins()
        storage = tensor.untyped_storage()
        storage.resize_(want.nbytes)
        ctypes.memmove(storage.data_ptr(), want.ctypes.data, want.nbytes)
        assert np.array_equal(handle.get().asnumpy(), want)
        assert (engine.ledger.counts["held_bytes"], engine.tier.used) == (want.nbytes, 0)


# ---- skips


class Skips(nn.Cell):
    """What the first layer gives is read again three layers later."""

    def __init__(self, put: Callable[[nn.Cell], nn.Cell], check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.check = check
        self.layers = nn.CellList([put(Layer(8, seed=seed)) for seed in range(5)])

    def construct(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        y = first
        for layer in self.layers[1:4]:
            y = layer(y)
        self.check(first)
        return self.layers[4](y + first * first)


def test_a_skip_connection_over_three_layers_stays_until_it_is_read(sent: Sent) -> None:
    checked: list[bool] = []

    def check(first: Tensor) -> None:
        if not checked:  # in the swapped net, which is the first to run
            settled(None)
            checked.append(sent.has(first))

    assert_exact_and_swapped(lambda put: Skips(put, check), X)
    assert checked == [False]
