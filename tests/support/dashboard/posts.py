"""Posts of a page to the dashboard's callbacks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask.testing import FlaskClient

UPDATE_PATH = "/_dash-update-component"


def shown_state(run: str) -> dict[str, Any]:
    """Return what an open page of a run keeps in the browser."""
    chosen = {"run": run, "epoch": None, "step": None, "revision": None}
    return {"asked": "/", **chosen, "digests": {}}


def post(client: FlaskClient, body: object) -> int:
    """Send a post; return the status of the response."""
    response = client.post(UPDATE_PATH, data=json.dumps(body), content_type="application/json")
    return response.status_code


def page_post(client: FlaskClient, values: dict[str, Any], *, output: str = "") -> dict[str, Any]:
    """Return the body that a page sends to the callback which takes some values.

    Args:
        client: Of the application.
        values: The values by input or state, such as "url.search", in the callback's order.
        output: A part of the callback's output, if several callbacks take the same values.
    """
    names = list(values)
    for callback in client.get("/_dash-dependencies").get_json():
        taken = [f"{one['id']}.{one['property']}" for one in callback["inputs"] + callback["state"]]
        if taken == names and output in callback["output"]:
            outputs = [_property(part) for part in callback["output"].strip(".").split("...")]
            return {
                "output": callback["output"],
                "outputs": outputs if callback["output"].startswith("..") else outputs[0],
                "inputs": _filled(callback["inputs"], values),
                "state": _filled(callback["state"], values),
                "changedPropIds": names[:1],
            }
    raise AssertionError(f"no callback takes {names}")


def ask_page(address: str, shown: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the post with which a browser asks for a page.

    Args:
        address: Path and query.
        shown: The shown state that the last answer gave; None: the page has just been opened.
    """
    outputs = ("page-content.children", "page-changes.data", "page-shown.data",
               "page-timer.interval", "page-timer.max_intervals")  # fmt: skip
    inputs = {
        "page-asked.data": address,
        "page-again.data": None,
        "page-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 0,
    }
    return {
        "output": f"..{'...'.join(outputs)}..",
        "outputs": [_property(name) for name in outputs],
        "inputs": [_property(name) | {"value": value} for name, value in inputs.items()],
        "state": [_property("page-shown.data") | {"value": shown}],
        "changedPropIds": ["page-asked.data"],
    }


def refreshed(
    client: FlaskClient, address: str, *, shown: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the answer to a page that asks for what an address shows, as of `ask_page`."""
    answer = client.post(UPDATE_PATH, json=ask_page(address, shown))
    assert answer.status_code == 200, answer.text
    parts: dict[str, Any] = answer.get_json()["response"]
    assert parts["page-timer"]["max_intervals"] == 2
    return parts


def _property(name: str) -> dict[str, Any]:
    return dict(zip(("id", "property"), name.partition("@")[0].split("."), strict=True))


def _filled(properties: list[dict[str, Any]], values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**one, "value": values[f"{one['id']}.{one['property']}"]} for one in properties]
