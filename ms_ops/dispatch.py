"""Seeing operators as they are dispatched, and answering some of them from a record.

`MsDispatchMode` (MindSpore 2.9+) calls back for every operator, below autograd: returning a recorded tensor instead of
running the operator is still recorded for the gradient. An operator issued inside a callback is not seen.
"""

import enum
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Parameter, Tensor
from mindspore._c_expression import CommHandle
from mindspore.ops import Print
from mindspore.ops import primitive as _primitive
from mindspore.utils import MsDispatchMode

from ms_ops.tensors import copy_of

RANDOM_OPERATORS = frozenset(
    {
        "Bernoulli",
        "BernoulliExt",
        "Dropout",
        "Dropout2D",
        "Dropout2dExt",
        "Dropout3D",
        "DropoutExt",
        "DropoutGenMask",
        "DropoutGenMaskExt",
        "FlashAttentionScore",
        "FuncDropoutExt",
        "Gamma",
        "InplaceBernoulliScalar",
        "InplaceBernoulliTensor",
        "InplaceExponential",
        "InplaceNormal",
        "InplaceRandom",
        "InplaceUniform",
        "LogNormalReverse",
        "LogUniformCandidateSampler",
        "Multinomial",
        "MultinomialExt",
        "MultinomialWithReplacement",
        "NormalFloatFloat",
        "NormalFloatTensor",
        "NormalTensorFloat",
        "NormalTensorTensor",
        "ParameterizedTruncatedNormal",
        "Poisson",
        "RandExt",
        "RandInt",
        "RandIntLike",
        "RandLikeExt",
        "RandnLike",
        "Randn",
        "RandomCategorical",
        "RandomChoiceWithMask",
        "RandomGamma",
        "RandomPoisson",
        "RandomShuffle",
        "RandpermExt",
        "Randperm",
        "RandpermV2",
        "StandardLaplace",
        "StandardNormal",
        "StatelessDropOutGenMask",
        "TruncatedNormal",
        "UniformCandidateSampler",
        "UniformExt",
        "UniformInt",
        "UniformReal",
    }
)
"""Dispatch names whose result differs from call to call. Read off `mindspore.ops.auto_generate` and
`mindspore.ops.operations` of 2.10.0; `FlashAttentionScore` may drop out inside its kernel."""

NORMALISATION_WITH_STATE = frozenset({"BatchNorm", "BatchNormExt", "SyncBatchNorm", "InstanceNorm"})
"""Dispatch names that update moving statistics besides giving a result that doesn't depend on them."""

MATRIX_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulExt", "Dense", "MatMul", "MatMulExt"})
"""Dispatch names of operators that save their factors and nothing else."""

REPLACEABLE = MATRIX_PRODUCTS | {
    "Add",
    "AddExt",
    "AddScalar",
    "BiasAdd",
    "Cast",
    "Div",
    "Divs",
    "GeLU",
    "Mul",
    "Muls",
    "Neg",
    "ReLU",
    "Sigmoid",
    "Softsign",
    "Sub",
    "SubExt",
    "SubScalar",
    "Tanh",
}
"""Dispatch names of operators that give one new tensor and cost something: a replay may do without their values.

Not views: MindSpore expects to find what they are views of.
"""

ROUTING = frozenset({"GroupTopk", "MoeGatingTopKSoftmax", "TopK", "TopKRouter", "TopPRouter", "TopkExt"})
"""Dispatch names of operators that choose experts: another choice in a replay would send tokens elsewhere."""

IN_PLACE_COLLECTIVES: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "DistCommAllGather",
            "DistCommAllGatherIntoTensor",
            "DistCommAllGatherIntoTensorUneven",
            "DistCommAllReduce",
            "DistCommAllToAllV",
            "DistCommAllToAllVC",
            "DistCommAllToAllVSingle",
            "DistCommBatchIsendIrecv",
            "DistCommBroadcast",
            "DistCommGatherIntoTensor",
            "DistCommIrecv",
            "DistCommReduce",
            "DistCommReduceScatter",
            "DistCommReduceScatterTensor",
            "DistCommReduceScatterTensorUneven",
            "DistCommScatter",
            "DistCommScatterTensor",
        ),
        0,
    ),
    "DistCommGather": 1,
}
"""Dispatch names of the collectives of `mint.distributed`, and which argument each writes into: a tensor, or a list."""

