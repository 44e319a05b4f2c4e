"""Policies of operators inside a replayed region: a table by name, a list of names, or a function that is asked.

The forward decides: it asks after the operator has run, and its answer binds. The replay of a table asks nobody; a
function is asked again, before the operator, and must answer the same.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.core.activation_memory.call_site import running_cell
from hyper_parallel.core.activation_memory.policy import CheckpointPolicy, no_policy
from hyper_parallel.core.errors import PolicyError, PolicyTypeError
from ms_ops.catalogue import COLLECTIVES, VIEWS, catalogue_name, close_names, dispatch_names, why_refused
from ms_ops.dispatch import why_not_repeated

REST = "*"
"""In a table: every operator that no other entry names."""


class Phase:
    """What a policy function gets as `ctx`.

    Args:
        is_recompute: Whether the operator is about to run in a replay; False after it ran in the forward.
    """

    __slots__ = ("is_recompute",)

    def __init__(self, is_recompute: bool) -> None:
        self.is_recompute = is_recompute

    def __repr__(self) -> str:
        return f"Phase(is_recompute={self.is_recompute})"

    def __str__(self) -> str:
        return "replay" if self.is_recompute else "forward"


FORWARD, REPLAY = Phase(False), Phase(True)


class Operator:
    """What a policy function gets as `op`: one call of an operator.

    Args:
        dispatch_name: MindSpore's name for it.
        outputs: Shape and dtype of every tensor it gives, or what it gave.
        cells: The cells of the region, with their paths below it.
    """

    __slots__ = ("_cell", "_cells", "_outputs", "dispatch_name")

    def __init__(self, dispatch_name: str, outputs: Any, cells: Iterable[tuple[str, Any]]) -> None:
        self.dispatch_name = dispatch_name
        self._outputs = outputs
        self._cells = cells
        self._cell: str | None = None

    def settle(self) -> None:
        """Say from now on what is so now, and hold no tensor: it is read when the operator's code runs no more."""
        self._cell, self._outputs, self._cells = self.cell, self.outputs, ()

    @property
    def name(self) -> str:
        """The catalogue's name: `MatMul` for every matrix product."""
        return catalogue_name(self.dispatch_name)

    @property
    def cell(self) -> str:
        """The dotted path, below the region, of the cell whose construct calls the operator; its class if unknown."""
        return running_cell(self._cells) if self._cell is None else self._cell

    @property
    def is_view(self) -> bool:
        """Whether it gives no tensor of its own: it looks at another one, or writes into it."""
        return not makes_a_tensor(self.dispatch_name)

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every tensor that the operator gives."""
        found: list[Any] = []

        def add(item: Any) -> None:
            if isinstance(item, Tensor):
                found.append((item.shape, item.dtype))
            elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple):
                found.append(item)  # as the log has it
            elif isinstance(item, (tuple, list)):
                for each in item:
                    add(each)

        add(self._outputs)
        return found

    def __repr__(self) -> str:
        outputs = ", ".join(f"{dtype} {shape}" for shape, dtype in self.outputs) or "no tensor"
        return f"{self.dispatch_name} -> {outputs} in {self.cell or 'no cell'}"


class OperatorPolicy:
    """Decides about the results of operators, one call after the other."""

    asks = False
    """Whether a replay must ask again."""

    def decide(self, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple) -> CheckpointPolicy:
        """The policy of one call; arguments as `Operator` has them, and the operator's own."""
        return CheckpointPolicy.PREFER_RECOMPUTE

    def names(self, dispatch_name: str) -> bool:
        """Whether this is about the operator, not only about the rest."""
        return False

    def without_effect(self, ran: Set[str]) -> list[str]:
        """Of what it names, what a region that runs these operators (by their dispatch names) has nothing of."""
        return []

    def for_call(self) -> "OperatorPolicy":
        """What decides in one call of a region."""
        return self


