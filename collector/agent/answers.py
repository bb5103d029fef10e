"""What an answer of the collector means for what was sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..spool.cut import CutKey
from .errors import RejectedError, RetryLaterError, RunGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..errors import CollectorError
    from ..spool.cut import Cut
    from .link import Answer

OK, MULTIPLE_CHOICES, BAD_REQUEST = 200, 300, 400
UNAUTHORIZED, FORBIDDEN, GONE, TOO_LARGE, UNPROCESSABLE = 401, 403, 410, 413, 422
SERVER_ERROR = 500

CONTENT_REFUSALS = frozenset({BAD_REQUEST, 409, TOO_LARGE, 415, UNPROCESSABLE})
"""The collector will not have what was sent, whoever sends it and whenever."""

PASSING_REFUSALS = frozenset({408, 425, 429})
"""The collector will have it later."""

SETTLED_STATES = frozenset({"stored", "duplicate", "repeated"})
CONFLICT = "conflict"
DELETED = "deleted"
KNOWN_STATES = SETTLED_STATES | {CONFLICT, DELETED}
MAX_REASON_LETTERS = 300
TOKEN_PAUSE_S = 60.0


def accepted(answer: Answer) -> Any:  # noqa: ANN401  # a JSON document
    """Return the document of an answer that accepts what was sent.

    Raises:
        RejectedError: What was sent is refused.
        RunGoneError: Its run was deleted.
        RetryLaterError: It is to be sent again later.
    """
    status = answer.status
    if status == OK:
        document = _document(answer)
        if document is None:
            raise RetryLaterError("the collector's answer is no JSON of at most 64 KiB")
        return document
    if status == UNAUTHORIZED:
        raise RetryLaterError(
            "the collector does not know the token: renew the file that RANKSCOPE_TOKEN_FILE names",
            pause_s=TOKEN_PAUSE_S,
            is_token=True,
        )
    if status == FORBIDDEN:
        raise RetryLaterError(
            "the token is not for this run, or not of role ingest: renew the file that"
            " RANKSCOPE_TOKEN_FILE names",
            pause_s=TOKEN_PAUSE_S,
            is_of_run=True,
            is_token=True,
        )
    if status == GONE:
        if not _is_a_collectors(answer):
            raise RetryLaterError("the address answers 410, and not as a collector does")
        raise RunGoneError("the run was deleted")
    if status in CONTENT_REFUSALS:
        raise _refusal(answer)
    raise RetryLaterError(_trouble(status), pause_s=answer.retry_after_s)


def read_cut_states(document: object, cuts: Sequence[Cut]) -> list[str]:
    """Return what became of each cut, if the answer speaks of exactly these.

    Raises:
        RetryLaterError: It does not.
    """
    told = document.get("cuts") if isinstance(document, dict) else None
    if not isinstance(told, list) or len(told) != len(cuts):
        raise RetryLaterError("the collector's answer does not tell of the cuts that were sent")
    states = []
    for cut, entry in zip(cuts, told, strict=True):
        of_cut = {"segment": cut.key.segment, "first_row": cut.key.first_row}
        if not isinstance(entry, dict) or any(entry.get(k) != v for k, v in of_cut.items()):
            raise RetryLaterError("the collector's answer tells of other cuts than were sent")
        state = entry.get("state")
        if not isinstance(state, str) or state not in KNOWN_STATES:
            raise RetryLaterError(f"the collector says {str(state)[:40]!r} of a cut: unknown here")
        states.append(state)
    return states


def check_stored_rows(document: object, num_rows: int) -> None:
    """Do nothing if the answer tells that all descriptions of a request are stored.

    Raises:
        RetryLaterError: It does not.
    """
    if not isinstance(document, dict) or document.get("num_rows") != num_rows:
        raise RetryLaterError("the collector's answer does not tell of the rows that were sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePage:
    """A page of what the collector holds of a run."""

    end_rows: dict[int, int]
    unanswered: list[CutKey]
    source_format: str | None
    next_after: int | None
    """The segment after which the next page begins; None on the last one."""


def read_resume_page(
    document: Any,  # noqa: ANN401  # a JSON document
    run_id: str,
) -> ResumePage:
    """Return a page of what the collector holds.

    Raises:
        RetryLaterError: The document is of another form.
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
        source_format, following = document["source_format"], document.get("next")
        return ResumePage(
            end_rows=end_rows,
            unanswered=unanswered,
            source_format=None if source_format is None else str(source_format),
            next_after=None if following is None else int(following),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise RetryLaterError("the collector's answer does not tell what it holds") from None


def _refusal(answer: Answer) -> CollectorError:
    """Return what a refusal means; only the collector can say that it will never have something."""
    document = _document(answer)
    if not _is_a_collectors(answer):
        if answer.status != TOO_LARGE:
            return RetryLaterError(
                f"the address answers {answer.status}, and not as a collector does"
            )
        return RejectedError(TOO_LARGE, _reason(answer), is_of_collector=False)
    if answer.status == UNPROCESSABLE and document.get("supported"):
        return RetryLaterError(f"{_reason(answer)}", pause_s=TOKEN_PAUSE_S, is_of_run=True)
    return RejectedError(answer.status, _reason(answer))


def _is_a_collectors(answer: Answer) -> bool:
    """Tell a collector's own word from that of whatever else may answer at its address.

    A balancer or a gateway has no say in whether rows are given up.
    """
    document = _document(answer)
    return isinstance(document, dict) and "schema" in document


def _trouble(status: int) -> str:
    if status in PASSING_REFUSALS or status >= SERVER_ERROR:
        return f"the collector answers {status}"
    if MULTIPLE_CHOICES <= status < BAD_REQUEST:
        return f"the address answers with a redirect ({status}), which is not followed"
    return f"the address answers {status}: it is no collector of this version"


def _reason(answer: Answer) -> str:
    document = _document(answer)
    told: object = None
    if isinstance(document, dict):
        told = document.get("reason") or document.get("detail") or document.get("error")
    text = told if isinstance(told, str) else answer.body.decode("utf-8", "replace")
    visible = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(visible.split())[:MAX_REASON_LETTERS] or "no reason given"


def _document(answer: Answer) -> Any:  # noqa: ANN401  # a JSON document
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
