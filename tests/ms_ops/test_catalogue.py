"""One name per operator: what every route dispatches, and what of it users can name."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_ops.autograd import saved_tensors_hooks, wait_for_operators
from ms_ops.catalogue import (
    _FAMILIES,
    COLLECTIVES,
    EXPANDED,
    MATRIX_PRODUCTS,
    ONLY_IN_2_10,
    UNSEEN,
    VIEWS,
    all_names,
    catalogue_name,
    close_names,
    dispatch_names,
    why_refused,
)
from ms_ops.dispatch import MATRIX_PRODUCTS as PLAIN_PRODUCTS
from ms_ops.dispatch import RANDOM_OPERATORS, Interception
from ms_ops.tensors import storage_of

F = mint.nn.functional
IS_2_9 = ms.__version__.startswith("2.9")
PYTHON = {"IsShapeUnKnown", "make_range", "sequence_len", "typeof"}
"""What MindSpore computes with in Python, and dispatches too."""


def numbers(*shape: int) -> Tensor:
    return Tensor(np.random.RandomState(0).randn(*shape).astype(np.float32))


V, X, B, IMAGE, KERNEL = numbers(4), numbers(4, 4), numbers(2, 4, 4), numbers(2, 4, 8, 8), numbers(4, 4, 3, 3)
HEADS, ROW = numbers(1, 2, 16, 16), numbers(1, 4)
YES = Tensor(np.eye(4) > 0)
WORDS, TWO = Tensor(np.array([0, 1, 2, 3], np.int32)), Tensor(np.zeros((2, 2), np.int64))


def seen(run: Callable[[], Any]) -> list[str]:
    """Names of what `run` dispatches, each once, in the order in which it begins.

    Operators of Ascend are seen, and fail then. Saved-tensor hooks are entered as in a region: without them MindSpore
    passes over operators none of whose tensors comes from Python.
    """
    found: list[str] = []
    with (
        contextlib.suppress(RuntimeError),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        Interception(lambda name, call, args: found.append(name) or call(*args)),
    ):
        run()
        wait_for_operators()
    return [name for name in dict.fromkeys(found) if name not in PYTHON]


def operator(name: str) -> Any:
    return getattr(ops.auto_generate, name)()


# ---- what one concept is dispatched as, by route

ROUTES: dict[str, dict[str, tuple[Callable[[], Any], str]]] = {
    "MatMul": {
        "@": (lambda: X @ X, "MatMulExt"),
        "@ of batches": (lambda: B @ B, "MatMulExt"),
        "ops.matmul": (lambda: ops.matmul(X, X), "MatMulExt"),
        "mint.matmul": (lambda: mint.matmul(X, X), "MatMulExt"),
        "ops.bmm": (lambda: ops.bmm(B, B), "BatchMatMul"),
        "mint.bmm": (lambda: mint.bmm(B, B), "BatchMatMulExt"),
        "ops.mm": (lambda: ops.mm(X, X), "MatMul"),
        "mint.mm": (lambda: mint.mm(X, X), "Mm"),
        "mint.mv": (lambda: mint.mv(X, V), "Mv"),
        "mint.dot": (lambda: mint.dot(V, V), "Dot"),
        "mint.addmm": (lambda: mint.addmm(X, X, X), "Addmm"),
        "mint.addbmm": (lambda: mint.addbmm(X, B, B), "Addbmm"),
        "mint.baddbmm": (lambda: mint.baddbmm(B, B, B), "Baddbmm"),
        "MatMul": (lambda: ops.MatMul()(X, X), "MatMul"),
        "BatchMatMul": (lambda: ops.BatchMatMul()(B, B), "BatchMatMul"),
        "ops.dense": (lambda: ops.dense(X, X), "Dense"),
        "mint linear": (lambda: F.linear(X, X, V), "Dense"),
        "mint.nn.Linear": (lambda: mint.nn.Linear(4, 4)(X), "Dense"),
        "nn.Dense without bias": (lambda: nn.Dense(4, 4, has_bias=False)(X), "MatMul"),
    },
    "Attention": {
        "ops": (lambda: ops.flash_attention_score(HEADS, HEADS, HEADS, 2, input_layout="BNSD"), "FlashAttentionScore"),
    },
    "Conv": {
        "nn": (lambda: nn.Conv2d(4, 4, 3)(IMAGE), "Conv2D"),
        "nn.Conv3d": (lambda: nn.Conv3d(4, 4, 2)(numbers(1, 4, 3, 3, 3)), "Conv3D"),
        "nn.Conv2dTranspose": (lambda: nn.Conv2dTranspose(4, 4, 3)(IMAGE), "Conv2DTranspose"),
        "ops": (lambda: ops.conv2d(IMAGE, KERNEL), "Conv2D"),
        "mint": (lambda: F.conv2d(IMAGE, KERNEL), "Conv2DExt"),
        "mint transposed": (lambda: F.conv_transpose2d(IMAGE, KERNEL), "ConvTranspose2D"),
    },
    "Add": {
        "+": (lambda: X + X, "AddExt"),
        "+ 2": (lambda: X + 2, "AddExt"),
        "ops": (lambda: ops.add(X, X), "Add"),
        "mint": (lambda: mint.add(X, X, alpha=2), "AddExt"),
    },
    "BiasAdd": {"ops": (lambda: ops.bias_add(X, V), "BiasAdd")},
    "AddN": {"ops": (lambda: ops.addn([X, X]), "AddN")},
    "Sub": {
        "-": (lambda: X - X, "SubExt"),
        "2 -": (lambda: 2 - X, "Sub"),
        "ops": (lambda: ops.sub(X, X), "Sub"),
        "mint": (lambda: mint.sub(X, 2), "SubExt"),
    },
    "Mul": {
        "*": (lambda: X * X, "Mul"),
        "* 2": (lambda: X * 2, "Muls"),
        "2 *": (lambda: 2 * X, "Muls"),
        "ops": (lambda: ops.mul(X, X), "Mul"),
        "mint": (lambda: mint.mul(X, 2), "Muls"),
    },
    "Div": {
        "/": (lambda: X / X, "Div"),
        "/ 2": (lambda: X / 2, "Divs"),
        "ops": (lambda: ops.div(X, X), "Div"),
        "mint": (lambda: mint.div(X, X), "Div"),
    },
    "DivMod": {"mint": (lambda: mint.div(X, X, rounding_mode="floor"), "DivMod")},
    "FloorDiv": {"//": (lambda: X // 2, "FloorDiv")},
    "Pow": {"**": (lambda: X**2, "Pow"), "mint": (lambda: mint.pow(X, 2), "PowTensorScalar")},
    "Equal": {"==": (lambda: X == X, "Equal"), "== 2": (lambda: X == 2, "EqScalar")},
    "Softmax": {
        "nn": (lambda: nn.Softmax()(X), "Softmax"),
        "ops": (lambda: ops.softmax(X), "Softmax"),
        "mint": (lambda: F.softmax(X, -1), "Softmax"),
    },
    "LogSoftmax": {
        "ops": (lambda: ops.log_softmax(X), "LogSoftmax"),
        "mint": (lambda: F.log_softmax(X, -1), "LogSoftmaxExt"),
    },
    "LayerNorm": {
        "nn": (lambda: nn.LayerNorm((4,))(X), "LayerNorm"),
        "ops": (lambda: ops.layer_norm(X, (4,), V, V), "LayerNormExt"),
        "mint": (lambda: F.layer_norm(X, (4,), V, V), "LayerNormExt"),
    },
    "RmsNorm": {"ops": (lambda: ops.rms_norm(X, V), "RmsNorm")},
    "GroupNorm": {"nn": (lambda: nn.GroupNorm(2, 4)(IMAGE), "GroupNorm")},
    "BatchNorm": {
        "nn": (lambda: nn.BatchNorm2d(4).set_train()(IMAGE), "BatchNorm"),
        "ops": (lambda: ops.batch_norm(IMAGE, V, V, V, V), "BatchNorm"),
        "mint": (lambda: F.batch_norm(IMAGE, V, V), "BatchNormExt"),
    },
    "Dropout": {
        "nn": (lambda: nn.Dropout(p=0.5).set_train()(X), "Dropout"),
        "ops": (lambda: ops.dropout(X, 0.5), "Dropout"),
        "ops.dropout2d": (lambda: ops.dropout2d(IMAGE, 0.5), "Dropout2D"),
        "mint": (lambda: F.dropout(X, 0.5), "FuncDropoutExt" if IS_2_9 else "DropoutExt"),
    },
    "GeLU": {
        "nn": (lambda: nn.GELU()(X), "GeLU"),
        "ops, tanh": (lambda: ops.gelu(X, approximate="tanh"), "GeLU"),
        "mint": (lambda: F.gelu(X), "GeluExt"),
        "nn.FastGelu": (lambda: nn.FastGelu()(X), "FastGeLU"),
    },
    "SiLU": {"nn": (lambda: nn.SiLU()(X), "SiLU"), "mint": (lambda: F.silu(X), "SiLU")},
    "ReLU": {"nn": (lambda: nn.ReLU()(X), "ReLU"), "mint": (lambda: F.relu(X), "ReLU")},
    "Elu": {"ops": (lambda: ops.elu(X), "Elu"), "mint": (lambda: F.elu(X), "EluExt")},
    "Tanh": {"nn": (lambda: nn.Tanh()(X), "Tanh"), "mint": (lambda: mint.tanh(X), "Tanh")},
    "Sigmoid": {"nn": (lambda: nn.Sigmoid()(X), "Sigmoid"), "mint": (lambda: mint.sigmoid(X), "Sigmoid")},
    "Softplus": {"mint": (lambda: F.softplus(X), "SoftplusExt")},
    "Exp": {"ops": (lambda: ops.exp(X), "Exp"), "Tensor": (lambda: X.exp(), "Exp")},
    "Cast": {
        "ops": (lambda: ops.cast(X, ms.float16), "Cast"),
        "astype": (lambda: X.astype(ms.float16), "Cast"),
        "to": (lambda: X.to(ms.float16), "Cast"),
    },
    "Sum": {
        "ops": (lambda: ops.sum(X), "SumExt"),
        "Tensor": (lambda: X.sum(0), "SumExt"),
        "ReduceSum": (lambda: ops.ReduceSum()(X, 0), "ReduceSum"),
    },
    "Mean": {
        "ops": (lambda: ops.mean(X), "ReduceMean"),
        "mint": (lambda: mint.mean(X), "MeanExt"),
        "Tensor": (lambda: X.mean(-1), "MeanExt"),
    },
    "Max": {
        "ops": (lambda: ops.max(X), "Max"),
        "ops, axis": (lambda: ops.max(X, 0), "ArgMaxWithValue"),
        "mint, axis": (lambda: mint.max(X, 1), "MaxDim"),
        "amax": (lambda: mint.amax(X, 0), "ReduceMax"),
    },
    "Std": {"ops": (lambda: ops.std(X), "ReduceStd"), "mint": (lambda: mint.std(X), "Std")},
    "CumSum": {"ops": (lambda: ops.cumsum(X, 0), "CumSum"), "mint": (lambda: mint.cumsum(X, 0), "CumsumExt")},
    "Gather": {
        "[]": (lambda: X[WORDS], "Gather"),
        "ops": (lambda: ops.gather(X, WORDS, 0), "Gather"),
        "mint": (lambda: mint.gather(X, 0, TWO), "GatherD"),
        "gather_nd": (lambda: ops.gather_nd(X, TWO), "GatherNd"),
        "mint embedding": (lambda: F.embedding(WORDS, X), "Embedding"),
        "index_select": (lambda: mint.index_select(X, 0, Tensor([0, 1])), "IndexSelect"),
    },
    "TopK": {"ops": (lambda: ops.topk(X, 2), "TopK"), "mint": (lambda: mint.topk(X, 2), "TopkExt")},
    "Concat": {"ops": (lambda: ops.concat((X, X)), "Concat"), "mint": (lambda: mint.cat((X, X)), "Concat")},
    "Stack": {"ops": (lambda: ops.stack((X, X)), "Stack"), "mint": (lambda: mint.stack((X, X)), "StackExt")},
    "Pad": {"ops": (lambda: ops.pad(X, (1, 1)), "PadV3"), "mint": (lambda: F.pad(X, (1, 1)), "ConstantPadND")},
    "Clamp": {"ops": (lambda: ops.clamp(X, 0, 1), "ClampScalar")},
    "MaxPool": {
        "nn": (lambda: nn.MaxPool2d(2)(IMAGE), "MaxPool"),
        "ops": (lambda: ops.max_pool2d(IMAGE, 2), "MaxPoolWithArgmaxV2"),
    },
    "AvgPool": {
        "nn": (lambda: nn.AvgPool2d(2)(IMAGE), "AvgPool"),
        "mint": (lambda: F.avg_pool2d(IMAGE, 2), "AvgPool2D"),
    },
    "MSELoss": {"mint": (lambda: F.mse_loss(X, X), "MSELossExt")},
    "Ones": {"ops": (lambda: ops.ones((2, 2)), "Ones"), "mint": (lambda: mint.ones((2, 2)), "Ones")},
    "Zeros": {"ops": (lambda: ops.zeros((2, 2)), "Zeros"), "mint": (lambda: mint.zeros((2, 2)), "Zeros")},
    "Eye": {"ops": (lambda: ops.eye(4), "Eye"), "mint": (lambda: mint.eye(4), "Eye")},
    "Fill": {"ops": (lambda: ops.full((2, 2), 1.0), "FillV2"), "mint": (lambda: mint.full((2, 2), 1.0), "FillScalar")},
    "Identity": {"deepcopy": (lambda: ops.deepcopy(X), "Identity")},
    "Flatten": {"ops": (lambda: ops.flatten(X), "Flatten")},
    "Real": {"ops": (lambda: ops.real(X), "Real")},
    "Tile": {"ops": (lambda: ops.tile(X, (1, 1)), "Tile")},
}


@pytest.mark.parametrize(("name", "route"), [(name, route) for name, routes in ROUTES.items() for route in routes])
def test_a_route_is_dispatched_under_a_name_of_its_concept(name: str, route: str) -> None:
    run, dispatched = ROUTES[name][route]
    assert seen(run) == [dispatched]
    assert catalogue_name(dispatched) == name
    assert dispatched in dispatch_names(name)


@pytest.mark.parametrize(
    ("run", "dispatched"),
    [
        (lambda: nn.Dense(4, 4)(X), ["MatMul", "BiasAdd"]),
        (lambda: nn.Dense(4, 4)(B), ["Reshape", "MatMul", "BiasAdd"]),
        (lambda: nn.Embedding(5, 4)(WORDS), ["Reshape", "Gather"]),
        (lambda: 2 / X, ["Reciprocal", "Muls"]),
        (lambda: nn.Dense(4, 4).to_float(ms.float16)(X), ["Cast", "MatMul", "BiasAdd"]),
        (lambda: X[YES], ["NonZero", "GatherNd"]),
        (lambda: nn.Identity()(X), []),
        (lambda: X.float(), []),
    ],
)
def test_what_a_cell_or_an_expression_is_dispatched_as(run: Callable[[], Any], dispatched: list[str]) -> None:
    assert seen(run) == dispatched


def test_without_saved_tensor_hooks_some_operators_are_passed_over() -> None:
    """Why everything here is measured with hooks; regions enter them."""
    given, found = ops.tanh(X), []

    def run() -> None:
        ops.exp(given)
        ops.zeros((2, 2))

    with Interception(lambda name, call, args: found.append(name) or call(*args)):
        run()
    assert found == []
    assert seen(run) == ["Exp", "Zeros"]


VIEW_ROUTES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "ops.reshape": (lambda x: ops.reshape(x, (2, 8)), "Reshape"),
    "view": (lambda x: x.view(2, 8), "Reshape"),
    "mint.flatten": (lambda x: mint.flatten(x), "Reshape"),
    "View": (lambda x: operator("View")(x, (2, 8)), "View"),
    "ViewDtype": (lambda x: operator("ViewDtype")(x, ms.int32), "ViewDtype"),
    "AsStrided": (lambda x: operator("AsStrided")(x, (2, 2), (1, 1), 0), "AsStrided"),
    "T": (lambda x: x.T, "Transpose"),
    "swapaxes": (lambda x: x.swapaxes(0, 1), "Transpose"),
    "transpose": (lambda x: x.transpose(1, 0), "TransposeExtView"),
    "TExt": (lambda x: operator("TExt")(x), "TransposeExtView"),
    "mint.permute": (lambda x: mint.permute(x, (1, 0)), "TransposeView"),
    "ops.split": (lambda x: ops.split(x, 2)[0], "Split"),
    "ops.split, sizes": (lambda x: ops.split(x, [1, 3], 0)[1], "StridedSlice"),
    "mint.split": (lambda x: mint.split(x, 2)[1], "SplitTensorView"),
    "mint.split, sizes": (lambda x: mint.split(x, [1, 3], 0)[1], "SplitWithSizeView"),
    "SplitTensor": (lambda x: operator("SplitTensor")(x, 2, 0)[1], "SplitTensor"),
    "SplitWithSize": (lambda x: operator("SplitWithSize")(x, [1, 3], 0)[1], "SplitWithSize"),
    "mint.chunk": (lambda x: mint.chunk(x, 2)[1], "ChunkView"),
    "Chunk": (lambda x: operator("Chunk")(x, 2, 0)[1], "Chunk"),
    "ops.unbind": (lambda x: ops.unbind(x)[1], "Unstack"),
    "mint.unbind": (lambda x: mint.unbind(x)[1], "UnstackExtView"),
    "unsqueeze": (lambda x: ops.unsqueeze(x, 0), "ExpandDims"),
    "mint.unsqueeze": (lambda x: mint.unsqueeze(x, 0), "ExpandDimsView"),
    "squeeze": (lambda x: ops.squeeze(x), "Squeeze"),
    "ops.broadcast_to": (lambda x: ops.broadcast_to(x, (2, 4, 4)), "BroadcastTo"),
    "mint.broadcast_to": (lambda x: mint.broadcast_to(x, (2, 4, 4)), "BroadcastToView"),
    "ops.narrow": (lambda x: ops.narrow(x, 0, 0, 2), "Slice"),
    "mint.narrow": (lambda x: mint.narrow(x, 0, 0, 2), "NarrowView"),
    "Narrow": (lambda x: operator("Narrow")(x, 0, 0, 2), "Narrow"),
    "select": (lambda x: x.select(0, 0), "SelectExtView"),
    "[:2]": (lambda x: x[:2], "StridedSlice"),
    "[None]": (lambda x: x[None], "ExpandDims"),
    "SliceExt": (lambda x: operator("SliceExt")(x, 0, 0, 2, 1), "SliceExt"),
    "SliceExtView": (lambda x: operator("SliceExtView")(x, 0, 0, 2, 1), "SliceExtView"),
    "diagonal": (lambda x: x.diagonal(), "Diagonal"),
    "DiagonalView": (lambda x: operator("DiagonalView")(x, 0, 0, 1), "DiagonalView"),
    "stop_gradient": (lambda x: ops.stop_gradient(x), "StopGradient"),
    "Contiguous": (lambda x: operator("Contiguous")(x), "Contiguous"),
}


@pytest.mark.parametrize("route", VIEW_ROUTES)
def test_a_view_is_dispatched_under_a_listed_name_and_shares_its_storage(route: str) -> None:
    run, dispatched = VIEW_ROUTES[route]
    x, results = numbers(4, 4), []
    names = seen(lambda: results.append(run(x)))
    assert names == [dispatched]
    assert catalogue_name(dispatched) == "View"
    assert dispatched in VIEWS
    assert storage_of(results[0]) == storage_of(x)


@pytest.mark.parametrize(
    "run",
    [lambda: ops.flatten(X), lambda: ops.deepcopy(X), lambda: ops.real(X), lambda: ops.tile(X, (1, 1))],
)
def test_what_copies_is_no_view(run: Callable[[], Tensor]) -> None:
    assert not set(seen(run)) & VIEWS
    assert storage_of(run()) != storage_of(X)


# ---- what can't be named


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
        ("nn.Dense", ""),
        ("concat", ""),
        ("ops.concat", ""),
        ("no_such", ""),
        ("", ""),
        (".", ""),
    ],
)
def test_a_reason_is_found_however_the_name_is_written(name: str, expected: str) -> None:
    assert why_refused(name) == expected


# ---- the families


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_family_names_operators_that_exist(family: str) -> None:
    members = frozenset(_FAMILIES[family].split())
    assert members - all_names() <= (ONLY_IN_2_10 if IS_2_9 else frozenset())
    assert dispatch_names(family) >= members & all_names()
    assert {catalogue_name(member) for member in members} == {family}


def test_no_operator_is_in_two_families() -> None:
    members = [member for family in _FAMILIES.values() for member in family.split()]
    assert len(members) == len(set(members))


@pytest.mark.parametrize("family", sorted(set(_FAMILIES) - {"View", "Collective"}))
def test_a_family_holds_nothing_that_writes_or_views(family: str) -> None:
    assert not [name for name in dispatch_names(family) if name.startswith(("Assign", "Inplace", "Scatter"))]
    assert not dispatch_names(family) & (VIEWS | COLLECTIVES)


def test_a_family_is_random_as_a_whole_or_not_at_all() -> None:
    for name in all_names():
        others = dispatch_names(catalogue_name(name)) - {name}
        if name in RANDOM_OPERATORS and others and catalogue_name(name) not in ("Attention", "Dropout"):
            assert others <= RANDOM_OPERATORS, name


def test_every_operator_with_view_or_comm_in_its_name_is_in_its_family() -> None:
    assert {name for name in all_names() if name.endswith("View")} <= VIEWS
    assert {name for name in all_names() if name.startswith(("DistComm", "InnerComm"))} <= COLLECTIVES


def test_products_that_save_just_their_factors_are_products() -> None:
    assert PLAIN_PRODUCTS <= MATRIX_PRODUCTS


@pytest.mark.parametrize(
    ("dispatched", "name"),
    [
        ("TraceExt", "Trace"),
        ("FillV2", "Fill"),
        ("RemainderTensorScalar", "Remainder"),
        ("InnerIndex", "Index"),
        ("MaskedFillScalar", "MaskedFill"),
        ("InplaceAddExt", "InplaceAddExt"),
        ("ScatterAddExt", "ScatterAddExt"),
        ("TupleToTensor", "TupleToTensor"),
        ("NormalFloatTensor", "NormalFloatTensor"),
        ("MyOwn", "MyOwn"),
        ("MyOwnV2", "MyOwnV2"),
        ("make_range", "make_range"),
        ("", ""),
    ],
)
def test_a_variant_goes_by_the_name_of_its_operator(dispatched: str, name: str) -> None:
    assert catalogue_name(dispatched) == name


def test_a_dispatch_name_that_is_no_concept_means_itself() -> None:
    assert dispatch_names("MatMulExt") == {"MatMulExt"}
    assert dispatch_names("Embedding") == dispatch_names("Gather")


@pytest.mark.parametrize("name", ["", "Matmul", "matmul", "make_range", "Primitive", "View ", "*"])
def test_what_nothing_dispatches_means_nothing(name: str) -> None:
    assert dispatch_names(name) == frozenset()


@given(st.sampled_from(sorted(all_names())))
def test_a_rule_that_names_an_operator_s_concept_matches_it(dispatched: str) -> None:
    assert dispatched in dispatch_names(catalogue_name(dispatched))
    assert dispatched in dispatch_names(dispatched)
    assert why_refused(dispatched) == ""
    assert catalogue_name(catalogue_name(dispatched)) == catalogue_name(dispatched)


@given(st.text() | st.sampled_from(sorted(all_names())).map(str.swapcase))
def test_any_text_gets_an_answer(name: str) -> None:
    catalogue_name(name)
    why_refused(name)
    assert len(close_names(name)) <= 3
    assert all(dispatch_names(close) for close in close_names(name))


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("matmul", "MatMul"),
        ("ops.matmul", "MatMul"),
        ("MatMull", "MatMul"),
        ("mint.nn.functional.layer_norm", "LayerNorm"),
        ("rms_norm", "RmsNorm"),
        ("gelu", "GeLU"),
        ("flash_attention_score", "FlashAttentionScore"),
        ("attention", "Attention"),
        ("alltoall", "AlltoAll"),
    ],
)
def test_the_closest_name_comes_first(name: str, close: str) -> None:
    assert close_names(name)[0] == close


def test_nothing_is_close_to_nonsense() -> None:
    assert close_names("zzzzzz") == []
    assert close_names("") == []


def test_a_parameter_that_is_made_is_not_dispatched() -> None:
    assert seen(lambda: Parameter(numbers(3)).set_data(numbers(3))) == []


def test_importing_the_catalogue_imports_no_mindspore() -> None:
    code = "import importlib.util as u, sys; s = u.spec_from_file_location('c', sys.argv[1]); m = u.module_from_spec(s)"
    code += "; sys.modules['c'] = m; s.loader.exec_module(m); print('mindspore' in sys.modules)"
    path = sys.modules["ms_ops.catalogue"].__file__
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
