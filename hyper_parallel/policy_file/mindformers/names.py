"""From MindFormers' regular expressions for what lies inside a layer to cell patterns and operators of a policy file.

MindFormers matches at run time, against the layers it has built. Here the expression is read, not run: what it means is
written as dotted patterns, and what these can't say stays a regular expression.
"""

import itertools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "add": ("Add",),
    "batch_matmul": ("MatMul",),
    "bmm": ("MatMul",),
    "cast": ("Cast",),
    "concat": ("Concat",),
    "cumsum": ("CumSum",),
    "div": ("Div",),
    "exp": ("Exp",),
    "expand_dims": ("ExpandDims",),
    "flash_attention": ("Attention",),
    "gather": ("Gather",),
    "gelu": ("GeLU",),
    "layer_norm": ("LayerNorm",),
    "log": ("Log",),
    "matmul": ("MatMul",),
    "mean": ("Mean",),
    "mul": ("Mul",),
    "neg": ("Neg",),
    "norm": ("RmsNorm", "LayerNorm"),
    "onehot": ("OneHot",),
    "real_div": ("Div",),
    "reduce_mean": ("Mean",),
    "reduce_sum": ("Sum",),
    "relu": ("ReLU",),
    "reshape": ("Reshape",),
    "rsqrt": ("Rsqrt",),
    "sigmoid": ("Sigmoid",),
    "silu": ("SiLU",),
    "softmax": ("Softmax",),
    "split": ("Split", "SplitWithSize"),
    "sqrt": ("Sqrt",),
    "square": ("Square",),
    "sub": ("Sub",),
    "swiglu": ("Swiglu",),
    "tanh": ("Tanh",),
    "tile": ("Tile",),
    "transpose": ("Transpose",),
}
"""The attributes in which MindFormers' cells hold operators, and the names that a policy file has for these. A digit at
the end of an attribute (`add2`) doesn't count."""

CELLS = frozenset(
    {
        "attention",
        "attention_norm",
        "core_attention",
        "experts",
        "feed_forward",
        "ffn_norm",
        "input_layernorm",
        "linear_fc1",
        "linear_fc2",
        "linear_proj",
        "linear_qkv",
        "mlp",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "router",
        "self_attention",
        "shared_experts",
        "transformer_layer",
        "w1",
        "w2",
        "w3",
        "wk",
        "wo",
        "wq",
        "wv",
    }
)
"""The attributes in which MindFormers' layers hold cells."""

_MOST_ALTERNATIVES = 64
_LONGEST = 400
_WORD = re.compile(r"[A-Za-z0-9_\-]+")


@dataclass(frozen=True)
class Place:
    """What a pattern names inside a layer."""

    cells: str
    """Dotted pattern below the layer; empty for the layer itself; with `re:` in front a regular expression."""
    operators: tuple[str, ...] = ()
    """Operators in these cells; none: the cells as a whole."""


class Names:
    r"""Tells cells from operators, and writes patterns.

    Args:
        operators: Further attributes that hold operators, and what these are called; `()` says that an attribute is
            a cell.
        split_on_escaped_dots: Whether the expression is one per name, between ``\.`` (graph mode), or one for the
            whole path (PyNative mode).
    """

    def __init__(self, operators: Mapping[str, tuple[str, ...]], *, split_on_escaped_dots: bool) -> None:
        self._operators = {**OPERATORS, **operators}
        self.unused = set(operators)
        """Attributes that the user told about, and that no pattern has named so far."""
        self._split = split_on_escaped_dots

    def places(self, pattern: str) -> list[Place]:
        """Say what a pattern names.

        Args:
            pattern: MindFormers' regular expression.

        Returns:
            One place per alternative.

        Raises:
            ValueError: It is no regular expression, or names nothing.
        """
        if len(pattern) > _LONGEST or not pattern.strip():
            raise ValueError(f"expected a regular expression of 1 to {_LONGEST} characters")
        paths = self._paths(pattern)
        if paths is None:
            return [Place(f"re:{pattern}")]
        return list(dict.fromkeys(self._place(path) for path in paths))

    def _paths(self, pattern: str) -> list[list[str]] | None:
        parts = pattern.split(r"\.") if self._split else [pattern]
        found: list[list[list[str]]] = []
        for part in parts:
            _compiled(part)
            try:
                found.append([self._segments(text, part) for text in _alternatives(part)])
            except _NotSimple:
                return None
        chosen = [list(itertools.chain.from_iterable(combination)) for combination in itertools.product(*found)]
        return None if len(chosen) > _MOST_ALTERNATIVES or not all(map(all, chosen)) else chosen

    def _segments(self, tokens: list[str], part: str) -> list[str]:
        """Write the tokens of one alternative as segments."""
        if self._split:
            if "." in tokens:
                raise ValueError(
                    f"'{part}' is matched against one name, which has no dot in it, so it matches nothing; between two "
                    f"names write \\."
                )
            return ["".join("*" if token == _ANY else token for token in tokens)]
        return _dotted(tokens)

    def _place(self, path: list[str]) -> Place:
        known = self.operators_of(path[-1])
        if not known:
            return Place(".".join(path))
        if len(path) == 1:
            return Place("", known)
        return Place("*" if path[0] == "**" else path[0], known)

    def operators_of(self, name: str) -> tuple[str, ...]:
        """Give the operators that an attribute holds; none if it is taken for a cell."""
        without_number = name.rstrip("0123456789")
        self.unused -= {name, without_number}
        return self._operators.get(name, self._operators.get(without_number, ()))


