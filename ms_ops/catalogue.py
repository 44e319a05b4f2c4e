"""One name per operator, whichever way a user calls it: `nn.Dense`, `x @ y` and `ops.bmm` are all `MatMul`.

MindSpore dispatches the same product as MatMul, MatMulExt, BatchMatMul, Dense or Mm, by the route and the backend. What
is dispatched was measured on the CPU backend of 2.9.0 and 2.10.0, with saved-tensor hooks entered as in a region:
without them MindSpore passes over Ones, Zeros, Eye, and operators none of whose tensors comes from Python. Operators of
Ascend are read off their classes.
"""

import difflib
import functools
import re
from collections.abc import Mapping

_FAMILIES: Mapping[str, str] = {
    # a bias that is added by the same operator belongs to the product
    "MatMul": "Addbmm Addmm Addmv Baddbmm BatchMatMul BatchMatMulExt CusBatchMatMul CusMatMulCube "
    "CusMatMulCubeDenseLeft CusMatMulCubeDenseRight CusMatMulCubeFraczLeftCast CusMatMulCubeFraczRightMul DSDMatmul "
    "Dense Dot Gmm GmmV2 GroupedMatmul GroupedMatmulV2 GroupedMatmulV4 MatMul MatMulExt MatmulDDS Mm Mv "
    "QuantBatchMatmul QuantLinearSparse QuantMatmul SparseTensorDenseMatmul TransposeBatchMatmulTranspose "
    "TridiagonalMatMul Vdot WeightQuantBatchMatmul",
    # whole attention in one operator; written out in products and a softmax it is seen as these
    "Attention": "FlashAttentionScore FusedInferAttentionScore IncreFlashAttention Mla MultiScaleDeformableAttn "
    "NsaCompressAttention NsaSelectAttention PagedAttention PagedAttentionMask PromptFlashAttention "
    "SparseFlashAttention SpeedFusionAttention",
    "Conv": "Conv1DExt Conv1DPadding Conv2D Conv2DExt Conv2DPadding Conv2DTranspose Conv3D Conv3DExt Conv3DPadding "
    "Conv3DTranspose ConvTbc ConvTranspose2D Convolution ConvolutionStr DepthwiseConv2dNative",
    # results that share their storage with an argument, and nothing is computed
    "View": "AsStrided BroadcastTo BroadcastToView Chunk ChunkView Contiguous Detach Diagonal DiagonalView Expand "
    "ExpandAs ExpandDims ExpandDimsView ImagView Narrow NarrowView RealView Reshape SelectExtView SelectView Slice "
    "SliceExt SliceExtView Split SplitTensor SplitTensorView SplitV SplitWithSize SplitWithSizeView Squeeze "
    "StopGradient StridedSlice TExt Transpose TransposeExtView TransposeView Unpack Unstack UnstackExtView View "
    "ViewAs ViewDtype",
    # whatever waits for another card, also where it computes on the way
    "Collective": "AllGather AllGatherMatmul AllGatherV AllReduce AlltoAll AlltoAllV AlltoAllVC Barrier "
    "BatchISendIRecv Broadcast CollectiveGather CollectiveScatter DistCommAllGather DistCommAllGatherIntoTensor "
    "DistCommAllGatherIntoTensorUneven DistCommAllReduce DistCommAllToAllV DistCommAllToAllVC DistCommAllToAllVSingle "
    "DistCommBarrier DistCommBatchIsendIrecv DistCommBroadcast DistCommGather DistCommGatherIntoTensor DistCommIrecv "
    "DistCommIsend DistCommReduce DistCommReduceScatter DistCommReduceScatterTensor "
    "DistCommReduceScatterTensorUneven DistCommScatter DistCommScatterTensor InnerCommAllGather InnerCommAllReduce "
    "InnerCommAllToAllV InnerCommIrecv InnerCommIsend InnerCommReduceScatter MatmulAllReduceAddRmsNorm "
    "MatmulReduceScatter MoeDistributeCombine MoeDistributeDispatch NeighborExchange NeighborExchangeV2 Receive "
    "Reduce ReduceScatter ReduceScatterV Send _AllSwap _HostAllGather _HostReduceScatter _MicroStepAllGather "
    "_MiniStepAllGather",
    "Add": "Add AddExt AddScalar TensorAdd",
    "Sub": "Sub SubExt SubScalar",
    "Mul": "Mul Muls",
    "Div": "Div Divs RealDiv",
    "DivMod": "DivMod DivMods",
    "Equal": "EqScalar Equal EqualExt",
    "LayerNorm": "AddLayerNormV2 LayerNorm LayerNormExt LayerNormV3",
    "RmsNorm": "AddRmsNorm RmsNorm",
    "BatchNorm": "BatchNorm BatchNormElemt BatchNormExt",
    # masks included: which operator draws them depends on the backend
    "Dropout": "Dropout Dropout2D Dropout2dExt Dropout3D DropoutDoMask DropoutDoMaskExt DropoutExt DropoutGenMask "
    "DropoutGenMaskExt FuncDropoutExt",
    "GeLU": "FastGeLU FastGelu GeLU Gelu GeluExt NpuGelu",
    "Cast": "Cast ToDtype TypeAs",
    "Sum": "ReduceSum SumExt",
    "Mean": "MeanExt ReduceMean",
    "Prod": "ProdExt ReduceProd",
    # of two tensors it is Maximum, Minimum
    "Max": "ArgMaxWithValue Max MaxDim ReduceMax",
    "Min": "ArgMinWithValue Min MinDim ReduceMin",
    "All": "ReduceAll",
    "Any": "Any AnyExt ReduceAny",
    "Std": "ReduceStd Std",
    "Norm": "EuclideanNorm LinalgVectorNorm LpNorm LpNormV2 Norm",
    "ArgMax": "ArgMaxExt Argmax",
    "ArgMin": "ArgMinExt Argmin",
    "CumSum": "CumSum CumsumExt",
    "CumMin": "Cummin CumminExt",
    "TopK": "TopK TopkExt",
    # nn.Embedding is Gather, mint's is Embedding
    "Gather": "Embedding EmbeddingLookup Gather GatherD GatherNd GatherNdExt GatherV2 IndexSelect SparseGatherV2",
    "Stack": "Pack Stack StackExt",
    "Pad": "ConstantPadND MirrorPad Pad PadV3 ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D "
    "ReplicationPad2D ReplicationPad3D",
    "MaxPool": "FuncMaxPool2D MaxPool MaxPool3D MaxPool3DWithArgmax MaxPoolWithArgmax MaxPoolWithArgmaxV2 "
    "MaxPoolWithIndices MaxPoolWithMask",
    "AvgPool": "AvgPool AvgPool1D AvgPool2D AvgPool3D AvgPool3DExt",
    "AdaptiveAvgPool": "AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool2DExt AdaptiveAvgPool3D "
    "AdaptiveAvgPool3DExt",
    "AdaptiveMaxPool": "AdaptiveMaxPool1D AdaptiveMaxPool2D AdaptiveMaxPool3D",
    "RotaryEmbedding": "ApplyRotaryPosEmb RotaryPositionEmbedding",
    "RepeatInterleave": "RepeatInterleaveInt RepeatInterleaveTensor",
}
"""Dispatch names of each concept. Operators that only backward or an optimizer runs are in none, nor those that write
into an argument: these have nothing of their own to keep."""

