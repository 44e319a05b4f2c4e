"""MindFormers' own register and callback handler load and call our callback, named as in its configurations."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from mindspore import nn

from hyper_parallel import PolicyError
from hyper_parallel.core.activation_memory.spec import spec_of
from hyper_parallel.train.mindformers import FOLDER
from tests.mindformers.conftest import VERSIONS, names_loaded

EXAMPLE = Path(__file__).parents[2] / "examples" / "train" / "mindformers" / "train.yaml"
POLICY = {"version": 1, "rules": [{"cells": "layers.*", "policy": "must_recompute"}]}

_PACKAGES = (
    "mindformers",
    "mindformers.core",
    "mindformers.pynative",
    "mindformers.pynative.callback",
    "mindformers.tools",
    "mindformers.tools.hub",
    "mindformers.tools.register",
)


@pytest.fixture(params=VERSIONS)
def modules(
    request: pytest.FixtureRequest, unpacked: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModuleType, ModuleType]]:
    """MindFormers' register and its PyNative callbacks, alone; what it copies goes to a folder of the test."""
    assert not names_loaded(), "MindFormers was imported before"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OM_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("REGISTER_PATH", str(FOLDER))
    if importlib.util.find_spec("requests") is None:  # for downloads, of which there are none
        monkeypatch.setitem(sys.modules, "requests", ModuleType("requests"))
    try:
        for name in _PACKAGES:  # empty: their __init__ would import all of MindFormers
            package = ModuleType(name)
            package.__path__ = [str(unpacked[request.param] / name.replace(".", "/"))]
            sys.modules[name] = package
        vars(sys.modules["mindformers"])["__version__"] = request.param
        _stub("mindformers.tools.logger", logger=logging.getLogger("mindformers"))
        _stub("mindformers.tools.generic", working_or_temp_dir=None)
        _stub("mindformers.core.context", is_legacy_model=lambda: False)
        yield (
            importlib.import_module("mindformers.tools.register.register"),
            importlib.import_module("mindformers.pynative.callback.callback"),
        )
    finally:
        for name in [*names_loaded(), *(name for name in sys.modules if name.startswith("openmind_modules"))]:
            del sys.modules[name]


def _stub(name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def built(register: ModuleType, **more: Any) -> Any:
    """The callback of the example's configuration, as MindFormers builds it."""
    (config,) = yaml.safe_load(EXAMPLE.read_text())["callbacks"]
    config = {**config, "policy": POLICY, **more}
    return register.MindFormerRegister.get_instance_from_cfg(config, register.MindFormerModuleType.CALLBACK)


class Part(nn.Cell):
    """The net of one chunk."""

    def __init__(self, stage_idx: int = 0) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(2, 2)])
        self.stage_idx = stage_idx


def test_the_pynative_trainer_applies_it_to_all_its_nets(modules: tuple[ModuleType, ModuleType], capsys: Any) -> None:
    register, callbacks = modules
    parts = [Part(), Part(1)]
    handler = callbacks.CallbackHandler([built(register)], model=parts)
    arguments, state = SimpleNamespace(), SimpleNamespace()
    handler.on_begin(arguments, state)
    handler.on_train_begin(arguments, state)
    for event in ("epoch_begin", "step_begin", "step_end", "epoch_end", "train_end", "end"):
        getattr(handler, f"on_{event}")(arguments, state, loss=0.0)
    assert all(spec_of(part.layers[0]) is not None for part in parts)
    assert capsys.readouterr().out.count("applied to Part") == 2


def test_each_net_gets_the_stage_of_its_number(modules: tuple[ModuleType, ModuleType]) -> None:
    register, callbacks = modules
    parts = [Part(0), Part(1)]
    policy = {"version": 1, "stages": [{"rules": []}, {"rules": POLICY["rules"]}]}
    handler = callbacks.CallbackHandler([built(register, policy=policy)], model=parts)
    handler.on_train_begin(SimpleNamespace(), SimpleNamespace())
    assert [spec_of(part.layers[0]) is not None for part in parts] == [False, True]


def test_every_event_of_its_callbacks_is_taken(modules: tuple[ModuleType, ModuleType]) -> None:
    register, callbacks = modules
    callback = built(register)
    events = [name for name in vars(callbacks.TrainerCallback) if name.startswith("on_")]
    assert len(events) >= 8
    assert all(callable(getattr(callback, event)) for event in events)


def test_a_step_before_training_began_is_refused(modules: tuple[ModuleType, ModuleType]) -> None:
    register, callbacks = modules
    handler = callbacks.CallbackHandler([built(register)], model=[Part()])
    with pytest.raises(PolicyError, match="too late"):
        handler.on_step_begin(SimpleNamespace(), SimpleNamespace())


def test_the_older_trainer_calls_it_as_model_train_does(modules: tuple[ModuleType, ModuleType]) -> None:
    callback, net = built(modules[0]), Part()
    context = SimpleNamespace(original_args=lambda: SimpleNamespace(network=net))
    callback.on_train_begin(context)
    callback.on_train_step_begin(context)
    callback.on_train_end(context)
    assert callback.plan.applied
