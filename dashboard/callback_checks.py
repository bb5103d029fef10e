"""Posts that no page of ours sends never reach a callback."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import Response, request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash import Dash

UPDATE_PATH = "/_dash-update-component"
REFUSED = "400: no page of this server sends that\n"

Check = Callable[[object], bool]

MOST_DIGITS = 15
"""Of a step that a page names; the address takes no more either."""

MOST_PLACE = 1e15
"""Of a place on an axis, in ms or lines."""

NUM_REVISIONS, NUM_ZOOMS = 2, 5
"""Numbers that the timeline keeps of what it shows, and of how its figure is turned to a window."""


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int)


def _is_path(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.startswith("/"))


def _is_step(value: object) -> bool:
    is_plain = isinstance(value, str) and value.isascii() and value.isdigit()
    return value is None or (is_plain and len(str(value)) <= MOST_DIGITS)


def _is_runs(value: object) -> bool:
    """Tell whether it is what the chooser shows: page, run, and each run with its state."""
    match value:
        case None | [str(), str() | None, list()]:
            return True
        case _:
            return False


def _is_shown(*names: str) -> Check:
    """Return a check of what a page shows: a run, and a number by each name."""

    def check(value: object) -> bool:
        return (
            isinstance(value, dict)
            and value.keys() == {"run", *names}
            and _is_text(value["run"])
            and all(_is_number(value[name]) for name in names)
        )

    return check


def _is_click(value: object) -> bool:
    """Tell whether it is a click on a cell; its x is a step, or the first and last of several."""
    if not value:
        return value is None or value == {}
    points = value.get("points") if isinstance(value, dict) else None
    if not isinstance(points, list) or not points or not isinstance(points[0], dict):
        return False
    step = points[0].get("x")
    return isinstance(step, str | int) and _is_step(str(step).partition("-")[0])


def _is_real(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < MOST_PLACE  # type: ignore[arg-type]  # NaN is not


def _is_pair(value: object) -> bool:
    return value is None or (
        isinstance(value, list)
        and len(value) == NUM_REVISIONS
        and all(isinstance(one, int) for one in value)
    )


def _is_zooms(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == NUM_ZOOMS and all(map(_is_real, value))
    )


def _is_step_shown(value: object) -> bool:
    """Tell whether it is what the timeline shows: a step of a run, and how it is zoomed."""
    return (
        isinstance(value, dict)
        and value.keys() == {"run", "epoch", "step", "revision", "zooms"}
        and _is_text(value["run"])
        and _is_number(value["epoch"])
        and _is_number(value["step"])
        and _is_pair(value["revision"])
        and _is_zooms(value["zooms"])
    )


def _is_zoom(value: object) -> bool:
    """Tell whether it is what a figure says of a zoom: ends of axes are numbers."""
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    return all(_is_real(one) for name, one in value.items() if name.endswith(("[0]", "[1]")))


CHECKS: dict[str, Check] = {
    "url.pathname": _is_path,
    "url.search": _is_text,
    "tick.n_intervals": _is_number,
    "runs-shown.data": _is_runs,
    "rescue.n_intervals": _is_number,
    "overview-clock.n_intervals": _is_number,
    "heard-clock.n_intervals": _is_number,
    "timeline-clock.n_intervals": _is_number,
    "choose-run.value": _is_text,
    "overview-shown.data": _is_shown("revision"),
    "overview-excess.clickData": _is_click,
    "timeline-shown.data": _is_step_shown,
    "timeline-graph.relayoutData": _is_zoom,
    "timeline-choose-step.value": _is_step,
}
"""By property, what a page can send of it; of one that is not here nothing is taken."""


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
        parsed: object = json.loads(body)
        # Half of a surrogate pair is JSON and no text: an address made of it can't be written.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return parsed


def _is_filled(given: object, declared: list[dict[str, Any]]) -> bool:
    """Tell whether the values are those of the declared properties, in their order."""
    wanted = [f"{one['id']}.{one['property']}" for one in declared]
    if _named(given) != wanted or not isinstance(given, list):
        return False
    pairs = zip(wanted, given, strict=True)
    return all(name in CHECKS and CHECKS[name](one.get("value")) for name, one in pairs)


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
