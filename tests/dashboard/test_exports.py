"""No page exports a table, in which a spreadsheet would run a cell as a formula.

`rankscope export` does, and escapes: `tests/rankscope/commands/test_export.py`.
"""

from __future__ import annotations

import ast
import json

import typer
from plotly.utils import PlotlyJSONEncoder

from rankscope.commands.app import app
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages.overview import overview_page
from rankscope.dashboard.pages.timeline import timeline_page
from rankscope.dashboard.theme import graph_config
from tests.support.dashboard.training_builder import training_provider
from tests.support.paths import ROOT

EXPORTS = frozenset({"DataTable", "AgGrid", "Download", "DownloadData"})
"""Components that export tables."""

WORDS = ("export", "csv", "clipboard", "send_data_frame", "excel")


def test_no_page_has_a_component_or_property_that_exports_a_table() -> None:
    provider = training_provider()
    view = View(page=TIMELINE, run="demo-42", step=20)
    pages = [
        overview_page(provider, View(run="demo-42"), base_path="/"),
        timeline_page(provider, view, base_path="/"),
    ]
    tree = json.loads(json.dumps(pages, cls=PlotlyJSONEncoder))
    parts: set[str] = set()
    properties: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict):
            if "props" in node:
                parts.add(str(node["type"]))
                properties.update(node["props"])
            for child in node.values():
                walk(child)

    walk(tree)
    assert {"Graph", "Div"} <= parts
    assert not parts & EXPORTS
    assert not [name for name in properties if any(word in name.lower() for word in WORDS)]


def test_no_module_of_the_dashboard_names_an_export() -> None:
    sources = sorted((ROOT / "dashboard").rglob("*.py"))
    names = {
        name
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "arg", None),
        )
        if isinstance(name, str)
    }

    assert len(sources) > 15
    assert not names & EXPORTS
    assert not [name for name in names if any(word in name.lower() for word in WORDS)]


def test_a_figure_is_exported_as_an_image_only() -> None:
    config = graph_config(selects=False)

    assert config["toImageButtonOptions"]["format"] == "png"
    assert not {"sendData", "editable", "edits"} & {name for name, on in config.items() if on}


def test_only_the_command_export_writes_a_table() -> None:
    group = typer.main.get_command(app)
    commands = dict(getattr(group, "commands", {}))
    del commands["export"]
    flags = {flag for command in commands.values() for one in command.params for flag in one.opts}

    assert {"--json", "--out"} <= flags
    assert not [flag for flag in flags if any(word in flag for word in WORDS)]
