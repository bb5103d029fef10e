"""Changes to a store that a command makes itself, or the server that holds the store."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import ValidationError

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.errors import CollectorError, StoreHeldError
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store

from ..errors import BadInputError
from .holder import ask_holder, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter
    from pydantic import BaseModel

    from rankscope.collector.store.store import Store

TIMEOUT_S = 60

Change = TypeVar("Change")


def change_stored(
    store_url: str, path: str, change: BaseModel, apply: Callable[[Store], str]
) -> str:
    """Change a store, through the server that holds it if there is one; return what was done.

    Args:
        store_url: URL of the store.
        path: Route of the server that takes the change.
        apply: Applies it to the open store.

    Raises:
        BadInputError: What is to be changed does not exist.
        FailedError: The server that holds the store did not answer, or refused.
        StoreError: The store could not be opened or written.
    """
    try:
        with open_store(store_url) as store:
            return apply(store)
    except StoreHeldError as held:
        server = read_server_file(held.path)
        if server is None or server.token is None:
            raise
    body = change.model_dump_json()
    answer = ask_holder(server, "POST", path, timeout_s=TIMEOUT_S, body=body)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise BadInputError(str(json.loads(answer.body)["detail"]))
    if answer.status != HTTPStatus.OK:
        raise refusal(server, answer)
    return str(json.loads(answer.body)["done"])


def change_router(
    path: str,
    read: Callable[[dict[str, object]], Change],
    apply: Callable[[Change], str],
    *,
    summary: str,
) -> APIRouter:
    """Return the route ``POST`` of a change, for administrators.

    Args:
        read: Returns the change of a document; raises `ValueError` or `CollectorError` if it is
            none.
        apply: Applies a change and returns what was done, in one line.
        summary: What it does, in the list of routes.
    """
    from fastapi import APIRouter, Body, HTTPException

    router = APIRouter()

    def change(body: Annotated[dict[str, object], Body()]) -> dict[str, str]:
        try:
            wanted = read(body)
        except ValidationError as error:
            raise HTTPException(422, f"{error.error_count()} wrong values") from error
        except (CollectorError, ValueError) as error:
            raise HTTPException(422, str(error)) from error
        try:
            return {"done": apply(wanted)}
        except (BadInputError, UnknownRunError) as error:
            raise HTTPException(404, str(error)) from error

    change.__annotations__ = {
        "body": Annotated[dict[str, object], Body()],
        "return": dict[str, str],
    }
    # Only now: FastAPI reads the annotations here, and cannot resolve the text of local names.
    router.post(path, summary=summary)(change)
    return router
