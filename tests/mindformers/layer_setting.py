"""MindFormers' own rules for graph mode: `LayerSetting`, alone from a wheel, and layers that write down its calls."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.mindformers.conftest import names_loaded

_PACKAGES = (
    "mindformers",
    "mindformers.core",
    "mindformers.modules",
    "mindformers.modules.transformer",
    "mindformers.parallel_core",
    "mindformers.parallel_core.training_graph",
    "mindformers.parallel_core.training_graph.transformer",
    "mindformers.tools",
)

Calls = dict[int, set[tuple[str, str]]]
"""By layer: what was called, and on which path inside the layer."""


@contextmanager
def layer_settings(folder: Path) -> Iterator["Rules"]:
    """MindFormers' module with `LayerSetting`, which is gone afterwards."""
    assert not names_loaded(), "MindFormers was imported before"
    try:
        for name in _PACKAGES:  # empty: their __init__ would import all of MindFormers
            package = ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = package
        log = logging.getLogger("mindformers")
        _module("mindformers.tools.logger", logger=log, _LogActionOnce=lambda **_: lambda function: function)
        _module("mindformers.tools.utils", is_pynative=lambda: False)
        _module("mindformers.core.context", is_legacy_model=lambda: True)
        configs = importlib.import_module("mindformers.modules.transformer.transformer")
        vars(sys.modules["mindformers.modules.transformer"]).update(
            TransformerSwapConfig=configs.TransformerSwapConfig,
            TransformerRecomputeConfig=configs.TransformerRecomputeConfig,
        )
        module = importlib.import_module("mindformers.parallel_core.training_graph.transformer.utils")
        assert Path(module.__file__ or "").is_relative_to(folder)
        yield Rules(module, configs)
    finally:
        for name in names_loaded():
            del sys.modules[name]


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    return module


class Rules:
    """Runs `LayerSetting` on layers that write down what it does to them."""

    def __init__(self, module: Any, configs: Any) -> None:
        self._module, self._configs = module, configs

    def calls(
        self,
        settings: dict[str, Any],
        inside: list[str],
        *,
        layers: int,
        stages: int = 1,
        interleave: int = 1,
        offset: Any = 0,
        zero_bubble_v: bool = False,
        legacy: bool = True,
    ) -> Calls:
        """What MindFormers does to each layer; `inside` are the paths of operators in a layer."""
        self._context_says(interleave > 1, zero_bubble_v)
        self._module.is_legacy_model = lambda: legacy
        recompute, swap = settings.get("recompute_config", {}), settings.get("swap_config", {})
        config = SimpleNamespace(gradient_aggregation_group=4)
        if legacy:
            config.pipeline_stage = stages
            config.recompute = self._configs.TransformerRecomputeConfig(**recompute)
            config.swap = self._configs.TransformerSwapConfig(**swap)
        else:
            config.pipeline_model_parallel_size = stages
            vars(config).update(self._configs.TransformerRecomputeConfig(**recompute).to_dict())
            config.cpu_offloading = swap.get("cpu_offloading", False)
            config.cpu_offloading_num_layers = swap.get("cpu_offloading_num_layers")
            config.op_swap = swap.get("op_swap")
        setting = self._module.LayerSetting(layers, offset, config, interleave)
        found = {}
        for layer in range(layers):
            calls: set[tuple[str, str]] = set()
            setting(_Recorder("", inside, calls), layer)
            found[layer] = calls
        return found

    def stages(
        self, *, layers: int, stages: int, interleave: int, offset: Any, zero_bubble_v: bool = False
    ) -> list[int]:
        """The pipeline stage of every layer."""
        self._context_says(interleave > 1, zero_bubble_v)
        self._module.is_legacy_model = lambda: True
        config = SimpleNamespace(
            pipeline_stage=stages,
            gradient_aggregation_group=4,
            recompute=self._configs.TransformerRecomputeConfig(),
            swap=self._configs.TransformerSwapConfig(),
        )
        setting = self._module.LayerSetting(layers, offset, config, interleave)
        found = []
        for number in range(layers):
            layer = _Recorder("", [], set())
            setting(layer, number)
            found.append(layer.pipeline_stage)
        return found

    def _context_says(self, pipeline_interleave: bool, zero_bubble_v: bool) -> None:
        said = {
            "pipeline_interleave": pipeline_interleave,
            "pipeline_scheduler": "zero_bubble_v" if zero_bubble_v else "1f1b",
        }
        self._module.ms = SimpleNamespace(get_auto_parallel_context=said.__getitem__)


class _Recorder:
    """Stands for a cell, whose paths are in `inside`; operators are those without anything below."""

    def __init__(self, path: str, inside: list[str], calls: set[tuple[str, str]]) -> None:
        self._path, self._calls, self._cells = path, calls, {}
        self.pipeline_stage = 0
        for name in dict.fromkeys(each.split(".")[0] for each in inside):
            below = [each.partition(".")[2] for each in inside if each.split(".")[0] == name and "." in each]
            where = f"{path}.{name}" if path else name
            if below:
                self._cells[name] = _Recorder(where, [each for each in below if each], calls)
            else:
                setattr(self, name, _Operator(where, calls))

    def recompute(self, **_: Any) -> None:
        self._calls.add(("recompute", self._path))

    def offload(self, backward_prefetch: int) -> None:
        self._calls.add(("swap", self._path))

    def set_comm_fusion(self, _: int) -> None:
        """No matter here."""


class _Operator:
    """Stands for a Primitive."""

    def __init__(self, path: str, calls: set[tuple[str, str]]) -> None:
        self._path, self._calls = path, calls

    def recompute(self, on: bool = True) -> None:
        call = ("recompute", self._path)
        if on:
            self._calls.add(call)
        else:
            self._calls.discard(call)
            self._calls.add(("exclude", self._path))

    def _offload(self, backward_prefetch: int) -> None:
        self._calls.add(("swap", self._path))

    def add_prim_attr(self, name: str, on: bool) -> None:
        assert name == "recompute_comm_op"
        self._calls.add(("recompute communication" if on else "exclude communication", self._path))