class Table(OperatorPolicy):
    """Policies by the name of the operator.

    Args:
        policies: By catalogue name or dispatch name; `*` is the rest, PREFER_RECOMPUTE if it isn't given.
        source: Who said so, for messages.
    """

    def __init__(self, policies: Mapping[str, CheckpointPolicy], source: str) -> None:
        if not policies:
            raise PolicyError(f"{source}: a table of operators must name one, but got {dict(policies)!r}")
        self.policies = dict(policies)
        self._by_name: dict[str, CheckpointPolicy] = {}
        named: dict[str, str] = {}
        for name, policy in self.policies.items():
            if not isinstance(policy, CheckpointPolicy):
                raise PolicyTypeError(
                    f"{source}: operator {name!r} must have a CheckpointPolicy, but has {no_policy(policy)}"
                )
            for dispatch_name in () if name == REST else _checked(name, policy, source):
                other = named.setdefault(dispatch_name, name)
                if self.policies[other] is not policy:
                    raise PolicyError(
                        f"{source}: {other!r} says {self.policies[other].name} and {name!r} says {policy.name}, and "
                        f"both name {dispatch_name}; leave one of them out"
                    )
                self._by_name[dispatch_name] = policy
        self._rest = self.policies.get(REST, CheckpointPolicy.PREFER_RECOMPUTE)

    def decide(self, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple) -> CheckpointPolicy:
        return self.policy_of(name)

    def names(self, dispatch_name: str) -> bool:
        return dispatch_name in self._by_name

    def without_effect(self, ran: Set[str]) -> list[str]:
        # a table for many cells may name what only some of them have: that alone is no mistake
        missing = {
            name: policy for name, policy in self.policies.items() if name != REST and not dispatch_names(name) & ran
        }
        if len(missing) == len(self.policies.keys() - {REST}):
            return list(missing)
        return [name for name, policy in missing.items() if policy.swaps]

    def named(self) -> Iterable[str]:
        """The dispatch names that entries mean."""
        return self._by_name.keys()

    def policy_of(self, dispatch_name: str) -> CheckpointPolicy:
        """The policy of an operator."""
        return self._by_name.get(dispatch_name, self._rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.policies == other.policies

    def __hash__(self) -> int:
        return hash(frozenset(self.policies.items()))

    def __str__(self) -> str:
        return ", ".join(f"{name} {policy.name.lower()}" for name, policy in self.policies.items())


class Alternating(OperatorPolicy):
    """Keeps the result of every second operator of a name, from the first on; a call of a region begins anew.

    Args:
        name: The catalogue's name, or MindSpore's.
        source: Who said so, for messages.
    """

    def __init__(self, name: str, source: str) -> None:
        self._name = name
        self._table = Table({name: CheckpointPolicy.MUST_SAVE}, source)
        self._is_kept = False

    def for_call(self) -> "Alternating":
        anew = copy.copy(self)
        anew._is_kept = False
        return anew

    def decide(self, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple) -> CheckpointPolicy:
        if not self._table.names(name):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._is_kept = not self._is_kept
        return CheckpointPolicy.MUST_SAVE if self._is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def names(self, dispatch_name: str) -> bool:
        return self._table.names(dispatch_name)

    def without_effect(self, ran: Set[str]) -> list[str]:
        return self._table.without_effect(ran)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alternating) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __str__(self) -> str:
        return f"every second {self._name} must_save"


_OURS = 2
"""References to an operator that nobody else keeps: our variable, and the argument of `sys.getrefcount`."""


class Asked(OperatorPolicy):
    """A function that is asked for every call of an operator.

    Args:
        function: `function(ctx, op, *args)`.
    """

    asks = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def decide(self, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple) -> CheckpointPolicy:
        operator = Operator(name, outputs, cells)
        answer = self._function(phase, operator, *args)
        if sys.getrefcount(operator) > _OURS:
            operator.settle()
        return answer

    def names(self, dispatch_name: str) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and self._function == other._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __str__(self) -> str:
        return f"asked of {getattr(self._function, '__qualname__', self._function)}"


class KeepsCollectives(OperatorPolicy):
    """Keeps what collectives give, so that a replay communicates nothing; another policy decides about the rest.

    Args:
        rest: That policy; one that decides nothing by default.
    """

    def __init__(self, rest: OperatorPolicy | None) -> None:
        self._rest = rest or OperatorPolicy()
        self.asks = self._rest.asks

    def decide(self, phase: Phase, name: str, outputs: Any, cells: Any, args: tuple) -> CheckpointPolicy:
        if name in COLLECTIVES:
            return CheckpointPolicy.MUST_SAVE
        return self._rest.decide(phase, name, outputs, cells, args)

    def names(self, dispatch_name: str) -> bool:
        return dispatch_name in COLLECTIVES or self._rest.names(dispatch_name)


Operators = Mapping[Any, CheckpointPolicy] | Iterable[Any] | OperatorPolicy
"""How users name operators: a table, or a list of those that are kept."""


