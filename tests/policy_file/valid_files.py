"""Random policy files that are valid, as plain values, with every key of the format."""

from typing import Any, get_args

from hypothesis import strategies as st

from hyper_parallel import CheckpointPolicy
from hyper_parallel.policy_file.rule import PresetName
from hyper_parallel.policy_file.tensors import DtypeName

policies = st.sampled_from(list(CheckpointPolicy))
patterns = st.sampled_from(
    ["layers.*", "**.mlp", "layers.[0-5]", "head", "block[2].norm*", "layers.*.{attention,mlp}", r"re:layers\.\d+\.mlp"]
)
classes = st.sampled_from(["Dense", "Block", "Layer*", "{Dense,ReLU}", "re:.*Norm"])
layers = st.sampled_from([0, 3, "1", "0-3", "0, 2-3", ["0-1", 3], [2]])
sizes = st.integers(1, 2**40) | st.integers(1, 999).map(lambda n: f"{n}MiB")


@st.composite
def spellings(draw: st.DrawFn, of: st.SearchStrategy[CheckpointPolicy] = policies) -> str:
    """The name of a policy, in any case."""
    name = draw(of).name
    return "".join(draw(st.sampled_from([char.lower(), char.upper()])) for char in name)


def one_or_more(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One value, or a list of some."""
    return values | st.lists(values, min_size=1, max_size=3, unique=True)


@st.composite
def selectors(draw: st.DrawFn) -> dict[str, Any]:
    """What says which cells a rule is about."""
    found = draw(
        st.fixed_dictionaries({}, optional={"cells": patterns, "class": classes, "layers": layers}).filter(bool)
    )
    if "layers" in found and draw(st.booleans()):
        found["container"] = draw(st.sampled_from(["layers", "decoder.layers"]))
    return found


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    """A rule with any keys that go together."""
    rule = draw(selectors())
    replays = st.sampled_from([each for each in CheckpointPolicy if each.replays])
    kind = draw(st.sampled_from(["plain", "ops", "preset"]))
    if kind == "plain":
        rule["policy"] = draw(spellings())
    elif draw(st.booleans()):
        rule["policy"] = draw(spellings(replays))
    if kind == "ops":
        kept = st.sampled_from(["must_save", "must_swap", "prefer_recompute"])
        table = st.dictionaries(st.sampled_from(["MatMul", "Tanh", "*"]), kept, min_size=1)
        rule["ops"] = draw(table | st.lists(st.sampled_from(["MatMul", "Tanh"]), min_size=1))
    if kind == "preset":
        names = [name for name in get_args(PresetName) if name not in ("full", "inputs_on_host")]
        rule["preset"] = draw(
            st.sampled_from(names) | st.sampled_from(names).map(lambda name: [name, "inputs_on_host"])
        )
    policy = CheckpointPolicy[rule.get("policy", "must_recompute").upper()]
    if policy.replays:
        optional = {
            "swap_inputs": st.booleans(),
            "determinism_check": st.sampled_from(["operators", "values"]),
            "allow_cache_entry_mutation": st.booleans(),
            "keep_collectives": st.booleans(),
            "exclude": one_or_more(patterns),
        }
        rule |= draw(st.fixed_dictionaries({}, optional=optional))
    if (policy.swaps or rule.get("swap_inputs")) and draw(st.booleans()):
        dtypes = one_or_more(st.sampled_from(get_args(DtypeName)))
        tensors = st.fixed_dictionaries({}, optional={"min_bytes": sizes, "dtype": dtypes}).filter(bool)
        rule["tensors"] = draw(tensors)
    return rule


swaps = st.fixed_dictionaries(
    {},
    optional={
        "tier": st.sampled_from(["file", "host"]),
        "host_budget": sizes,
        "window": sizes,
        "pending": sizes,
        "min_bytes": sizes,
        "folder": st.just("spill"),
        "when_exhausted": st.lists(st.sampled_from(["recompute", "keep"]), unique=True, max_size=2),
    },
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A whole file, but for `include`."""
    names = draw(st.lists(st.sampled_from(["a", "b", "attention blocks"]), unique=True, max_size=2))
    uses = st.sampled_from(names).map(lambda name: {"use": name}) if names else st.nothing()
    entries = st.lists(rules() | uses, max_size=3)
    document = draw(
        st.fixed_dictionaries(
            {"version": st.just(1)},
            optional={
                "mode": st.sampled_from(["auto", "pynative"]),
                "default": spellings(),
                "rules": entries,
                "stages": st.lists(st.fixed_dictionaries({}, optional={"rules": entries}), min_size=1, max_size=3),
                "prefetch": st.lists(st.just({"load": "layers.0", "at": "layers.[2]"}), max_size=2),
                "swap": swaps,
            },
        )
    )
    if names:
        document["rule_sets"] = {name: draw(st.lists(rules(), max_size=2)) for name in names}
    return document