_WRITES = ("Assign", "Inplace", "Scatter")
"""Dispatch names that begin so write into their first argument."""


def arguments(args: tuple) -> tuple:
    """The operator's own arguments: old primitives are dispatched as `(primitive, name, (arguments...))`."""
    if len(args) == 3 and isinstance(args[1], str) and isinstance(args[2], (tuple, list)):
        return tuple(args[2])
    return args


def parameters_read(args: tuple) -> list[Tensor]:
    """Aliases of the parameters among an operator's arguments; those in a tuple or list, too."""
    found = []
    for argument in arguments(args):
        for tensor in argument if isinstance(argument, (tuple, list)) else (argument,):
            if isinstance(tensor, Tensor) and tensor.param_info is not None:
                found.append(tensor)
    return found


def with_arguments(args: tuple, new: tuple) -> tuple:
    """`args` with the operator's own arguments replaced."""
    if len(args) == 3 and isinstance(args[1], str) and isinstance(args[2], (tuple, list)):
        return (args[0], args[1], type(args[2])(new))
    return new


def is_old_primitive(args: tuple) -> bool:
    """Whether the operator is an old primitive (Dropout, StandardNormal, TopK), by the way it is dispatched.

    A callback must not answer for one: MindSpore 2.9 then doesn't record it, and 2.10 waits forever if an argument is
    the result of an operator that ran before the replay. `Interception` answers before it is dispatched; autograd
    doesn't know of it then, so that what it saves is what it saved when it ran.
    """
    return arguments(args) is not args


def filled_by_collective(name: str, args: tuple) -> list[Tensor]:
    """The tensors among an operator's arguments that it writes, if it is a collective that does."""
    index = IN_PLACE_COLLECTIVES.get(name)
    if index is None:
        return []
    filled = arguments(args)[index]
    return [each for each in (filled if isinstance(filled, (tuple, list)) else (filled,)) if isinstance(each, Tensor)]


def wait_for_collective(result: Any) -> None:
    """If this is the handle of a collective that runs asynchronously: wait until what it gives is there."""
    if isinstance(result, CommHandle):
        result.wait()


def keep_probability(args: tuple) -> float:
    """How probable it is that an element passes the old primitive Dropout."""
    return args[0].keep_prob


class Kind(enum.Enum):
    """What a replay does with an operator."""

    PLAIN = enum.auto()
    """Runs it again."""
    ONCE = enum.auto()
    """Reads what it gave: it is random, or prints."""
    WRITE = enum.auto()
    """It writes into its first argument: a temporary, which the replay has its own of, or a parameter."""
    STATE = enum.auto()
    """It updates moving statistics: runs again, on copies of them."""
    UNSEEN = enum.auto()
    """It computes nothing, and is also run by hooks."""


_kinds: dict[str, Kind] = {"StopGradient": Kind.UNSEEN, "Print": Kind.ONCE}
_kinds.update(dict.fromkeys(RANDOM_OPERATORS, Kind.ONCE))
_kinds.update(dict.fromkeys(NORMALISATION_WITH_STATE, Kind.STATE))


def kind_of(name: str) -> Kind:
    """What a replay does with the operator of this dispatch name."""
    kind = _kinds.get(name)
    if kind is None:
        kind = _kinds[name] = Kind.WRITE if name.startswith(_WRITES) else Kind.PLAIN
    return kind


def why_not_repeated(name: str) -> str:
    """Why a replay may not run the operator of this dispatch name again; empty if it may."""
    kind = kind_of(name)
    if name == "Print":
        return "prints"
    if kind is Kind.ONCE:
        return "is random"
    if kind is Kind.STATE:
        return "updates moving statistics"
    return "writes a parameter" if name.startswith("Assign") else ""


