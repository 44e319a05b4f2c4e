"""What one concept is dispatched as, by every route, is in the catalogue."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, mint, nn, ops

from ms_ops.catalogue import (
    VIEWS,
    catalogue_name,
    dispatch_names,
)
from ms_ops.dispatch import Interception
from ms_ops.tensors import storage_of
from tests.ms_ops.dispatched import HEADS, IMAGE, IS_2_9, KERNEL, TWO, WORDS, YES, B, F, V, X, numbers, operator, seen

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
