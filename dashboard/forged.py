"""Posts that no page of ours sends never reach a callback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flask import Response, request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash import Dash

UPDATE_PATH = "/_dash-update-component"
REFUSED = "400: no page of this server sends that\n"

TEXT = (str, type(None))
NUMBER = (int, type(None))
TYPES: dict[str, tuple[type, ...]] = {
    "pathname": TEXT,
    "search": TEXT,
    "href": TEXT,
    "hash": TEXT,
    "n_intervals": NUMBER,
    "n_clicks": NUMBER,
    "clickData": (dict, type(None)),
    "relayoutData": (dict, type(None)),
    "hoverData": (dict, type(None)),
}
"""Of what a property is, where it can be only that."""


def guard(app: Dash) -> None:
    """Answer 400 to each update whose outputs, inputs or values are no callback's of ``app``."""

    def check() -> Response | None:
        if request.path != UPDATE_PATH:
            return None
        if request.is_json and is_of(app.callback_map, _parsed(request.get_data())):
            return None
        return Response(REFUSED, status=400, mimetype="text/plain")

    # Registered after Dash's own, which fills the map of callbacks at the first request.
    app.server.before_request(check)


def is_of(callbacks: Mapping[str, Any], body: object) -> bool:
    """Tell whether a body asks for a callback as its page would.

    Args:
        callbacks: Dash's map of them, by output.
        body: What was sent, parsed.
    """
    if not isinstance(body, dict) or not isinstance(body.get("output"), str):
        return False
    callback = callbacks.get(body["output"], {})
    # One without a function runs in the browser.
    if "callback" not in callback or not _is_texts(body.get("changedPropIds", [])):
        return False
    wanted = [one.partition("@")[0] for one in body["output"].strip(".").split("...")]
    return (
        _named(body.get("outputs")) == wanted
        and _is_filled(body.get("inputs", []), callback["inputs"])
        and _is_filled(body.get("state", []), callback["state"])
    )


def _parsed(body: bytes) -> object:
    """Return what a body holds; None where it is no JSON, or nested past all use."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _is_filled(given: object, declared: list[dict[str, Any]]) -> bool:
    """Tell whether the values are those of the declared properties, in their order."""
    wanted = [f"{one['id']}.{one['property']}" for one in declared]
    if _named(given) != wanted or not isinstance(given, list):
        return False
    return all(isinstance(one.get("value"), TYPES.get(one["property"], (object,))) for one in given)


def _named(given: object) -> list[str] | None:
    """Return ``id.property`` of each entry; None where it is no entry or list of them."""
    entries = given if isinstance(given, list) else [given]
    names = []
    for one in entries:
        if not isinstance(one, dict):
            return None
        identity, name = one.get("id"), one.get("property")
        if not isinstance(identity, str) or not isinstance(name, str):
            return None
        names.append(f"{identity}.{name.partition('@')[0]}")
    return names


def _is_texts(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(one, str) for one in given)