def written_parameter(args: tuple) -> Any:
    """The `param_info` of the parameter that an operator of kind WRITE writes; None if it writes a temporary."""
    own = arguments(args)
    # not isinstance(..., Parameter): `parameter.copy_(x)` is dispatched with a plain tensor that has the same info
    return own[0].param_info if own and isinstance(own[0], Tensor) else None


_MOVING_STATISTICS = (3, 4)
"""Where every operator in NORMALISATION_WITH_STATE has its moving mean and variance."""


def moving_statistics(args: tuple) -> list[Tensor]:
    """The moving statistics that an operator of kind STATE updates."""
    own = arguments(args)
    return [own[index] for index in _MOVING_STATISTICS if index < len(own) and isinstance(own[index], Tensor)]


def meaningful(name: str, result: Any) -> Any:
    """What of an operator's result has values: the CPU kernel of BatchNorm may leave all but the first as they were."""
    return result[0] if name in NORMALISATION_WITH_STATE and isinstance(result, (tuple, list)) else result


def on_copies_of_state(args: tuple) -> tuple:
    """Arguments for a repeated normalisation: its moving statistics replaced by copies, which then take the update."""
    own = list(arguments(args))
    for index in _MOVING_STATISTICS:
        if index < len(own) and isinstance(own[index], Tensor):
            copied, original = copy_of(own[index]), own[index]
            # a cell's precision casts tensors, but not parameters
            own[index] = Parameter(copied, requires_grad=False) if isinstance(original, Parameter) else copied
    return with_arguments(args, tuple(own))


NO_ANSWER = object()
"""What `early` gives for an operator that is to be dispatched."""

Early = Callable[[str, tuple], Any]
"""Called with the name and arguments of an old primitive before it is dispatched; gives its result, or NO_ANSWER."""


def never(name: str, args: tuple) -> Any:
    """Dispatch every old primitive."""
    return NO_ANSWER


class _Entered(threading.local):
    early: Early | None = None


_entered = _Entered()


def is_intercepted() -> bool:
    """Whether an interception is entered on this thread."""
    return _entered.early is not None


class Interception(MsDispatchMode):
    """Calls `answer(name, run, args)` for every operator that is dispatched on this thread, `early` before.

    Entered again while it is entered, it stays entered once: a nested mode would see every operator a second time.
    """

    def __init__(self, answer: Callable[[str, Callable[..., Any], tuple], Any], early: Early = never) -> None:
        super().__init__()
        self._answer = answer
        self._early = early
        self._depth = 0

    def __enter__(self) -> "Interception":
        self._depth += 1
        if self._depth == 1:
            _entered.early = self._early
            super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().__exit__(*exc_info)
            _entered.early = None

    def __ms_dispatch__(self, func: Any, args: tuple, kwargs: Any = None) -> Any:
        return self._answer(func.name, func, args)


def answer_old_primitives() -> None:
    """Have `Primitive.__call__` ask the interception that is entered on its thread; doing so again changes nothing."""
    run = _primitive._run_op
    if hasattr(run, "_hp_asks"):
        return

    @functools.wraps(run)
    def asked(primitive: Any, name: str, args: tuple) -> Any:
        early = _entered.early
        result = NO_ANSWER if early is None else early(name, args)
        return run(primitive, name, args) if result is NO_ANSWER else result

    asked._hp_asks = True  # type: ignore[attr-defined]
    _primitive._run_op = asked
    Print.__call__ = _unless_answered(Print.__call__)


def _unless_answered(show: Any) -> Any:
    """`ops.Print` is Python in PyNative mode: nothing is dispatched."""

    @functools.wraps(show)
    def printed(primitive: Any, *args: Any) -> Any:
        early = _entered.early
        return show(primitive, *args) if early is None or early("Print", args) is NO_ANSWER else None

    return printed