VIEWS = frozenset(_FAMILIES["View"].split())
"""Dispatch names of operators whose result shares its storage with an argument.

On CPU `ops.transpose`, `split`, `broadcast_to` and slices are views, too; Flatten, Identity, Real and Tile copy.
"""

COLLECTIVES = frozenset(_FAMILIES["Collective"].split())
"""Dispatch names of operators that wait for other cards."""

MATRIX_PRODUCTS = frozenset(_FAMILIES["MatMul"].split())
"""Dispatch names of every matrix product; those that save just their factors are in `ms_ops.dispatch`."""

ONLY_IN_2_10 = frozenset({"ConvTbc", "NpuGelu", "Vdot"})
"""Names in a family that MindSpore 2.9 doesn't have."""

_ALSO = {"Embedding": "Gather"}
"""Dispatch names that mean a whole family where a user names them."""

_FAMILY_OF = {member: name for name, members in _FAMILIES.items() for member in members.split()}

_VARIANT = re.compile(r"(?:Inner)?([A-Z]\w*?)(?:Ext|V\d|(?:Tensor|Scalar){1,2})*")
"""An operator by its own name, and what MindSpore appends for a second signature or implementation."""

_NO_VARIANT = re.compile(r"Assign|DistComm|Inner(Comm|Inplace)|Inplace|Normal|Scatter|\w*To(Tensor|Scalar)$")


