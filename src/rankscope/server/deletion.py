"""Deletion of a run, in this process or by the server that holds the store."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.errors import StoreHeldError
from rankscope.collector.http_client import request_once
from rankscope.collector.read.runs import read_run_names
from rankscope.collector.retention.deletion import Deletion, Deletions
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store

from ..errors import FailedError

if TYPE_CHECKING:
    from rankscope.collector.store.location import ServerFile

TIMEOUT_S = 900
"""Longer than the ten minutes for which the server waits for the engine."""


def delete_run(store_url: str, run_id: str) -> Deletion:
    """Delete a run for good. Deleting it again is no error.

    Raises:
        UnknownRunError: The store holds no run of this name.
        RunNameError: The name is not a valid run name.
        FailedError: The server that holds the store did not answer, or refused.
        StoreError: The store could not be opened or written.
    """
    try:
        return _delete_here(store_url, run_id)
    except StoreHeldError as held:
        server = read_server_file(held.path)
        if server is None or server.token is None:
            raise
        return _request_deletion(run_id, server)


def _delete_here(store_url: str, run_id: str) -> Deletion:
    with open_store(store_url) as store:
        deletions = Deletions(store)
        if not (deletions.is_deleted(run_id) or deletions.has_rows(run_id)):
            raise UnknownRunError(run_id, read_run_names(store))
        return deletions.delete(run_id)


def _request_deletion(run_id: str, server: ServerFile) -> Deletion:
    headers = {"Authorization": f"Bearer {server.token}", "Accept": "application/json"}
    try:
        url = f"{server.url}/v1/runs?{urlencode({'run_id': run_id})}"
        answer = request_once("DELETE", url, timeout_s=TIMEOUT_S, headers=headers)
        status = answer.status
        document = json.loads(answer.body) if status != HTTPStatus.UNAUTHORIZED else {}
    except (OSError, ValueError) as error:
        raise FailedError(
            f"the server {server.url}, which holds the store, did not answer ({error}):"
            " stop it and try again"
        ) from error
    return _deletion(status, document, run_id=run_id, server=server)


def _deletion(
    status: int, document: dict[str, Any], *, run_id: str, server: ServerFile
) -> Deletion:
    if status == HTTPStatus.OK:
        return Deletion(
            run_id=document["run"], at_ns=document["at_ns"], num_rows=document["num_rows"]
        )
    if status == HTTPStatus.NOT_FOUND:
        raise UnknownRunError(run_id, ())
    raise FailedError(
        f"the server {server.url}, which holds the store, refused:"
        f" {document.get('detail', f'status {status}')}"
    )
