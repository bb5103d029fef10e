"""The text of a page."""

from __future__ import annotations

import json

from plotly.utils import PlotlyJSONEncoder


def words(part: object) -> str:
    """Return all text of a page or a part of it, in order; links to ranks are part of theirs."""
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
    """Return the text of a string or of a link to a rank; None for all else."""
    if isinstance(node, dict) and node.get("props", {}).get("className") == "rank-link":
        return str(node["props"]["children"])
    return node if isinstance(node, str) else None
