"""Checks of posts to the dashboard: a callback runs only with what its own page sends.

Each callback declares a `Post`, a model of the values of its inputs and states, and takes it with
`takes`. Any other post is answered 400, also one to a callback without a model.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flask import Response, request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .address import MAX_DIGITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dash import Dash

UPDATE_PATH = "/_dash-update-component"
REJECTED = "400: no page of this server sends this\n"

Result = TypeVar("Result")
AnyPost = TypeVar("AnyPost", bound="Post")

Ticks = int | None
"""How often a timer has fired."""

PagePath = Annotated[str, Field(pattern="^/")] | None

AxisPlace = Annotated[float, Field(gt=-(10.0**MAX_DIGITS), lt=10.0**MAX_DIGITS)]
"""A place on a figure's axis, in the axis' unit; neither infinite nor NaN."""


class Post(BaseModel):
    """The values of a callback's inputs, then of its states, in the order of the callback.

    Values are not converted, and neither an unknown nor a missing key is accepted. A model of
    a value of several keys has this base too.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Property(BaseModel):
    """A property of a component in the body of a post."""

    model_config = ConfigDict(strict=True)

    id: str
    name: str = Field(alias="property")
    value: Any = None

    def key(self) -> str:
        # The name of a property that several callbacks set ends with "@" and a hash.
        return f"{self.id}.{self.name.partition('@')[0]}"


class _Body(BaseModel):
    """The body of a post, as Dash's scripts write it."""

    model_config = ConfigDict(strict=True)

    output: str
    outputs: _Property | list[_Property]
    inputs: list[_Property] = []
    state: list[_Property] = []
    changedPropIds: list[str] = []  # noqa: N815  # Dash's name


def takes(
    model: type[AnyPost],
) -> Callable[[Callable[[AnyPost], Result]], Callable[..., Result]]:
    """Return a decorator that calls a callback with its values as one ``model``.

    It goes directly above the function, below Dash's decorator.
    """

    def decorate(callback: Callable[[AnyPost], Result]) -> Callable[..., Result]:
        @wraps(callback)
        def run(*values: object) -> Result:
            return callback(_parse(model, values))

        run.post_model = model  # type: ignore[attr-defined]
        return run

    return decorate


def guard(app: Dash) -> None:
    """Answer 400 to each post that no page of ``app`` sends."""

    def check() -> Response | None:
        if request.path != UPDATE_PATH:
            return None
        if request.is_json and is_expected(app.callback_map, request.get_data()):
            return None
        return Response(REJECTED, status=400, mimetype="text/plain")

    # Registered after Dash's own, which fills the map of callbacks at the first request.
    app.server.before_request(check)


def is_expected(callbacks: Mapping[str, Any], posted: bytes) -> bool:
    """Return whether a post calls a callback as its page does.

    Args:
        callbacks: Dash's map of callbacks by output.
        posted: The post's body.
    """
    try:
        body = _Body.model_validate_json(posted)
        callback = callbacks.get(body.output, {})
        # None: the callback runs in the browser, or declares no model.
        model = getattr(callback.get("callback"), "post_model", None)
        if model is None or not _has_names(body, callback):
            return False
        _parse(model, [one.value for one in (*body.inputs, *body.state)])
    except ValidationError:
        return False
    return True


def _has_names(body: _Body, callback: Mapping[str, Any]) -> bool:
    """Return whether outputs, inputs and states are the callback's, in its order."""
    outputs = body.outputs if isinstance(body.outputs, list) else [body.outputs]
    wanted = [one.partition("@")[0] for one in body.output.strip(".").split("...")]
    return (
        [one.key() for one in outputs] == wanted
        and [one.key() for one in body.inputs] == _declared(callback["inputs"])
        and [one.key() for one in body.state] == _declared(callback["state"])
    )


def _declared(properties: Iterable[Mapping[str, str]]) -> list[str]:
    return [f"{one['id']}.{one['property']}" for one in properties]


def _parse(model: type[AnyPost], values: Iterable[object]) -> AnyPost:
    return model.model_validate(dict(zip(model.model_fields, values, strict=True)))
