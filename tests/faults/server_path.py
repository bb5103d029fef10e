"""Data path onto a ClickHouse server that is killed and restarted while the collector runs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import Store, open_store
from tests.faults.cycles import COUNT_ROWS, RUN, TIMEOUT_S, WholePath
from tests.support.ports import fixed_port

ACCOUNT = "ann:secret"
OWN_TOKEN = re.compile(r"\?token=(\S+)")
REFUSED = re.compile(
    r'^rankscope_http_requests_total\{[^}]*route="/v1/[^}]*status="503"[^}]*\} ([0-9.e+]+)$',
    re.MULTILINE,
)


@dataclass(kw_only=True)
class ServerPath(WholePath):
    """A store, a collector, an agent, and ranks as traced processes.

    Args:
        max_spool_bytes: Limit of the agent.
    """

    max_spool_bytes: int | None = None
    ranks: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    _store_port: int = field(default_factory=fixed_port)

    @property
    def store_url(self) -> str:
        return f"clickhouse://{ACCOUNT}@127.0.0.1:{self._store_port}/default"

    def commands(self) -> dict[str, list[str]]:
        commands = super().commands()
        if self.max_spool_bytes is not None:
            # Not in the spool, because the size of the journal depends on the time.
            commands["agent"] += ["--state", str(self.folder / "agent-state")]
            commands["agent"] += ["--max-spool-bytes", str(self.max_spool_bytes)]
        engine = [sys.executable, "-m", "tests.faults.store_process"]
        return {"store": [*engine, str(self.store), ACCOUNT, str(self._store_port)], **commands}

    def start(self, name: str) -> None:
        super().start(name)
        if name == "store":
            self.wait_for(self.store_answers)

    def __exit__(self, *about: object) -> None:
        for process in self.ranks.values():
            process.kill()
            process.communicate()
        super().__exit__(*about)

    def start_rank(self, rank: int, **limits: str) -> None:
        """Start a traced process with limits of the tracer."""
        self.ranks[rank] = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.writing_rank", str(self.folder / "oracle")],
            env={
                **self._environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "8",
                "RANKSCOPE_TRACE": str(self.spool),
                "RANKSCOPE_RUN": RUN,
                **limits,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def record(self, rank: int, num_spans: int) -> int:
        """Record spans on a rank and return their total number."""
        process = self.ranks[rank]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{num_spans}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def end_rank(self, rank: int) -> None:
        """End a rank."""
        self.ranks[rank].communicate(timeout=TIMEOUT_S)
        assert self.ranks[rank].returncode == 0

    def store_answers(self) -> bool:
        """Return whether the store answers."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._store_port)):
            return True
        return False

    def num_stored(self) -> int:
        with suppress(StoreError), Store(self.store_url) as store:
            ((number,),) = (row.values() for row in store.rows(COUNT_ROWS))
            return int(number)
        return 0

    def num_refused(self) -> int:
        """Return the number of requests that the collector answered with 503."""
        *_, token = OWN_TOKEN.findall((self.folder / "collector.log").read_text())
        figures = self.ask("/metrics", Authorization=f"Bearer {token}") or ""
        return round(sum(float(found) for found in REFUSED.findall(figures)))

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query."""
        with open_store(self.store_url) as store:
            return list(store.rows(sql))
