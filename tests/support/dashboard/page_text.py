"""The text of a page."""

from __future__ import annotations

import json

from plotly.utils import PlotlyJSONEncoder


def words(part: object) -> str:
    """Return all text of a page or a part of it, in order."""
    tree = json.loads(json.dumps(part, cls=PlotlyJSONEncoder))
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict) and "props" in node:
            walk(node["props"].get("children"))

    walk(tree)
    return " | ".join(found)
