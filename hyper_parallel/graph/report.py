"""`GraphReport`: a plan beside what the compiler made of it."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.describe import aligned
from hyper_parallel.policy_file.resolve import PlanRow

HONOURED, NOT_HONOURED, NOT_NEEDED = "honoured", "not honoured", "not needed"
HEADINGS = ("path", "cell", "policy", "why", "verdict", "recomputed")
"""Of a report's table: the first four are a plan's."""


@dataclass(frozen=True)
class OperatorRow:
    """What the compiled graph does with one operator in a cell: numbers of its calls."""

    name: str
    """As MindSpore dispatches it."""
    runs: int
    """In the forward."""
    planned: int
    """That the plan wants to compute again, and whose values backward needs."""
    recomputed: int
    """That are computed again."""
    kept: int
    """Whose values wait for backward."""


@dataclass(frozen=True)
class VerifiedRow:
    """One cell of a plan, and what became of it."""

    plan: PlanRow
    """The row of the plan, as `plan.rows` has it."""
    verdict: str
    """``honoured``, ``not honoured`` or ``not needed``."""
    reason: str
    """Why it isn't honoured or needed; empty if it is honoured."""
    operators: tuple[OperatorRow, ...]
    """Those in the cell that are in no other decided cell further in."""

    @property
    def recomputed(self) -> dict[str, int]:
        """How often each operator is computed again."""
        return {each.name: each.recomputed for each in self.operators if each.recomputed}

    @property
    def planned(self) -> dict[str, int]:
        """How often each operator is to be computed again."""
        return {each.name: each.planned for each in self.operators if each.planned}


@dataclass(frozen=True)
class GraphReport:
    """What a compiled graph does with a plan."""

    source: str
    """The plan's file, or ``dict``."""
    net: str
    """Name of the net's class."""
    rows: tuple[VerifiedRow, ...]
    """The rows of the plan, in its order."""
    unplanned: tuple[OperatorRow, ...]
    """Operators that are computed again outside of every decided cell."""
    gates: int
    """Places where MindSpore holds recomputation back until the backward that needs it."""
    moves: dict[str, int]
    """By target: tensors that are moved there. Only `must_swap` moves any."""

    @property
    def honoured(self) -> bool:
        """Whether everything is as planned."""
        return not self.unplanned and all(row.verdict != NOT_HONOURED for row in self.rows)

    @property
    def recomputed(self) -> dict[str, int]:
        """How often each operator is computed again, in all cells."""
        return _summed([*(row.recomputed for row in self.rows), {row.name: row.recomputed for row in self.unplanned}])

    @property
    def planned(self) -> dict[str, int]:
        """How often each operator is to be computed again, in all cells."""
        return _summed([row.planned for row in self.rows])

    def require_honoured(self) -> None:
        """Refuse to go on if something isn't as planned.

        Raises:
            PolicyError: It says which cells, and why.
        """
        if self.honoured:
            return
        wrong = [f"{row.plan.path or 'the net'}: {row.reason}" for row in self.rows if row.verdict == NOT_HONOURED]
        wrong += [f"{row.name} is recomputed {row.recomputed} times outside of the plan" for row in self.unplanned]
        raise PolicyError(f"the compiled graph doesn't do what the plan from {self.source} says:\n" + "\n".join(wrong))

    def describe(self) -> str:
        """Say what became of the plan, as plain text.

        Returns:
            One line per cell (path, class, policy, who decided, verdict, operators, reason), then totals.
        """
        state = "as planned" if self.honoured else "not as planned"
        text = [f"{self.source}: {self.net} compiled, {state}", *aligned([HEADINGS, *self.lines()])]
        return "\n".join([*text, *self.totals()])

    def lines(self) -> list[tuple[str, ...]]:
        """What stands below each of `HEADINGS`, row by row."""
        return [
            (
                row.plan.path or "(the net)",
                row.plan.class_name,
                row.plan.policy_text,
                row.plan.why,
                row.verdict,
                in_words(row.recomputed) + (f"; {row.reason}" if row.reason else ""),
            )
            for row in self.rows
        ]

    def totals(self) -> list[str]:
        """What there is to say of the net as a whole, in lines."""
        text = []
        if self.unplanned:
            found = in_words({row.name: row.recomputed for row in self.unplanned})
            text.append(f"note: recomputed outside of the plan: {found}")
        moves = f"; moves: {in_words(self.moves)}" if self.moves else ""
        text.append(f"recomputed in all: {in_words(self.recomputed)}; gates: {self.gates}{moves}")
        return text

    def as_json(self) -> dict[str, Any]:
        """The same as plain values.

        Returns:
            What `json.dumps` takes.
        """
        rows = [
            asdict(row) | {"plan": asdict(row.plan) | {"policy": row.plan.policy.name.lower()}} for row in self.rows
        ]
        return {
            "source": self.source,
            "net": self.net,
            "honoured": self.honoured,
            "rows": rows,
            "unplanned": [asdict(row) for row in self.unplanned],
            "planned": self.planned,
            "recomputed": self.recomputed,
            "gates": self.gates,
            "moves": self.moves,
        }

    def __str__(self) -> str:
        return self.describe()


def in_words(counts: dict[str, int]) -> str:
    """Numbers by name, in one line."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing"


def _summed(many: list[dict[str, int]]) -> dict[str, int]:
    found = Counter[str]()
    for each in many:
        found.update(each)
    return dict(found)
