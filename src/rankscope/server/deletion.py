"""Deletion of a run, in this process or by the server that holds the store."""

from __future__ import annotations

import json
from http import HTTPStatus
from urllib.parse import urlencode

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.errors import StoreHeldError
from rankscope.collector.read.runs import read_run_names
from rankscope.collector.retention.deletion import Deletion, Deletions
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store

from .holder import ask_holder, refusal

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
        with open_store(store_url) as store:
            deletions = Deletions(store)
            if not (deletions.is_deleted(run_id) or deletions.has_rows(run_id)):
                raise UnknownRunError(run_id, read_run_names(store))
            return deletions.delete(run_id)
    except StoreHeldError as held:
        server = read_server_file(held.path)
        if server is None or server.token is None:
            raise
    path = f"/v1/runs?{urlencode({'run_id': run_id})}"
    answer = ask_holder(server, "DELETE", path, timeout_s=TIMEOUT_S)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise UnknownRunError(run_id, ())
    if answer.status != HTTPStatus.OK:
        raise refusal(server, answer)
    document = json.loads(answer.body)
    return Deletion(run_id=document["run"], at_ns=document["at_ns"], num_rows=document["num_rows"])