_MAKES = "makes a new tensor without dispatching an operator; a replay just makes it again"
_READS = "reads on host without dispatching an operator"

_NEVER = {
    **dict.fromkeys(("Empty", "EmptyLike", "Fill"), _MAKES),
    **dict.fromkeys(("DType", "Rank", "Shape"), _READS),
    "Depend": "gives its first argument without dispatching an operator",
}
"""Primitives that MindSpore runs without dispatching them (CPU)."""


class _Names(dict[str, str]):
    """Catalogue names by dispatch name; one that is asked for the first time is worked out and kept."""

    def __missing__(self, dispatch_name: str) -> str:
        known = dispatch_name in all_names() and not _NO_VARIANT.match(dispatch_name)
        variant = _VARIANT.fullmatch(dispatch_name) if known else None
        found = self[dispatch_name] = dispatch_name if variant is None else _FAMILY_OF.get(variant[1], variant[1])
        return found


_names = _Names(_FAMILY_OF)


def catalogue_name(dispatch_name: str) -> str:
    """The catalogue's name of a dispatched operator; one that is in no family has its own.

    Examples:
        >>> from ms_ops.catalogue import catalogue_name
        >>> catalogue_name("MatMulExt"), catalogue_name("Muls"), catalogue_name("TraceExt"), catalogue_name("Erf")
        ('MatMul', 'Mul', 'Trace', 'Erf')
    """
    return _names[dispatch_name]


@functools.cache
def all_names() -> frozenset[str]:
    """Every name that the installed MindSpore can dispatch: its primitives, whether the backend has a kernel or not.

    What users register themselves isn't among them, nor Python that MindSpore computes with (`typeof`, `make_range`).
    """
    from mindspore.ops import Primitive, auto_generate, operations

    found = {
        item.__name__
        for module in (auto_generate, operations)
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Primitive)
    }
    return frozenset(found - _NEVER.keys() - {"Primitive", "PrimitiveWithInfer"})


@functools.cache
def _members() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for dispatch_name in all_names():
        found.setdefault(catalogue_name(dispatch_name), set()).add(dispatch_name)
    return {name: frozenset(members) for name, members in found.items()}


def dispatch_names(name: str) -> frozenset[str]:
    """Everything that a rule naming `name` matches: a family, or the operator of this dispatch name; empty if nothing.

    Examples:
        >>> from ms_ops.catalogue import dispatch_names
        >>> sorted(dispatch_names("Div")), sorted(dispatch_names("Divs")), sorted(dispatch_names("Dvi"))
        (['Div', 'Divs', 'RealDiv'], ['Divs'], [])
    """
    members = _members().get(_ALSO.get(name, name))
    if members is not None:
        return members
    return frozenset({name}) if name in all_names() else frozenset()


