"""Every example in the READMEs runs, and the two languages stay in step."""

import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from mindspore import nn

from hyper_parallel import apply_policy

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README_CN.md")


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / readme).read_text("utf-8"), re.M | re.S)


def run_in_order(examples: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("page")  # MindSpore's compiler looks names up in a module, and code up in files
    monkeypatch.setitem(sys.modules, "page", module)
    for number, code in enumerate(examples):
        path = folder / f"{number}.py"
        path.write_text(code, "utf-8")
        exec(compile(code, str(path), "exec"), vars(module))


@pytest.mark.parametrize("readme", READMES)
def test_python_examples_run_one_after_the_other(readme, tmp_path, monkeypatch, capsys):
    run_in_order(blocks(readme, "python"), tmp_path, monkeypatch)
    assert "must_recompute + swapped inputs" in capsys.readouterr().out


ON_THE_EMULATED_DEVICE = {"ascend_emulator.md"}
"""Its example runs in tests/ascend/emulator."""
PAGES = sorted(
    path.name
    for path in (ROOT / "docs").glob("*.md")
    if "```python" in path.read_text("utf-8") and path.name not in ON_THE_EMULATED_DEVICE
)


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    examples = blocks(f"docs/{page}", "python")
    assert examples
    run_in_order(examples, tmp_path, monkeypatch)


@pytest.mark.parametrize("readme", READMES)
def test_the_policy_file_applies_to_a_net_with_eight_layers(readme):
    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention, self.mlp = nn.Dense(2, 2), nn.Dense(2, 2)

        def construct(self, x):
            return self.mlp(self.attention(x))

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([Layer() for _ in range(8)])

    (text,) = blocks(readme, "yaml")
    plan = apply_policy(Net(), yaml.safe_load(text))
    plan.remove()
    assert len(plan.rows) == 6 + 8


@pytest.mark.parametrize("readme", READMES)
def test_the_two_commands_and_every_link_exist(readme):
    text = (ROOT / readme).read_text("utf-8")
    assert "bash scripts/demo.sh" in text
    assert "bash scripts/test.sh" in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_both_languages_show_the_same_code_and_figures():
    def essence(readme: str) -> list[str]:
        text = (ROOT / readme).read_text("utf-8")
        code = re.findall(r"^```(?:python|yaml|bash)\n(.*?)^```", text, re.M | re.S)
        figures = re.findall(r"\d+\.\d+ \[[^\]]*\]|\d+\.\d+x", text)
        return [re.sub(r"\s*#.*", "", block) for block in code] + figures

    assert essence("README.md") == essence("README_CN.md")
