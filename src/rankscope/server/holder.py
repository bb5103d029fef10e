"""Requests to the server that holds an embedded store."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urljoin

import urllib3

from ..errors import FailedError

if TYPE_CHECKING:
    from rankscope.collector.store.location import ServerFile


def ask_holder(
    server: ServerFile, method: str, path: str, *, timeout_s: float, body: str | None = None
) -> urllib3.BaseHTTPResponse:
    """Send a request with the server's own token, and return the answer.

    Args:
        server: The server.
        method: HTTP method.
        path: Path and query.
        timeout_s: Longest time between two parts of the answer.
        body: JSON text.

    Raises:
        FailedError: The server did not answer.
    """
    headers = {"authorization": f"Bearer {server.token}", "accept": "application/json"}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        return urllib3.request(
            method,
            urljoin(server.url, path),
            body=body,
            headers=headers,
            timeout=timeout_s,
            retries=False,
            redirect=False,
        )
    except urllib3.exceptions.HTTPError as error:
        raise FailedError(
            f"the server {server.url}, which holds the store, did not answer ({error}):"
            " stop it and try again"
        ) from error


def refusal(server: ServerFile, answer: urllib3.BaseHTTPResponse) -> FailedError:
    """Return the error of an answer that is no success."""
    try:
        reason = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        reason = f"status {answer.status}"
    return FailedError(f"the server {server.url}, which holds the store, refused: {reason}")