def one_operator_policy(ops: Any, policy_fn: Any, source: str) -> OperatorPolicy | None:
    """What a user gave as `ops=` or as `policy_fn=`; see `operator_policy`."""
    if ops is not None and policy_fn is not None:
        raise PolicyError(f"{source}: give ops= or policy_fn=, not both: they might contradict each other")
    if ops is not None and callable(ops):
        raise PolicyTypeError(f"{source}: ops= is a table or a list of operators; a function is policy_fn={ops!r}")
    return operator_policy(policy_fn if ops is None else ops, source)


def operator_policy(given: Any, source: str) -> OperatorPolicy | None:
    """What a user gave as `ops=` or `policy_fn=`.

    Args:
        given: A function, a table, or a list of names, Primitives or functions that are kept while the rest is
            replayed.
        source: Who said so, for messages.

    Returns:
        The policy of operators; None if none was given.

    Raises:
        PolicyError: A name means no operator, or can't be honoured, or two entries contradict each other.
        TypeError: What was given is none of these.
    """
    if given is None or isinstance(given, OperatorPolicy):
        return given
    if isinstance(given, Mapping):
        return Table(_by_name(given, source), source)
    if isinstance(given, (list, tuple, set, frozenset)):
        return Table({_name_of(item, source): CheckpointPolicy.MUST_SAVE for item in given}, source)
    if callable(given) and not isinstance(given, type):
        return Asked(given)
    raise PolicyTypeError(
        f"{source}: policies of operators are given as a function, a table or a list of operators, but got {given!r} "
        f"of type {type(given).__name__}"
    )


def _by_name(given: Mapping[Any, CheckpointPolicy], source: str) -> dict[str, CheckpointPolicy]:
    found: dict[str, CheckpointPolicy] = {}
    for item, policy in given.items():
        name = _name_of(item, source)
        if found.setdefault(name, policy) is not policy:
            raise PolicyError(
                f"{source}: two entries mean {name}, and one says {found[name]}, the other {policy}; leave one out"
            )
    return found


def _name_of(item: Any, source: str) -> str:
    """The name of an operator that is given as a string, a Primitive, its class, or a function."""
    if isinstance(item, str):
        return item
    if not callable(item):
        raise PolicyTypeError(
            f"{source}: an operator is named by a string, a Primitive or a function, but got {item!r} of type "
            f"{type(item).__name__}"
        )
    if isinstance(item, nn.Cell) or (isinstance(item, type) and issubclass(item, nn.Cell)):
        name = getattr(item, "__name__", type(item).__name__)
        why = why_refused(f"nn.{name}") or "give the cell a policy of its own, or name what it runs"
        raise PolicyTypeError(f"{source}: {name} is a Cell, and no operator: {why}")
    name = getattr(item, "name", None)
    name = name if isinstance(name, str) else getattr(item, "__name__", None) or type(item).__name__
    if dispatch_names(name) or why_refused(name):
        return name
    letters = name.lower().replace("_", "")
    alike = [close for close in close_names(name) if close.lower() == letters]  # ops.rms_norm means RmsNorm
    return alike[0] if alike else name


def _checked(name: str, policy: CheckpointPolicy, source: str) -> Iterable[str]:
    """The dispatch names that an entry means."""
    found = dispatch_names(name)
    if not found:
        why = why_refused(name)
        close = close_names(name)
        offer = f"; did you mean {' or '.join(close)}?" if close else ""
        raise PolicyError(f"{source}: operator {name!r}: {why or f'MindSpore dispatches no such operator{offer}'}")
    for dispatch_name in sorted(found):
        why = why_not_repeated(dispatch_name)
        if why and policy is CheckpointPolicy.MUST_RECOMPUTE:
            raise PolicyError(
                f"{source}: {name} can't be MUST_RECOMPUTE: it {why}, so that running it again would give other "
                f"numbers; a replay reads what it gave in the forward, without any rule. Leave it out, or say MUST_SAVE"
            )
        if not policy.replays and not makes_a_tensor(dispatch_name):
            raise PolicyError(
                f"{source}: {name} can't be {policy.name}: {dispatch_name} {WHY_NOT_KEPT}; name the operator that "
                f"made the tensor"
            )
    return found


WHY_NOT_KEPT = "gives no tensor of its own (it looks at another one, or writes into it)"


def makes_a_tensor(dispatch_name: str) -> bool:
    """Whether the operator gives a new tensor, which can be kept or swapped."""
    return dispatch_name not in VIEWS and not dispatch_name.startswith(("Assign", "Inplace", "Scatter"))
