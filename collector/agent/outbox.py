"""The sink that ships to a collector; a cut is noted before it leaves for the first time."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..spool.cut import Resume
from ..wire.codec import encode_cuts
from ..wire.schema import SCHEMA_VERSION
from .answers import (
    CONFLICT,
    DELETED,
    SETTLED_STATES,
    accepted,
    check_stored_rows,
    read_cut_states,
    read_resume_page,
)
from .errors import JournalError, LinkError, RejectedError, RetryLaterError, RunGoneError
from .journal import sync_folder, write_durably

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..identity import Row
    from ..spool.cut import Cut, CutKey
    from .answers import ResumePage
    from .journal import Journal
    from .link import Link
    from .retry import Delivery

ARROW_STREAM = "application/vnd.apache.arrow.stream"
JSON = "application/json"

MAX_CUTS = 400
"""Of one request: the answer has a line for each and must stay below 64 KiB."""

MAX_ROWS = 131_072
"""Of one request: some 14 MB before compression."""

MIN_ROWS = 1_024
MAX_DESCRIPTIONS = 1_000
MAX_SAMPLES = 10_000
"""Of one request; samples are short. What an outage left of them goes in ten."""

MAX_RANKS = 1_000
"""Asked for by name; a host has fewer."""

MAX_PAGES = 10_000
"""Of 300 segments each."""

RUN_DELETED = "run-deleted"
REFUSED = "refused"
"""Reasons under which `ranks.dropped` counts rows."""

MAX_PARKED_BYTES = 256 << 20

MAX_PARKED_FILES = 10_000

HEARTBEAT_PERIOD_S = 10.0
"""Between two requests; each has one row a rank and second. One a second and host would be more
inserts than a collector of thousands of hosts can do."""

MAX_HEARTBEATS = 10_000
"""That wait: some 10 MB, and some 20 minutes of eight ranks."""

HEARTBEATS_PER_REQUEST = 1_000

NOT_FOUND = 404


class Outbox:
    """A `collector.spool.cut.Sink` over HTTP.

    A call that raises `RetryLaterError` has lost nothing: the same cuts may be given again, and
    those that were confirmed meanwhile are not sent twice.

    Args:
        link: To the collector.
        journal: What was promised before.
        delivery: Deals with refusals.
        dead_letters: Keeps what is refused for good.
        say: Tells a line to whoever watches the agent.
        ranks_of: Returns the ranks of a run on this host.
    """

    def __init__(
        self,
        link: Link,
        journal: Journal,
        *,
        delivery: Delivery,
        dead_letters: DeadLetters,
        say: Callable[[str], None],
        ranks_of: Callable[[str], list[int]] = lambda _run_id: [],
    ) -> None:
        self._ranks_of = ranks_of
        self._link = link
        self._journal = journal
        self._delivery = delivery
        self._dead_letters = dead_letters
        self._say = say
        self._max_rows = MAX_ROWS
        self._deleted: set[str] = set()
        self.num_rows_settled = 0
        """Rows of cuts that the collector confirmed."""

    def token_text(self) -> str | None:
        """Return the token as it is now; None where there is none that can be read."""
        try:
            token = self._link.token()
        except RetryLaterError:
            return None
        return None if token is None else token.text

    def sent_token_text(self) -> str | None:
        """Return the token that the last request went out with; None where it had none."""
        token = self._link.sent_token
        return None if token is None else token.text

    def resume(self, run_id: str) -> Resume:
        """Return what the journal and the collector hold of the run's ranks on this host."""
        pages = self._held_pages(run_id)
        held = {segment: row for page in pages for segment, row in page.end_rows.items()}
        unanswered = [key for page in pages for key in page.unanswered]
        noted = self._journal.end_rows(run_id)
        end_rows = {
            segment: max(held.get(segment, 0), noted.get(segment, 0))
            for segment in held.keys() | noted.keys()
        }
        own = self._journal.unanswered(run_id)
        return Resume(
            end_rows=end_rows,
            unanswered=own + tuple(key for key in unanswered if key not in set(own)),
            source_format=pages[-1].source_format if pages else None,
            dropped=self._journal.dropped(run_id),
        )

    def _held_pages(self, run_id: str) -> list[ResumePage]:
        """Return what the collector holds; nothing where the run was deleted there."""
        ranks = self._ranks_of(run_id)[:MAX_RANKS]
        asked = [("run_id", run_id), *(("rank", str(rank)) for rank in ranks)]
        pages: list[ResumePage] = []
        after: int | None = 0
        while after is not None and len(pages) < MAX_PAGES:
            query = urlencode([*asked, ("after", str(after))])
            try:
                document = accepted(self._link.get(f"/v1/resume?{query}"))
            except RunGoneError:
                self._tell_deleted(run_id)
                break
            pages.append(read_resume_page(document, run_id))
            after = pages[-1].next_after
        return pages

    def clocks(self) -> list[Row]:
        """Return nothing: an agent ties its host's clock itself."""
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Send descriptions; returns when the collector has them on disk."""

        def post(some: Sequence[Row]) -> None:
            document = {"schema": SCHEMA_VERSION, "rows": list(some)}
            body = json.dumps(document).encode()
            try:
                answer = accepted(self._link.post(f"/v1/rows/{table}", body, content_type=JSON))
                check_stored_rows(answer, len(some))
            except RunGoneError:
                self._tell_deleted(str(some[0].get("run_id")))

        def park(row: Row, refusal: RejectedError) -> None:
            body = json.dumps(row).encode()
            self._park(
                f"{table}-{hashlib.sha256(body).hexdigest()[:16]}", body, refusal, {"table": table}
            )

        most = MAX_SAMPLES if table == "samples" else MAX_DESCRIPTIONS
        for first in range(0, len(rows), most):
            self._delivery.deliver(rows[first : first + most], post=post, park=park)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Send cuts, noted first; returns when each is stored, or set aside for good."""
        todo = [cut for cut in cuts if not self._journal.is_settled(cut.key)]
        self._journal.add_sent(todo)
        for batch in self._batches(todo):
            self._delivery.deliver(batch, post=self._post_cuts, park=self._park_cut)

    def _batches(self, cuts: Sequence[Cut]) -> Iterator[list[Cut]]:
        batch: list[Cut] = []
        num_rows = 0
        for cut in cuts:
            more = _num_rows(cut.key)
            if batch and (num_rows + more > self._max_rows or len(batch) >= MAX_CUTS):
                yield batch
                batch, num_rows = [], 0
            batch.append(cut)
            num_rows += more
        if batch:
            yield batch

    def _post_cuts(self, cuts: Sequence[Cut]) -> None:
        try:
            answer = self._link.post("/v1/spans", encode_cuts(cuts), content_type=ARROW_STREAM)
        except LinkError as error:
            if error.is_late:
                self._max_rows = max(self._max_rows // 2, MIN_ROWS)
            raise
        try:
            states = read_cut_states(accepted(answer), cuts)
        except RunGoneError:
            self._give_up_deleted(cuts)
            return
        pairs = list(zip(cuts, states, strict=True))
        arrived = [cut.key for cut, state in pairs if state in SETTLED_STATES]
        self._journal.settle(arrived)
        self.num_rows_settled += sum(map(_num_rows, arrived))
        self._max_rows = min(2 * self._max_rows, MAX_ROWS)
        if deleted := [cut for cut, state in pairs if state == DELETED]:
            self._give_up_deleted(deleted)
        for cut, state in pairs:
            if state == CONFLICT:
                self._park_cut(cut, RejectedError(409, "stored before with another content"))

    def _park_cut(self, cut: Cut, refusal: RejectedError) -> None:
        key = cut.key
        name = f"{key.segment:016x}-{key.first_row}-{key.end_row}"
        document = {
            "run_id": key.run_id,
            "epoch": key.epoch,
            "rank": key.rank,
            "process": key.process,
            "sha256": cut.sha256,
        }
        self._park(name, encode_cuts([cut]), refusal, document)
        self._journal.drop(key, reason=REFUSED, num_rows=_num_records(cut))

    def _park(
        self, name: str, body: bytes, refusal: RejectedError, document: Mapping[str, object]
    ) -> None:
        told = {**document, "status": refusal.status, "reason": refusal.reason}
        self._dead_letters.park(name, body, told)
        self._say(
            f"the collector refuses a batch ({refusal}): it lies in {self._dead_letters.folder}"
        )

    def _give_up_deleted(self, cuts: Sequence[Cut]) -> None:
        self._tell_deleted(cuts[0].key.run_id)
        for cut in cuts:
            self._journal.drop(cut.key, reason=RUN_DELETED, num_rows=_num_records(cut))

    def _tell_deleted(self, run_id: str) -> None:
        if run_id not in self._deleted:
            self._deleted.add(run_id)
            self._say(f"run {run_id} was deleted at the collector: nothing more of it is sent")


def _num_rows(key: CutKey) -> int:
    return key.end_row - key.first_row


def _num_records(cut: Cut) -> int:
    """Return the rows that the process committed: torn ones were never produced."""
    return _num_rows(cut.key) - cut.num_torn


class DeadLetters:
    """A folder with a file of bytes and a file of reasons for each batch.

    Args:
        folder: Made when the first batch comes.
        max_bytes: Of all bodies together; beyond it only the reasons are kept.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_PARKED_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def park(self, name: str, body: bytes, document: dict[str, Any]) -> None:
        """Keep a batch; returns once it is on disk.

        Args:
            name: Of the two files, without their endings.
            body: What was refused, as it was sent.
            document: Who, what and why.

        Raises:
            JournalError: It can't be kept.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            num_files, num_bytes = self._used()
            is_kept = num_bytes + len(body) <= self._max_bytes and num_files < MAX_PARKED_FILES
            if is_kept:
                write_durably(self.folder / f"{name}.body", body)
            if num_files < MAX_PARKED_FILES:
                told = json.dumps({**document, "is_body_kept": is_kept}, indent=1)
                write_durably(self.folder / f"{name}.json", told.encode())
            sync_folder(self.folder)
        except OSError as error:
            raise JournalError(
                f"{self.folder} can't be written ({error.strerror or error}): a batch that the"
                " collector refuses waits until it can"
            ) from error

    def _used(self) -> tuple[int, int]:
        sizes = [entry.stat().st_size for entry in os.scandir(self.folder)]
        return len(sizes), sum(sizes)


class HeartbeatSender:
    """Posts heartbeats, each run's on its own: one that the collector refuses costs no other's.

    Args:
        link: To the collector.
        say: Tells a line to whoever watches the agent.
    """

    def __init__(self, link: Link, *, say: Callable[[str], None]) -> None:
        self._link = link
        self._say = say
        self._told: set[str] = set()
        self.num_refused = 0
        """Heartbeats that the collector would not have."""

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows; return when they are stored or refused.

        Raises:
            RetryLaterError: The collector takes nothing just now; the same rows may be given again.
        """
        by_run: dict[str, list[Row]] = {}
        for row in rows:
            by_run.setdefault(row["run_id"], []).append(row)
        for run_id, of_run in by_run.items():
            self._send_run(run_id, of_run)

    def _send_run(self, run_id: str, rows: list[Row]) -> None:
        body = json.dumps({"schema": SCHEMA_VERSION, "rows": rows}).encode()
        answer = self._link.post("/v1/rows/heartbeats", body, content_type="application/json")
        if answer.status == NOT_FOUND:
            self._refuse(rows, "the collector is older than this agent and takes no heartbeats")
            return
        try:
            check_stored_rows(accepted(answer), len(rows))
        except RunGoneError:
            self.num_refused += len(rows)  # whoever ships the run's spans tells that it is gone
        except RejectedError as error:
            self._refuse(rows, f"heartbeats of run {run_id} are refused: {error}")
        except RetryLaterError as error:
            if not error.is_of_run:
                raise
            self._refuse(rows, f"heartbeats of run {run_id} are refused: {error.reason}")

    def _refuse(self, rows: list[Row], line: str) -> None:
        self.num_refused += len(rows)
        if line not in self._told:
            self._told.add(line)
            self._say(line)
