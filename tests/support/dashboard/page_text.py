"""The text of a page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dash import html
from plotly.utils import PlotlyJSONEncoder

from rankscope.dashboard.pages.refresh import page_children

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.address import View
    from rankscope.dashboard.pages.page import Page
    from rankscope.dashboard.provider import ReportProvider


def rendered(page: Page, provider: ReportProvider, view: View) -> Component:
    """Return a page of a view, with its problem first."""
    return html.Div(page_children(page.render(provider, view)))


def words(part: object) -> str:
    """Return all text of a page or a part of it, in order; a link to a rank and a time are part of
    theirs.
    """
    tree = json.loads(json.dumps(part, cls=PlotlyJSONEncoder))
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, list):
            texts = [_inline_text(child) for child in node]
            if None not in texts and any(isinstance(child, dict) for child in node):
                found.append("".join(text or "" for text in texts))
            else:
                for child in node:
                    walk(child)
        elif isinstance(node, dict) and "props" in node:
            walk(node["props"].get("children"))

    walk(tree)
    return " | ".join(found)


def _inline_text(node: object) -> str | None:
    """Return the text of a string, of a link to a rank or of a time; None for all else."""
    if isinstance(node, dict):
        is_inline = node.get("type") == "Time"
        is_inline |= node.get("props", {}).get("className") == "rank-link"
        return str(node["props"]["children"]) if is_inline else None
    return node if isinstance(node, str) else None


def find_part(page: object, part: str) -> dict[str, Any]:
    """Return the properties of the component with the id ``part``."""
    found: list[dict[str, Any]] = []

    def walk(node: object) -> None:
        if isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict) and "props" in node:
            if node["props"].get("id") == part:
                found.append(node["props"])
            walk(node["props"].get("children"))

    walk(json.loads(json.dumps(page, cls=PlotlyJSONEncoder)))
    return found[0]