UNSEEN: Mapping[str, str] = {
    **{f"ops.{name}": why for name, why in _NEVER.items()},
    "mint.empty": _MAKES,
    "mint.empty_like": _MAKES,
    "ms.Tensor": _MAKES,
    "Tensor.__getitem__": "is a view that isn't dispatched where it is indexed by numbers, `:` and `...`; ranges are "
    "View, an index that is a tensor is Gather or GatherNd",
    "Tensor.__setitem__": "isn't dispatched where it is indexed by numbers, `:` and `...`; with an index that is a "
    "tensor it is TensorScatterUpdate",
    "Tensor.contiguous": "isn't dispatched where the tensor is contiguous already",
    "Tensor.asnumpy": _READS,
    "Tensor.item": _READS,
    "Tensor.tolist": _READS,
    "ops.shape": _READS,
    "ops.rank": _READS,
    "ops.depend": _NEVER["Depend"],
    "ms.jit": "compiles a function: none of its operators is dispatched one by one",
}
"""What users may name, but no interception sees, and why."""

EXPANDED: Mapping[str, str] = {
    "ops.addbmm": "BatchMatMul Muls SumExt AddExt",
    "ops.addmm": "Muls MatMul AddExt",
    "ops.addmv": "Muls Reshape MatMul Transpose AddExt",
    "ops.amax": "ReduceMax",
    "ops.amin": "ReduceMin",
    "ops.arange": "Range",
    "ops.argmax": "Reshape Argmax",
    "ops.argmin": "Reshape Argmin",
    "ops.avg_pool2d": "ExpandDims AvgPool3D Squeeze",
    "ops.baddbmm": "Muls BatchMatMul AddExt",
    "ops.bmm": "BatchMatMul",
    "ops.cat": "Concat",
    "ops.chunk": "Split",
    "ops.clip_by_value": "Maximum Minimum",
    "ops.conv1d": "ExpandDims Conv2D Squeeze",
    "ops.count_nonzero": "Zeros NotEqual Cast ReduceSum",
    "ops.cross_entropy": "ReduceMax SubExt Exp SumExt Log AddExt ExpandDims Equal MaskedFill GatherD Neg OnesLike "
    "Squeeze Div Muls",
    "ops.dot": "MatMul",
    "ops.flip": "ReverseV2",
    "ops.full": "FillV2",
    "ops.full_like": "FillV2",
    "ops.gelu": "Sqrt Div Erf AddExt Mul",
    "ops.glu": "Split Sigmoid Mul",
    "ops.hardtanh": "Maximum Minimum",
    "ops.hstack": "Concat",
    "ops.inner": "Transpose Reshape MatMul",
    "ops.kl_div": "KLDivLoss Divs",
    "ops.l1_loss": "SubExt Abs Mul ReduceMean",
    "ops.leaky_relu": "Mul Maximum",
    "ops.logsigmoid": "Sigmoid Log",
    "ops.logsumexp": "ReduceMax SubExt Exp SumExt Log Squeeze AddExt",
    "ops.meshgrid": "View BroadcastTo",
    "ops.mm": "MatMul",
    "ops.movedim": "Transpose",
    "ops.mse_loss": "SubExt Square ReduceMean",
    "ops.mv": "Reshape MatMul Transpose",
    "ops.nll_loss": "ExpandDims Equal MaskedFill GatherD Neg SumExt OnesLike Squeeze Div Muls AddExt",
    "ops.norm": "Square ReduceSum Sqrt",
    "ops.outer": "Reshape Mul",
    "ops.permute": "Transpose",
    "ops.rand": "UniformReal",
    "ops.randn": "StandardNormal",
    "ops.repeat_interleave": "Reshape ExpandDims Tile",
    "ops.softmin": "Muls Softmax",
    "ops.softplus": "Muls Softplus Greater Select",
    "ops.swapaxes": "Transpose",
    "ops.tanhshrink": "Tanh SubExt",
    "ops.true_divide": "Div",
    "ops.unbind": "Unstack",
    "ops.unfold": "Im2Col Reshape",
    "ops.unsqueeze": "ExpandDims",
    "ops.var": "ReduceStd Pow",
    "ops.vstack": "Concat",
    "ops.where": "Select",
    "mint.cat": "Concat",
    "mint.flip": "ReverseV2",
    "mint.linear": "Dense",
    "mint.permute": "TransposeView",
    "mint.relu6": "Hardtanh",
    "mint.swapaxes": "TransposeExtView",
    "mint.unbind": "UnstackExtView",
    "mint.where": "Select",
    "nn.CrossEntropyLoss": "ReduceMax SubExt Exp SumExt Log AddExt ExpandDims Equal MaskedFill GatherD Neg OnesLike "
    "Squeeze Div Muls",
    "nn.Dense": "MatMul BiasAdd",
    "nn.LeakyReLU": "Mul Maximum",
    "nn.LogSigmoid": "Mul Exp Add Reciprocal Log",
    "nn.MSELoss": "SubExt Square Mul ReduceMean",
    "nn.MultiheadAttention": "Transpose MatMulExt AddExt Split Reshape Sqrt Div Softmax SumExt Divs",
    "Tensor.copy": "Divs",
    "Tensor.std": "ReduceMean Sub Pow ReduceSum Div",
    "Tensor.var": "ReduceMean Sub Pow ReduceSum Div",
}
"""What MindSpore runs under another name, or as several operators, in the order in which it begins them."""


