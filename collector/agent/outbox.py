"""Outbox: sends cuts, descriptions and heartbeats to a collector, and keeps dead letters.

A cut is in the journal before it is sent for the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..spool.cut import Placement, Resume
from ..wire.codec import encode_cuts
from ..wire.schema import SCHEMA_VERSION
from .answers import (
    CONFLICT,
    DELETED,
    SETTLED_STATES,
    check_stored_rows,
    is_from_collector,
    read_accepted,
    read_cut_states,
    read_placements,
    read_requests,
    read_resume_page,
)
from .errors import JournalError, LinkError, RejectedError, RetryLaterError, RunGoneError
from .journal import sync_folder, write_durably

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..identity import Row
    from ..spool.control import ControlRequest
    from ..spool.cut import Cut, CutKey, ProcessFacts
    from .answers import ResumePage
    from .journal import Journal
    from .link import Link
    from .retry import Delivery

ARROW_STREAM = "application/vnd.apache.arrow.stream"
JSON = "application/json"

# Limits of one request.
MAX_CUTS = 400
"""The answer has one line per cut and must stay below 64 KiB."""

MAX_ROWS = 131_072
"""Some 14 MB before compression."""

MIN_ROWS = 1_024
MAX_DESCRIPTIONS = 1_000
MAX_SAMPLES = 10_000
"""Samples are short. The rows that wait after an outage take ten requests."""

MAX_RANKS = 1_000
"""Ranks in the query of a resume; a host has fewer."""

MAX_PAGES = 10_000
"""Pages of a resume, of 300 segments each."""

RUN_DELETED = "run-deleted"
REFUSED = "refused"
"""Reasons in `ranks.dropped`."""

MAX_PLACEMENTS = 100
"""Processes in one question: the answer fits in the 64 KiB that the agent reads."""

MAX_DEAD_LETTER_BYTES = 256 << 20
"""Limit of all bodies together; beyond it only reasons are kept."""

MAX_DEAD_LETTER_FILES = 10_000


class Outbox:
    """A `collector.spool.cut.Sink` that sends over HTTP.

    If a call raises `RetryLaterError`, nothing is lost: the same cuts may be passed again, and
    those that were acknowledged are not sent twice.

    Args:
        journal: Cuts that were sent before.
        find_ranks: Returns the ranks of a run on this host.
    """

    def __init__(
        self,
        link: Link,
        journal: Journal,
        *,
        delivery: Delivery,
        dead_letters: DeadLetters,
        say: Callable[[str], None],
        find_ranks: Callable[[str], list[int]] = lambda _run_id: [],
    ) -> None:
        self._find_ranks = find_ranks
        self._link = link
        self._journal = journal
        self._delivery = delivery
        self._dead_letters = dead_letters
        self._say = say
        self._max_rows = MAX_ROWS
        self._deleted_runs: set[str] = set()

    def token_text(self) -> str | None:
        """Return the current token; None if there is none or it can't be read."""
        try:
            token = self._link.token()
        except RetryLaterError:
            return None
        return None if token is None else token.text

    def sent_token_text(self) -> str | None:
        """Return the token of the last request; None if it had none."""
        token = self._link.sent_token
        return None if token is None else token.text

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        """Ask the collector where each process is stored."""
        placements: dict[str, Placement | None] = {}

        def place_as_declared(facts: ProcessFacts) -> None:
            placements[facts.process] = Placement(run_id=facts.run_id, epoch=facts.epoch)

        def post(batch: Sequence[ProcessFacts]) -> None:
            document = {"schema": SCHEMA_VERSION, "rows": [asdict(facts) for facts in batch]}
            body = json.dumps(document).encode()
            answer = self._link.post("/v1/rows/processes", body, content_type=JSON)
            is_unknown = answer.status == HTTPStatus.NOT_FOUND and is_from_collector(answer)
            answered = None if is_unknown else read_placements(read_accepted(answer), len(batch))
            if answered is None:  # an older collector
                for facts in batch:
                    place_as_declared(facts)
            else:
                placements.update(zip((facts.process for facts in batch), answered, strict=True))

        def give_up(facts: ProcessFacts, _rejection: RejectedError) -> None:
            place_as_declared(facts)  # its rows will be rejected, and kept as dead letters

        for first in range(0, len(processes), MAX_PLACEMENTS):
            part = processes[first : first + MAX_PLACEMENTS]
            self._delivery.deliver(part, post=post, give_up=give_up)
        return [placements[facts.process] for facts in processes]

    def resume(self, run_id: str) -> Resume:
        """Return what the journal and the collector know of the run's ranks on this host."""
        pages = self._resume_pages(run_id)
        stored = {segment: row for page in pages for segment, row in page.end_rows.items()}
        unanswered = [key for page in pages for key in page.unanswered]
        settled = self._journal.end_rows(run_id)
        end_rows = {
            segment: max(stored.get(segment, 0), settled.get(segment, 0))
            for segment in stored.keys() | settled.keys()
        }
        sent_before = self._journal.unanswered(run_id)
        return Resume(
            end_rows=end_rows,
            unanswered=sent_before
            + tuple(key for key in unanswered if key not in set(sent_before)),
            source_format=pages[-1].source_format if pages else None,
            dropped=self._journal.dropped(run_id),
        )

    def _resume_pages(self, run_id: str) -> list[ResumePage]:
        """Return what the collector has stored; an empty list if the run was deleted there."""
        ranks = self._find_ranks(run_id)[:MAX_RANKS]
        query = [("run_id", run_id), *(("rank", str(rank)) for rank in ranks)]
        pages: list[ResumePage] = []
        after: int | None = 0
        while after is not None and len(pages) < MAX_PAGES:
            path = f"/v1/resume?{urlencode([*query, ('after', str(after))])}"
            try:
                document = read_accepted(self._link.get(path))
            except RunGoneError:
                self._report_deleted(run_id)
                break
            pages.append(read_resume_page(document, run_id))
            after = pages[-1].next_after
        return pages

    def clocks(self) -> list[Row]:
        """Return nothing: an agent aligns its host's clock itself."""
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Send descriptions; return when the collector has stored them durably."""

        def post(batch: Sequence[Row]) -> None:
            document = {"schema": SCHEMA_VERSION, "rows": list(batch)}
            body = json.dumps(document).encode()
            try:
                answer = self._link.post(f"/v1/rows/{table}", body, content_type=JSON)
                check_stored_rows(read_accepted(answer), len(batch))
            except RunGoneError:
                self._report_deleted(str(batch[0].get("run_id")))

        def give_up(row: Row, rejection: RejectedError) -> None:
            body = json.dumps(row).encode()
            name = f"{table}-{hashlib.sha256(body).hexdigest()[:16]}"
            self._add_dead_letter(name, body, rejection, {"table": table})

        step = MAX_SAMPLES if table == "samples" else MAX_DESCRIPTIONS
        for first in range(0, len(rows), step):
            self._delivery.deliver(rows[first : first + step], post=post, give_up=give_up)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Send cuts; return when each is stored or given up."""
        todo = [cut for cut in cuts if not self._journal.is_settled(cut.key)]
        self._journal.add_sent(todo)
        for batch in cut_batches(todo, max_rows=self._max_rows):
            self._delivery.deliver(batch, post=self._post_cuts, give_up=self._give_up_cut)

    def _post_cuts(self, cuts: Sequence[Cut]) -> None:
        try:
            answer = self._link.post("/v1/spans", encode_cuts(cuts), content_type=ARROW_STREAM)
        except LinkError as error:
            if error.is_late:
                self._max_rows = max(self._max_rows // 2, MIN_ROWS)
            raise
        try:
            states = read_cut_states(read_accepted(answer), cuts)
        except RunGoneError:
            self._drop_deleted(cuts)
            return
        pairs = list(zip(cuts, states, strict=True))
        self._journal.settle(cut.key for cut, state in pairs if state in SETTLED_STATES)
        self._max_rows = min(2 * self._max_rows, MAX_ROWS)
        if deleted := [cut for cut, state in pairs if state == DELETED]:
            self._drop_deleted(deleted)
        for cut, state in pairs:
            if state == CONFLICT:
                self._give_up_cut(cut, RejectedError(409, "stored before with other content"))

    def _give_up_cut(self, cut: Cut, rejection: RejectedError) -> None:
        key = cut.key
        name = f"{key.segment:016x}-{key.first_row}-{key.end_row}"
        document = {
            "run_id": key.run_id,
            "epoch": key.epoch,
            "rank": key.rank,
            "process": key.process,
            "sha256": cut.sha256,
        }
        self._add_dead_letter(name, encode_cuts([cut]), rejection, document)
        self._journal.drop({key: _num_committed(cut)}, reason=REFUSED)

    def _add_dead_letter(
        self, name: str, body: bytes, rejection: RejectedError, document: Mapping[str, object]
    ) -> None:
        full = {**document, "status": rejection.status, "reason": rejection.reason}
        self._dead_letters.add(name, body, full)
        folder = self._dead_letters.folder
        self._say(f"the collector rejects a batch ({rejection}): it is kept in {folder}")

    def _drop_deleted(self, cuts: Sequence[Cut]) -> None:
        self._report_deleted(cuts[0].key.run_id)
        self._journal.drop({cut.key: _num_committed(cut) for cut in cuts}, reason=RUN_DELETED)

    def _report_deleted(self, run_id: str) -> None:
        if run_id not in self._deleted_runs:
            self._deleted_runs.add(run_id)
            self._say(f"run {run_id} was deleted at the collector: nothing more of it is sent")


def cut_batches(cuts: Sequence[Cut], *, max_rows: int) -> Iterator[list[Cut]]:
    """Yield cuts in order, as many in a request as it may have; a larger cut alone."""
    batch: list[Cut] = []
    num_rows = 0
    for cut in cuts:
        more = _num_rows(cut.key)
        if batch and (num_rows + more > max_rows or len(batch) >= MAX_CUTS):
            yield batch
            batch, num_rows = [], 0
        batch.append(cut)
        num_rows += more
    if batch:
        yield batch


def _num_rows(key: CutKey) -> int:
    return key.end_row - key.first_row


def _num_committed(cut: Cut) -> int:
    """Return the number of committed rows; torn ones were never produced."""
    return _num_rows(cut.key) - cut.num_torn


class DeadLetters:
    """A folder with two files for each rejected batch: its body, and the reason.

    Args:
        folder: Created with the first batch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, body: bytes, document: dict[str, Any]) -> None:
        """Keep a batch; return once it is on disk.

        Args:
            name: Name of the two files, without suffix.
            body: The rejected body, unchanged.
            document: Identity of the batch, with status and reason.

        Raises:
            JournalError: The folder can't be written.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            sizes = [entry.stat().st_size for entry in os.scandir(self.folder)]
            has_place = len(sizes) < MAX_DEAD_LETTER_FILES
            is_kept = has_place and sum(sizes) + len(body) <= MAX_DEAD_LETTER_BYTES
            if is_kept:
                write_durably(self.folder / f"{name}.body", body)
            if has_place:
                text = json.dumps({**document, "is_body_kept": is_kept}, indent=1)
                write_durably(self.folder / f"{name}.json", text.encode())
            sync_folder(self.folder)
        except OSError as error:
            raise JournalError(
                f"{self.folder} can't be written ({error.strerror or error}): a rejected batch"
                " waits until it can"
            ) from error


class RunRowSender:
    """Sends rows of a table, those of each run in their own request; rejected ones are dropped.

    For rows that are worthless when they are late, and of which none becomes a dead letter.

    Args:
        on_answer: Takes the document of each answer that accepts rows.
    """

    def __init__(
        self,
        link: Link,
        *,
        say: Callable[[str], None],
        table: str = "heartbeats",
        on_answer: Callable[[Any], None] = lambda _document: None,
    ) -> None:
        self._link = link
        self._say = say
        self._table = table
        self._on_answer = on_answer
        self._logged: set[str] = set()
        self.num_rejected = 0
        """Rows that the collector rejected."""

    def send(self, rows: Sequence[Row]) -> list[ControlRequest]:
        """Send rows; return when they are stored or rejected, with the requests to these ranks.

        Raises:
            RetryLaterError: The collector is not available; the same rows may be passed again.
        """
        by_run: dict[str, list[Row]] = {}
        for row in rows:
            by_run.setdefault(row.get("run_id", ""), []).append(row)
        return [
            request
            for run_id, run_rows in by_run.items()
            for request in self._send_run(run_id, run_rows)
        ]

    def _send_run(self, run_id: str, rows: list[Row]) -> list[ControlRequest]:
        body = json.dumps({"schema": SCHEMA_VERSION, "rows": rows}).encode()
        answer = self._link.post(f"/v1/rows/{self._table}", body, content_type=JSON)
        name = self._table.replace("_", " ")
        if answer.status == HTTPStatus.NOT_FOUND:
            self._drop(rows, f"the collector is older than this agent and takes no {name}")
            return []
        try:
            document = read_accepted(answer)
            check_stored_rows(document, len(rows))
            self._on_answer(document)
            return read_requests(document, run_id)
        except RunGoneError:
            self.num_rejected += len(rows)  # the outbox reports that the run was deleted
        except RejectedError as error:
            self._drop(rows, f"{name} of run {run_id} are rejected: {error}")
        except RetryLaterError as error:
            if not error.is_run_only:
                raise
            self._drop(rows, f"{name} of run {run_id} are rejected: {error.reason}")
        return []

    def _drop(self, rows: list[Row], reason: str) -> None:
        self.num_rejected += len(rows)
        if reason not in self._logged:
            self._logged.add(reason)
            self._say(reason)
