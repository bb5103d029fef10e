"""Marks of hosts, written by a command or by the server with the store, and sent to receivers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankscope.analysis.report.text import format_names, format_time
from rankscope.collector.read.hosts import HostChange, HostMark, write_host_changes

from ..errors import FailedError
from .alerting import plain_document
from .changes import change_router, change_stored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import APIRouter

    from rankscope.collector.notify.receiver import Receiver
    from rankscope.collector.store.store import Store

PATH = "/v1/hosts"
HOST_RULE = "host"
"""Rule of the messages to receivers."""

VERBS = {
    (True, True): "is", (True, False): "are",
    (False, True): "is no longer", (False, False): "are no longer",
}  # fmt: skip
"""By whether the hosts get the mark, and whether it is one host."""

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, Field(max_length=500)]
Mark = Literal["excluded", "golden", "spare"]


class HostChanges(BaseModel):
    """Marks that some hosts get or lose."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    hosts: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    marks: Annotated[list[Mark], Field(min_length=1)]
    is_set: bool
    until_ns: int | None = None
    reason: Text = ""
    by: Text = ""


def apply_host_changes(store: Store, changes: HostChanges, *, url: str) -> dict[str, Any]:
    """Store changes, and return the message about them for receivers.

    Raises:
        StoreError: The store could not be written.
    """
    at_ns = time.time_ns()
    write_host_changes(
        store,
        [
            HostChange(
                host=host, mark=HostMark(mark), at_ns=at_ns, is_set=changes.is_set,
                until_ns=changes.until_ns, reason=changes.reason, set_by=changes.by,
            )
            for host in changes.hosts
            for mark in changes.marks
        ],
    )  # fmt: skip
    return {
        **plain_document(HOST_RULE, describe_changes(changes), at_ns=at_ns, url=url),
        "key": ",".join(changes.hosts)[:200],
        "severity": "warning" if HostMark.EXCLUDED in changes.marks else "none",
        "hosts": changes.hosts,
        "marks": changes.marks,
        "is_set": changes.is_set,
        "until_ns": changes.until_ns,
        "reason": changes.reason,
        "by": changes.by,
    }


def describe_changes(changes: HostChanges) -> str:
    """Return the changes in one line."""
    whom = format_names(changes.hosts)
    verb = VERBS[changes.is_set, len(changes.hosts) == 1]
    until = "" if changes.until_ns is None else f" until {format_time(changes.until_ns)} (UTC)"
    reason = f": {changes.reason}" if changes.reason else ""
    return f"{whom} {verb} {' or '.join(changes.marks)}{until}{reason}"


def change_hosts(store_url: str, changes: HostChanges, receivers: Iterable[Receiver]) -> str:
    """Apply changes to a store, through the server that holds it if there is one.

    Args:
        store_url: URL of the store.
        receivers: Get a message, once; a server that holds the store has its own.

    Raises:
        FailedError: The server that holds the store did not answer, or refused; or a receiver did
            not get the message.
        StoreError: The store could not be opened or written.
    """

    def apply(store: Store) -> str:
        document = apply_host_changes(store, changes, url="")
        failed = [each.name for each in receivers if not each.send(document).is_delivered]
        if failed:
            raise FailedError(
                f"stored, but receiver {format_names(failed)} did not get the message: check its"
                " URL and its log"
            )
        return str(document["text"])

    return change_stored(store_url, PATH, changes, apply)


def host_router(store: Store, receivers: Iterable[Receiver], *, url: str) -> APIRouter:
    """Return the route ``POST /v1/hosts``, for administrators."""
    all_receivers = tuple(receivers)

    def apply(changes: HostChanges) -> str:
        document = apply_host_changes(store, changes, url=url)
        for receiver in all_receivers:
            receiver.post(document, on_done=lambda _: None)
        return str(document["text"])

    return change_router(
        PATH,
        HostChanges.model_validate,
        apply,
        summary="Exclude hosts, or mark them as golden or spare",
    )
