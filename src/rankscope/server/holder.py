"""Requests to the server that holds an embedded store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankscope.collector.http_client import MAX_ANSWER_BYTES, request_once

from ..errors import FailedError

if TYPE_CHECKING:
    from rankscope.collector.http_client import Answer
    from rankscope.collector.store.location import ServerFile


def ask_holder(
    server: ServerFile,
    method: str,
    path: str,
    *,
    timeout_s: float,
    body: str | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> Answer:
    """Send a request with the server's own token, and return the answer.

    Args:
        path: Path and query.
        timeout_s: Time of the whole exchange.
        body: JSON text.
        max_answer_bytes: Limit of the answer.

    Raises:
        FailedError: The server did not answer.
    """
    headers = {"authorization": f"Bearer {server.token}", "accept": "application/json"}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        return request_once(
            method,
            f"{server.url.rstrip('/')}{path}",
            timeout_s=timeout_s,
            headers=headers,
            body=None if body is None else body.encode(),
            max_answer_bytes=max_answer_bytes,
        )
    except OSError as error:
        raise FailedError(
            f"the server {server.url}, which holds the store, did not answer ({error}):"
            " stop it and try again"
        ) from error


def refusal(server: ServerFile, answer: Answer) -> FailedError:
    """Return the error of an answer that is no success."""
    try:
        reason = json.loads(answer.body)["detail"]
    except (ValueError, KeyError, TypeError):
        reason = f"status {answer.status}"
    return FailedError(f"the server {server.url}, which holds the store, refused: {reason}")
