"""Answers of a collector: acceptance, rejection, or retry later, and their documents."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ..errors import CollectorError, RunNameError
from ..identity import MAX_INT32, check_run_name
from ..names import storable_name
from ..spool.control import read_control_request
from ..spool.cut import CutKey, Placement
from .errors import RejectedError, RetryLaterError, RunGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..http_client import Answer
    from ..spool.control import ControlRequest
    from ..spool.cut import Cut

REJECTIONS = frozenset({400, 409, 413, 415, 422})
"""The collector will never accept what was sent."""

TEMPORARY = frozenset({408, 425, 429})
"""The collector may accept the same later."""

SETTLED_STATES = frozenset({"stored", "duplicate", "repeated"})
CONFLICT = "conflict"
DELETED = "deleted"
KNOWN_STATES = SETTLED_STATES | {CONFLICT, DELETED}
MAX_REASON_LENGTH = 300
TOKEN_PAUSE_S = 60.0


def read_accepted(answer: Answer) -> Any:  # noqa: ANN401  # a JSON document
    """Return the document of an answer that accepts what was sent.

    Raises:
        RejectedError: It was rejected for good.
        RunGoneError: Its run was deleted.
        RetryLaterError: It must be sent again later.
    """
    status = answer.status
    if status == HTTPStatus.OK:
        document = _document(answer)
        if document is None:
            raise RetryLaterError("the collector's answer is not JSON of at most 64 KiB")
        return document
    if status == HTTPStatus.UNAUTHORIZED:
        raise RetryLaterError(
            "the collector does not know the token: renew the file that RANKSCOPE_TOKEN_FILE names",
            pause_s=TOKEN_PAUSE_S,
            is_token_problem=True,
        )
    if status == HTTPStatus.FORBIDDEN:
        raise RetryLaterError(
            "the token is not for this run, or not of role ingest: renew the file that"
            " RANKSCOPE_TOKEN_FILE names",
            pause_s=TOKEN_PAUSE_S,
            is_run_only=True,
            is_token_problem=True,
        )
    if status == HTTPStatus.GONE:
        if not is_from_collector(answer):
            raise RetryLaterError("the address answers 410, but not as a collector does")
        raise RunGoneError("the run was deleted")
    if status in REJECTIONS:
        raise _rejection(answer)
    if status in TEMPORARY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        reason = f"the collector answers {status}"
    elif HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        reason = f"the address answers with a redirect ({status}), which is not followed"
    else:
        reason = f"the address answers {status}: it is not a collector of this version"
    raise RetryLaterError(reason, pause_s=answer.retry_after_s)


def read_cut_states(document: object, cuts: Sequence[Cut]) -> list[str]:
    """Return the state of each cut from the answer's document.

    Raises:
        RetryLaterError: The document does not list exactly these cuts, or has an unknown state.
    """
    entries = document.get("cuts") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) != len(cuts):
        raise RetryLaterError("the collector's answer does not list the cuts that were sent")
    states = []
    for cut, entry in zip(cuts, entries, strict=True):
        expected = {"segment": cut.key.segment, "first_row": cut.key.first_row}
        if not isinstance(entry, dict) or any(entry.get(k) != v for k, v in expected.items()):
            raise RetryLaterError("the collector's answer lists other cuts than were sent")
        state = entry.get("state")
        if not isinstance(state, str) or state not in KNOWN_STATES:
            raise RetryLaterError(
                f"the collector's answer has the unknown cut state {str(state)[:40]!r}"
            )
        states.append(state)
    return states


def check_stored_rows(document: object, num_rows: int) -> None:
    """Raise unless the answer's document says that all rows of a request are stored.

    Raises:
        RetryLaterError: It has another number of rows.
    """
    if not isinstance(document, dict) or document.get("num_rows") != num_rows:
        raise RetryLaterError("the collector's answer does not have the number of rows sent")


def read_requests(document: object, run_id: str) -> list[ControlRequest]:
    """Return the requests to the ranks of a run; those that this version does not know are left
    out.
    """
    found = document.get("requests") if isinstance(document, dict) else None
    requests = []
    for entry in found if isinstance(found, list) else ():
        with suppress(CollectorError):
            requests.append(read_control_request(entry))
    return [request for request in requests if request.run_id == run_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePage:
    """One page of what the collector has stored of a run."""

    end_rows: dict[int, int]
    unanswered: list[CutKey]
    source_format: str | None
    next_after: int | None
    """Segment after which the next page begins; None on the last page."""


def read_resume_page(
    document: Any,  # noqa: ANN401  # a JSON document
    run_id: str,
) -> ResumePage:
    """Return a page of what the collector has stored.

    Raises:
        RetryLaterError: The document has another form.
    """
    try:
        end_rows = {int(segment): int(row) for segment, row in document["end_rows"].items()}
        unanswered = [
            CutKey(
                run_id=run_id,
                epoch=int(entry["epoch"]),
                rank=int(entry["rank"]),
                process=str(entry["process"]),
                segment=int(entry["segment"]),
                first_row=int(entry["first_row"]),
                end_row=int(entry["end_row"]),
            )
            for entry in document["unanswered"]
        ]
        source_format, next_after = document["source_format"], document.get("next")
        return ResumePage(
            end_rows=end_rows,
            unanswered=unanswered,
            source_format=None if source_format is None else str(source_format),
            next_after=None if next_after is None else int(next_after),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise RetryLaterError("the collector's answer does not say what it has stored") from None


def read_placements(
    document: Any,  # noqa: ANN401  # a JSON document
    num_processes: int,
) -> list[Placement | None] | None:
    """Return where the collector stores each process of a question; None if it does not say.

    Raises:
        RetryLaterError: The document has another form.
    """
    if isinstance(document, dict) and "placements" not in document:
        return None
    try:
        placements = [
            None if entry is None else _placement(entry) for entry in document["placements"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RunNameError):
        placements = []
    if len(placements) != num_processes:
        raise RetryLaterError("the collector's answer does not say where it stores each process")
    return placements


def _placement(entry: dict[str, Any]) -> Placement:
    epoch = int(entry["epoch"])
    if not 0 <= epoch <= MAX_INT32:
        raise ValueError(epoch)
    note = storable_name(str(entry["note"]))
    return Placement(run_id=check_run_name(str(entry["run_id"])), epoch=epoch, note=note)


def _rejection(answer: Answer) -> CollectorError:
    """Return the error of a rejection; only the collector itself can reject for good."""
    document = _document(answer)
    if not is_from_collector(answer):
        if answer.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return RetryLaterError(
                f"the address answers {answer.status}, but not as a collector does"
            )
        return RejectedError(answer.status, _reason(answer), is_from_collector=False)
    if answer.status == HTTPStatus.UNPROCESSABLE_ENTITY and document.get("supported"):
        return RetryLaterError(_reason(answer), pause_s=TOKEN_PAUSE_S, is_run_only=True)
    return RejectedError(answer.status, _reason(answer))


def is_from_collector(answer: Answer) -> bool:
    """Return whether a collector wrote the answer, and not a load balancer or gateway.

    Rows are given up only if the collector itself says so.
    """
    document = _document(answer)
    return isinstance(document, dict) and "schema" in document


def _reason(answer: Answer) -> str:
    document = _document(answer)
    reason: object = None
    if isinstance(document, dict):
        reason = document.get("reason") or document.get("detail") or document.get("error")
    text = reason if isinstance(reason, str) else answer.body.decode("utf-8", "replace")
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:MAX_REASON_LENGTH] or "no reason given"


def _document(answer: Answer) -> Any:  # noqa: ANN401  # a JSON document
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
