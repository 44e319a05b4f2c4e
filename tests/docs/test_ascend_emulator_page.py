"""`docs/ascend_emulator.md` tells of every setting, counter and field, and its example runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ascend_emulator.md").read_text("utf-8")
SOURCES = ROOT / "scripts" / "ascend_emulator" / "src"


def test_every_setting_is_explained() -> None:
    (known,) = re.findall(r"known = \{(.*?)\};", (SOURCES / "settings.cc").read_text("utf-8"), re.S)
    names = set(re.findall(r"ASCSIM_\w+", known)) - {"ASCSIM_LIBRARY"}  # set by the build
    assert names == set(re.findall(r"ASCSIM_\w+", PAGE))


def test_every_function_of_the_module_is_in_the_emulator() -> None:
    module = (ROOT / "scripts" / "ascend_emulator" / "python" / "ascsim.py").read_text("utf-8")
    sources = "".join(file.read_text("utf-8") for file in SOURCES.glob("*.cc"))
    for name in set(re.findall(r"_library\.(ascsim_\w+)", module)):
        assert re.search(rf"\b{name}\(", sources), name


def test_the_operator_of_the_page_is_like_those_of_the_sources() -> None:
    (example,) = re.findall(r"^```cpp\n(.*?)^```", PAGE, re.M | re.S)
    assert "OPERATOR(Neg, In input, Out output)" in example
    assert "#define OPERATOR(name, ...)" in (SOURCES / "operator.h").read_text("utf-8")


def test_the_versions_of_the_page_are_those_of_the_build() -> None:
    (known,) = re.findall(
        r"^KNOWN_WHEELS = \((.*)\)", (ROOT / "scripts/ascend_emulator/build.py").read_text("utf-8"), re.M
    )
    for version in re.findall(r'"([\d.]+)"', known):
        assert version in PAGE
