"""What can't be named in a rule: what no interception sees, and what MindSpore spells out."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, mint, nn, ops

from ms_ops.catalogue import (
    EXPANDED,
    UNSEEN,
    all_names,
    dispatch_names,
    why_refused,
)
from tests.ms_ops.dispatched import (
    IMAGE,
    WORDS,
    YES,
    B,
    F,
    V,
    X,
    numbers,
    operator,
    seen,
)


@ms.jit
def compiled(x: Tensor) -> Tensor:
    return ops.tanh(x)


REFUSED: dict[str, Callable[[], Any]] = {
    "ops.Fill": lambda: ops.operations.Fill()(ms.float32, (2, 2), 1.0),
    "ops.Empty": lambda: operator("Empty")((2, 2), ms.float32, None),
    "ops.EmptyLike": lambda: mint.empty_like(X),
    "ops.DType": lambda: ops.operations.DType()(X),
    "ops.Rank": lambda: ops.operations.Rank()(X),
    "ops.Shape": lambda: ops.operations.Shape()(X),
    "ops.Depend": lambda: ops.operations.Depend()(X, X),
    "mint.empty": lambda: mint.empty((2, 2)),
    "mint.empty_like": lambda: mint.empty_like(X),
    "ms.Tensor": lambda: (Tensor([1.0]), Tensor(X)),
    "Tensor.__getitem__": lambda: (X[0], X[:, 1], X[..., 0], list(X)),
    "Tensor.__setitem__": lambda: numbers(4, 4).__setitem__((slice(None), 1), 2.0),
    "Tensor.contiguous": lambda: X.contiguous(),
    "Tensor.asnumpy": lambda: X.asnumpy(),
    "Tensor.item": lambda: numbers(1).item(),
    "Tensor.tolist": lambda: X.tolist(),
    "ops.shape": lambda: ops.shape(X),
    "ops.rank": lambda: ops.rank(X),
    "ops.depend": lambda: ops.depend(X, X),
    "ms.jit": lambda: compiled(X),
}


@pytest.mark.parametrize("name", sorted(UNSEEN.keys() | REFUSED.keys()))
def test_what_is_refused_is_not_seen(name: str) -> None:
    assert seen(REFUSED[name]) == []
    assert why_refused(name) == f"{name} {UNSEEN[name]}"
    assert name.rpartition(".")[2] not in all_names()


def test_indices_are_seen_as_the_reason_for_getitem_says() -> None:
    assert seen(lambda: numbers(4, 4).__setitem__(WORDS, 2.0))[-1] == "TensorScatterUpdate"
    assert seen(lambda: X[WORDS, WORDS])[-1] == "GatherNd"


SPELLED_OUT: dict[str, Callable[[], Any]] = {
    "ops.addbmm": lambda: ops.addbmm(X, B, B),
    "ops.addmm": lambda: ops.addmm(X, X, X),
    "ops.addmv": lambda: ops.addmv(V, X, V),
    "ops.amax": lambda: ops.amax(X),
    "ops.amin": lambda: ops.amin(X),
    "ops.arange": lambda: ops.arange(4),
    "ops.argmax": lambda: ops.argmax(X),
    "ops.argmin": lambda: ops.argmin(X),
    "ops.avg_pool2d": lambda: ops.avg_pool2d(IMAGE, 2),
    "ops.baddbmm": lambda: ops.baddbmm(B, B, B),
    "ops.bmm": lambda: ops.bmm(B, B),
    "ops.cat": lambda: ops.cat((X, X)),
    "ops.chunk": lambda: ops.chunk(X, 2),
    "ops.clip_by_value": lambda: ops.clip_by_value(X, 0, 1),
    "ops.conv1d": lambda: ops.conv1d(B, numbers(4, 4, 3)),
    "ops.count_nonzero": lambda: ops.count_nonzero(X),
    "ops.cross_entropy": lambda: ops.cross_entropy(X, WORDS),
    "ops.dot": lambda: ops.dot(X, X),
    "ops.flip": lambda: ops.flip(X, (0,)),
    "ops.full": lambda: ops.full((2, 2), 1.0),
    "ops.full_like": lambda: ops.full_like(X, 1.0),
    "ops.gelu": lambda: ops.gelu(X),
    "ops.glu": lambda: ops.glu(X),
    "ops.hardtanh": lambda: ops.hardtanh(X),
    "ops.hstack": lambda: ops.hstack((X, X)),
    "ops.inner": lambda: ops.inner(X, X),
    "ops.kl_div": lambda: ops.kl_div(X, X),
    "ops.l1_loss": lambda: ops.l1_loss(X, X),
    "ops.leaky_relu": lambda: ops.leaky_relu(X),
    "ops.logsigmoid": lambda: ops.logsigmoid(X),
    "ops.logsumexp": lambda: ops.logsumexp(X, 0),
    "ops.meshgrid": lambda: ops.meshgrid(V, V),
    "ops.mm": lambda: ops.mm(X, X),
    "ops.movedim": lambda: ops.movedim(X, 0, 1),
    "ops.mse_loss": lambda: ops.mse_loss(X, X),
    "ops.mv": lambda: ops.mv(X, V),
    "ops.nll_loss": lambda: ops.nll_loss(X, WORDS),
    "ops.norm": lambda: ops.norm(X),
    "ops.outer": lambda: ops.outer(V, V),
    "ops.permute": lambda: ops.permute(X, (1, 0)),
    "ops.rand": lambda: ops.rand(2, 2),
    "ops.randn": lambda: ops.randn(2, 2),
    "ops.repeat_interleave": lambda: ops.repeat_interleave(X, 2),
    "ops.softmin": lambda: ops.softmin(X),
    "ops.softplus": lambda: ops.softplus(X),
    "ops.swapaxes": lambda: ops.swapaxes(X, 0, 1),
    "ops.tanhshrink": lambda: ops.tanhshrink(X),
    "ops.true_divide": lambda: ops.true_divide(X, X),
    "ops.unbind": lambda: ops.unbind(X),
    "ops.unfold": lambda: ops.unfold(IMAGE, 2),
    "ops.unsqueeze": lambda: ops.unsqueeze(X, 0),
    "ops.var": lambda: ops.var(X),
    "ops.vstack": lambda: ops.vstack((X, X)),
    "ops.where": lambda: ops.where(YES, X, X),
    "mint.cat": lambda: mint.cat((X, X)),
    "mint.flip": lambda: mint.flip(X, (0,)),
    "mint.linear": lambda: F.linear(X, X),
    "mint.permute": lambda: mint.permute(X, (1, 0)),
    "mint.relu6": lambda: F.relu6(X),
    "mint.swapaxes": lambda: mint.swapaxes(X, 0, 1),
    "mint.unbind": lambda: mint.unbind(X),
    "mint.where": lambda: mint.where(YES, X, X),
    "nn.CrossEntropyLoss": lambda: nn.CrossEntropyLoss()(X, WORDS),
    "nn.Dense": lambda: nn.Dense(4, 4)(X),
    "nn.LeakyReLU": lambda: nn.LeakyReLU()(X),
    "nn.LogSigmoid": lambda: nn.LogSigmoid()(X),
    "nn.MSELoss": lambda: nn.MSELoss()(X, X),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(4, 2)(B, B, B),
    "Tensor.copy": lambda: X.copy(),
    "Tensor.std": lambda: X.std(),
    "Tensor.var": lambda: X.var(),
}


@pytest.mark.parametrize("name", sorted(EXPANDED.keys() | SPELLED_OUT.keys()))
def test_what_is_spelled_out_is_dispatched_so(name: str) -> None:
    parts = seen(SPELLED_OUT[name])
    assert " ".join(parts) == EXPANDED[name]
    why = why_refused(name)
    assert why.startswith(f"MindSpore runs {name} as ")
    for part in parts:
        assert part in why
        assert dispatch_names(part)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu", "MindSpore runs ops.gelu as Sqrt, Div, Erf, AddExt, Mul; name one of these"),
        ("mindspore.ops.gelu", "MindSpore runs ops.gelu as Sqrt, Div, Erf, AddExt, Mul; name one of these"),
        ("mint.nn.functional.gelu", ""),
        ("ops.bmm", "MindSpore runs ops.bmm as BatchMatMul; name MatMul"),
        ("mint.nn.functional.linear", "MindSpore runs mint.linear as Dense; name MatMul"),
        ("linear", "MindSpore runs mint.linear as Dense; name MatMul"),
        ("jit", f"ms.jit {UNSEEN['ms.jit']}"),
        ("getitem", f"Tensor.__getitem__ {UNSEEN['Tensor.__getitem__']}"),
        ("Tensor.getitem", f"Tensor.__getitem__ {UNSEEN['Tensor.__getitem__']}"),
        ("__setitem__", f"Tensor.__setitem__ {UNSEEN['Tensor.__setitem__']}"),
        ("mindspore.Tensor", f"ms.Tensor {UNSEEN['ms.Tensor']}"),
        ("Empty", f"ops.Empty {UNSEEN['ops.Empty']}"),
        ("ones", ""),
        ("GeLU", ""),
        ("MatMul", ""),
        ("nn.Dense", "MindSpore runs nn.Dense as MatMul, BiasAdd; name one of these"),
        ("nn.Tanh", ""),
        ("concat", ""),
        ("ops.concat", ""),
        ("no_such", ""),
        ("", ""),
        (".", ""),
    ],
)
def test_a_reason_is_found_however_the_name_is_written(name: str, expected: str) -> None:
    assert why_refused(name) == expected
