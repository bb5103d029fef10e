"""Checks of posts to the dashboard: a callback runs only with what its own page sends.

Dash calls a callback for any list of inputs and answers an unknown one with 500. Here a post must
name the inputs, states and outputs that the callback declares, and `checked` compares the values
with the annotations of its parameters. Any other post is answered 400.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

from flask import Response, request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call
from pydantic_core import from_json

from .address import MAX_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dash import Dash

UPDATE_PATH = "/_dash-update-component"
REJECTED = "400: no page of this server sends this\n"

Number = Annotated[int, Field(ge=-1, lt=10**MAX_DIGITS)]
"""A whole number that a browser keeps exactly."""

Ticks = Number | None
"""How often a timer has fired."""

AxisPlace = Annotated[float, Field(gt=-(10.0**MAX_DIGITS), lt=10.0**MAX_DIGITS)]
"""A place on a figure's axis, in the axis' unit; neither infinite nor NaN."""

checked = validate_call(config=ConfigDict(strict=True))
"""Decorator below Dash's: values must have the types of the parameters. None is converted."""

_logger = logging.getLogger(__name__)


class Posted(BaseModel):
    """Base of a value with several keys. Values are not converted; further keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class Point(Posted):
    """A clicked point of a figure. Each figure sets what it needs."""

    x: str | float | None = None
    y: str | float | None = None
    customdata: Number | None = None


class Click(Posted):
    """A click on a figure, as plotly describes it."""

    points: list[Point] = []

    @property
    def point(self) -> Point:
        """The first point; an empty one if none was hit."""
        return self.points[0] if self.points else Point()


def guard(app: Dash) -> None:
    """Answer 400 to each post that no page of ``app`` sends."""

    def check() -> Response | None:
        if request.path != UPDATE_PATH:
            return None
        if request.is_json and is_expected(app.callback_map, request.get_data()):
            return None
        return Response(REJECTED, status=400, mimetype="text/plain")

    def reject(error: ValidationError) -> Response:
        _logger.warning("rejected a post to %s: %s", error.title, error.errors(include_input=False))
        return Response(REJECTED, status=400, mimetype="text/plain")

    # Registered after Dash's own, which fills the map of callbacks at the first request.
    app.server.before_request(check)
    app.server.register_error_handler(ValidationError, reject)


def is_expected(callbacks: Mapping[str, Any], posted: bytes) -> bool:
    """Return whether a post names a callback, its outputs, inputs and states in its order.

    Args:
        callbacks: Dash's map of callbacks by output.
    """
    try:
        body = from_json(posted)
        callback = callbacks[body["output"]]
        outputs = body["outputs"] if isinstance(body["outputs"], list) else [body["outputs"]]
        return (
            "callback" in callback  # else it runs in the browser
            and _names(outputs) == _without_hash(body["output"].strip(".").split("..."))
            and _names(body["inputs"]) == _names(callback["inputs"])
            and _names(body.get("state", [])) == _names(callback["state"])
            and isinstance(body.get("changedPropIds", []), list)
            and all(isinstance(name, str) for name in body.get("changedPropIds", []))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _names(properties: Iterable[Mapping[str, str]]) -> list[str]:
    return _without_hash(f"{named['id']}.{named['property']}" for named in properties)


def _without_hash(names: Iterable[str]) -> list[str]:
    # The name of a property that several callbacks set ends with "@" and a hash.
    return [name.partition("@")[0] for name in names]
