"""Examination of this host when something happens to it: a start, a restart, a rank that fails, a
finding.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.collector.host.heartbeat import SILENT
from rankscope.collector.read.host_checks import (
    AGENT_START,
    FINDING,
    HEARTBEAT,
    JOB_START,
    RESTART,
)
from rankscope.collector.spool.descriptions import FAILED, LOST

from ..doctor.examination import examine_host
from ..doctor.host import Host
from ..doctor.stored import check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankscope.collector.host.heartbeat import Heartbeat
    from rankscope.collector.identity import Row

MIN_INTERVAL_S = 30.0
"""Least time between the begins of two examinations: what happens between them shares the next."""

ABNORMAL = frozenset({SILENT, FAILED, LOST})
URGENCY = (AGENT_START, JOB_START, RESTART, HEARTBEAT, FINDING)
"""Occasions, the one that an examination is stored under last."""

MAX_RUNS = 256
"""Ranks whose last state is remembered."""


class Occasion(NamedTuple):
    """Reason for an examination."""

    name: str
    run_id: str = ""
    epoch: int = -1
    pid: int | None = None
    """Process of a rank, whose variables and limits are examined."""


class HostWatch:
    """Examines this host on occasions, in a thread of its own.

    Args:
        add: Takes the rows of an examination.
        spool: Folder of the ranks' records.
        occasions: Occasions on which the host is examined.
        is_wanted: Returns whether an examination is wanted because of a finding.
        unix_ns: Clock of the rows.
        monotonic_s: Clock of the intervals.
        make_host: Returns the host, given the process of a rank.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        add: Callable[[Sequence[Row]], None],
        *,
        spool: Path,
        occasions: Sequence[str] = URGENCY,
        is_wanted: Callable[[], bool] = lambda: False,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda _line: None,
        make_host: Callable[..., Host] = Host,
    ) -> None:
        self._add = add
        self._spool = spool
        self._occasions = occasions
        self._is_wanted = is_wanted
        self._unix_ns = unix_ns
        self._monotonic_s = monotonic_s
        self._say = say
        self._make_host = make_host
        self._lock = threading.Lock()
        self._pending: Occasion | None = None
        self._states: dict[tuple[str, int], tuple[int, int, str]] = {}
        self._epochs: dict[str, int] = {}
        self._last: Occasion = Occasion(AGENT_START)
        self._begun_s: float | None = None
        self._request(Occasion(AGENT_START))

    def take(self, beats: Sequence[Heartbeat]) -> None:
        """Note the states of this host's ranks; one that turns abnormal is an occasion."""
        for beat in beats:
            known_epoch = self._epochs.get(beat.run_id)
            if known_epoch is None or beat.epoch > known_epoch:
                self._epochs[beat.run_id] = beat.epoch
                name = JOB_START if known_epoch is None else RESTART
                self._request(Occasion(name, beat.run_id, beat.epoch, beat.pid))
            key = (beat.run_id, beat.rank)
            before = self._states.get(key)
            now = (beat.epoch, beat.pid, beat.state)
            is_new_process = before is not None and before[:2] != now[:2]
            if is_new_process and before is not None and before[0] == beat.epoch:
                self._request(Occasion(RESTART, beat.run_id, beat.epoch, beat.pid))
            if beat.state in ABNORMAL and (before is None or before != now):
                self._request(Occasion(HEARTBEAT, beat.run_id, beat.epoch, beat.pid))
            self._states.pop(key, None)
            self._states[key] = now
            while len(self._states) > MAX_RUNS:
                self._states.pop(next(iter(self._states)))
            while len(self._epochs) > MAX_RUNS:
                self._epochs.pop(next(iter(self._epochs)))

    def take_answer(self, document: Any) -> None:  # noqa: ANN401  # a JSON document
        """Note the answer of a collector to heartbeats, which may ask for an examination."""
        hosts = document.get("to_examine") if isinstance(document, dict) else None
        if isinstance(hosts, list) and Host().name in hosts:
            self.request_for_finding()

    def request_for_finding(self) -> None:
        """Note that a finding names this host."""
        self._request(Occasion(FINDING, *self._last[1:]))

    def turn(self) -> None:
        """Examine the host if there is an occasion, and the last examination is long enough ago."""
        now_s = self._monotonic_s()
        if self._begun_s is not None and now_s - self._begun_s < MIN_INTERVAL_S:
            return
        if self._is_wanted():
            self.request_for_finding()
        with self._lock:
            occasion, self._pending = self._pending, None
        if occasion is not None:
            self._begun_s = now_s
            self._examine(occasion)

    def examine_for_finding(self) -> None:
        """Examine the host now, because a finding names it. Not while the loop runs."""
        self._examine(Occasion(FINDING, *self._last[1:]))

    def _examine(self, occasion: Occasion) -> None:
        at_ns = self._unix_ns()
        host = self._make_host(spool=self._spool, process=occasion.pid)
        results = examine_host(host)
        rows = check_rows(
            results,
            host=host.name,
            at_ns=at_ns,
            occasion=occasion.name,
            run_id=occasion.run_id,
            epoch=occasion.epoch,
        )
        try:
            self._add(rows)
        except Exception:
            self._request(occasion)
            raise
        num = sum(result.is_deviation for result in results)
        self._say(f"examined this host ({occasion.name}): {num} warnings and errors")

    def _request(self, occasion: Occasion) -> None:
        with self._lock:
            if occasion.run_id:
                self._last = occasion
            if occasion.name not in self._occasions:
                return
            pending = self._pending
            if pending is None or URGENCY.index(occasion.name) >= URGENCY.index(pending.name):
                self._pending = occasion
