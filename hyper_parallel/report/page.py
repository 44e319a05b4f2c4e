"""A page of a run: one HTML file that needs nothing else."""

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from pydantic import ByteSize

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.report.cell_table import cell_columns, cell_rows
from hyper_parallel.report.run import Run
from hyper_parallel.report.run_plot import run_as_svg
from hyper_parallel.report.run_summary import RunSummary

_TEMPLATE = "page.html.jinja"


def page(run: Run, summary: RunSummary, title: str) -> str:
    """Make the page.

    Args:
        run: The run, for the picture.
        summary: Its figures, for the tables.
        title: What was traced, for example the name of the file.

    Returns:
        HTML.

    Supported Platforms:
        ``CPU``
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "mb": lambda size: f"{size / 2**20:.1f}",
        "ms": lambda seconds: f"{seconds * 1e3:.1f}",
        "percent": lambda share: f"{share:.1%}",
    }
    template = environment.from_string(files("hyper_parallel.report").joinpath(_TEMPLATE).read_text("utf-8"))
    cells = summary.cells or {}
    return template.render(
        title=title,
        begin=run.begin,
        picture=Markup(run_as_svg(run)),  # matplotlib escapes what stands in it
        summary=summary,
        cell_columns=cell_columns(cells),
        cell_rows=cell_rows(cells),
        settings=_in_words(run.settings),
    )


def _in_words(settings: SwapSettings) -> list[tuple[str, str]]:
    return [(name, _value_in_words(getattr(settings, name))) for name in SwapSettings.model_fields]


def _value_in_words(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, ByteSize):
        return value.human_readable()
    if isinstance(value, tuple):
        return ", then ".join(value) or "error"
    return str(value)