def _ways(name: str) -> tuple[str, ...]:
    """The keys under which the tables may know a name as a user wrote it."""
    owner, _, last = name.removeprefix("mindspore.").removeprefix("ms.").rpartition(".")
    if not owner:
        if last in ("getitem", "setitem"):
            last = f"__{last}__"
        return tuple(f"{one}.{last}" for one in ("ops", "mint", "nn", "Tensor", "ms"))
    owner = owner.split(".")[0]
    return (f"{owner}.{'__' + last + '__' if owner == 'Tensor' and last in ('getitem', 'setitem') else last}",)


def why_refused(name: str) -> str:
    """Why a rule can't name this: no interception sees it, or MindSpore runs it as others; empty if it is fine.

    Args:
        name: As users write it: `gelu`, `ops.gelu`, `mint.nn.functional.relu6`, `Tensor.__getitem__`.

    Examples:
        >>> from ms_ops.catalogue import why_refused
        >>> why_refused("gelu")
        'MindSpore runs ops.gelu as Sqrt, Div, Erf, AddExt, Mul; name one of these'
        >>> why_refused("GeLU")
        ''
    """
    if dispatch_names(name):
        return ""
    for way in _ways(name):
        if way in UNSEEN:
            return f"{way} {UNSEEN[way]}"
        if way in EXPANDED:
            parts = EXPANDED[way].split()
            if len(parts) == 1:
                return f"MindSpore runs {way} as {parts[0]}; name {catalogue_name(parts[0])}"
            return f"MindSpore runs {way} as {', '.join(parts)}; name one of these"
    return ""


@functools.cache
def _by_letters() -> dict[str, str]:
    """Names by how they are spelled; where two differ in capitals only, the catalogue's."""
    return {_letters(name): name for name in (*sorted(all_names()), *sorted(_members()))}


def _letters(name: str) -> str:
    return name.rpartition(".")[2].replace("_", "").lower()


def close_names(name: str) -> list[str]:
    """Up to three names that are spelled alike, the best first; capitals, underscores and `ops.` don't count.

    Examples:
        >>> from ms_ops.catalogue import close_names
        >>> close_names("ops.matmul")[0], close_names("layer_norm")[0], close_names("zzzzzz")
        ('MatMul', 'LayerNorm', [])
    """
    close = difflib.get_close_matches(_letters(name), _by_letters(), n=3, cutoff=0.6)
    return [_by_letters()[letters] for letters in close]