_ANY = "\0"
"""Any characters, dots among them."""


def _compiled(part: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(part)
    except re.error as error:
        raise ValueError(f"'{part}' is no regular expression: {error}") from None


class _NotSimple(Exception):
    """An expression that dotted patterns can't say."""


def _alternatives(text: str) -> list[list[str]]:
    """Read an expression into tokens (words, `.`, anything) of each alternative."""
    text = text.removeprefix("^").removesuffix("$")
    found, end = _choice(text, 0)
    if end < len(text):
        raise _NotSimple
    return found


def _choice(text: str, start: int) -> tuple[list[list[str]], int]:
    """Read alternatives up to the end, or to the parenthesis that closes them."""
    done: list[list[str]] = []
    current: list[list[str]] = [[]]
    position = start
    while position < len(text) and text[position] != ")":
        if text[position] == "|":
            done += current
            current, position = [[]], position + 1
            continue
        tokens, position = _atom(text, position)
        current = [before + token for before in current for token in tokens]
        if len(current) + len(done) > _MOST_ALTERNATIVES:
            raise _NotSimple
    return done + current, position


def _atom(text: str, position: int) -> tuple[list[list[str]], int]:
    rest = text[position:]
    for text_of_any, token in ((".*?", _ANY), (".*", _ANY), ("[^.]*", "*"), ("[^.]+", "*")):
        if rest.startswith(text_of_any):
            return [[token]], position + len(text_of_any)
    if rest[0] == "(":
        inner = position + (3 if rest.startswith("(?:") else 1)
        if text[inner : inner + 1] == "?":
            raise _NotSimple
        found, end = _choice(text, inner)
        if text[end : end + 1] != ")" or text[end + 1 : end + 2] in ("*", "+", "?", "{"):
            raise _NotSimple
        return found, end + 1
    if rest.startswith("\\."):
        token, end = ".", position + 2
    elif rest[0] == ".":
        token, end = ".", position + 1
    elif word := _WORD.match(text, position):
        token, end = word[0], word.end()
    else:
        raise _NotSimple
    if text[end : end + 1] in ("*", "+", "?", "{"):
        raise _NotSimple
    return [[token]], end


def _dotted(tokens: list[str]) -> list[str]:
    """Write tokens of a whole path as segments. A parent that matches covers what is below it, so `x.*` is `x*`."""
    segments = [""]
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else "."
        after = tokens[index + 1] if index + 1 < len(tokens) else ""
        if token == ".":
            segments.append("")
        elif token != _ANY:
            segments[-1] += token
        else:
            segments[-1:] = _anything(segments[-1], before, after)
    return segments


def _anything(segment: str, before: str, after: str) -> list[str]:
    """Write `.*` between two tokens."""
    if after == "":
        return [segment + "*"]
    if before == "." and after == ".":
        return ["*", "**"]  # at least one name
    if before == ".":
        return ["**", "*"]  # the end of some name, at any depth
    if after == ".":
        return [segment + "*", "**"]  # the rest of a name, and what is below it
    raise _NotSimple
