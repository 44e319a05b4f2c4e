"""Blocks of MindFormers' configuration, for the tests of converting them."""

from typing import Any

from hyper_parallel.policy_file.mindformers import convert_mindformers

MUL = r"feed_forward\.mul"


def graph(**recompute: Any) -> dict[str, Any]:
    return {"use_legacy": True, "recompute_config": recompute}


def swapping(**swap: Any) -> dict[str, Any]:
    return {"use_legacy": True, "swap_config": {"swap": True, **swap}}


def full(*layers: Any, **more: Any) -> dict[str, Any]:
    return {"recompute": {"mode": "full", "full_recompute_layer": list(layers), **more}}


def kinds(settings: dict[str, Any], **options: Any) -> dict[str, str]:
    """Kind of each note, by the key that it is about."""
    return {note.key: note.kind for note in convert_mindformers(settings, **{"layers": 4, **options}).notes}
