"""Ship heartbeats: they are of use now, so what is refused is dropped and not kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..wire.schema import SCHEMA_VERSION
from .answers import GoneError, RefusedError, accepted, check_num_rows
from .errors import HeldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from .link import Link

EVERY_S = 10.0
"""Between two requests; each has one row a rank and second. One a second and host would be more
inserts than a collector of thousands of hosts can do."""

MAX_BEATS = 10_000
"""That wait: some 10 MB, and some 20 minutes of eight ranks."""

NUM_AT_ONCE = 1_000
NOT_FOUND = 404


class BeatShipper:
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
            HeldError: The collector takes nothing just now; the same rows may be given again.
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
            check_num_rows(accepted(answer), len(rows))
        except GoneError:
            self.num_refused += len(rows)  # whoever ships the run's spans tells that it is gone
        except RefusedError as error:
            self._refuse(rows, f"heartbeats of run {run_id} are refused: {error}")
        except HeldError as error:
            if not error.is_of_run:
                raise
            self._refuse(rows, f"heartbeats of run {run_id} are refused: {error.reason}")

    def _refuse(self, rows: list[Row], line: str) -> None:
        self.num_refused += len(rows)
        if line not in self._told:
            self._told.add(line)
            self._say(line)
