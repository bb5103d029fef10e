"""Kill cycles: the whole data path as processes, which are killed at random while ranks write.

A seed determines the order of faults. The test process writes rows into the spools of three ranks,
each recorded in the oracle first; `rankscope agent` sends them to `rankscope serve --only
collector`.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store
from tests.faults.checker import Oracle, check, content_hash, key_of
from tests.integration.programs import COMMAND, environment
from tests.support.collector.agent_rig import write_spans
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.faults.checker import Key, Verdict

RUN = "run"
NUM_RANKS = 3
ROWS_A_BURST = 100
TIMEOUT_S = 120.0
ANSWER_S = 60.0
"""Timeout for a frozen collector; a killed one closes its connections."""

MOST_WAIT_S = 0.6
"""Longest time of a cycle before its fault, so that faults hit every moment of a batch."""

WAITED_SHARE = 0.5
"""Timeout for the start of a killed collector before the next fault."""

COUNT_ROWS = "SELECT count() FROM (SELECT DISTINCT epoch, rank, segment, row FROM spans)"
SELECT_ROWS = """
SELECT run_id, epoch, rank, segment, row, name, step, duration_ns FROM spans{final}
"""


@dataclass(kw_only=True)
class WholePath:
    """An agent, a collector, and the spools of three ranks."""

    folder: Path
    chooser: random.Random
    rows_a_burst: int = ROWS_A_BURST
    faults: list[str] = field(default_factory=list)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _builders: list[SpoolBuilder] = field(default_factory=list)
    port: int = 0
    _is_first: bool = True

    def __enter__(self) -> Self:
        self.spool.mkdir(parents=True)
        self.port = fixed_port()
        made = subprocess.run(
            [*COMMAND, "token", "create", "--role", "ingest", "--holder", "cycles",
             "--out", str(self.folder / "agent.token")],
            env=self._environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        self.oracle = Oracle(self.folder / "oracle", is_synced=False)
        for name in self.commands():
            self.start(name)
            if name == "collector":
                self.wait_for(self.is_ready)
        return self

    def __exit__(self, *about: object) -> None:
        self.end_all()
        self.oracle.__exit__(*about)

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def store_url(self) -> str:
        return f"chdb://{self.store}"

    @property
    def _environment(self) -> dict[str, str]:
        return environment(
            self.store,
            RANKSCOPE_STORE=self.store_url,
            RANKSCOPE_TOKEN_FILE=str(self.folder / "agent.token"),
            PYTHONUNBUFFERED="1",
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def commands(self) -> dict[str, list[str]]:
        """Return the commands of the processes, in the order of their start."""
        return {
            "collector": [*COMMAND, "serve", "--only", "collector", "--port", str(self.port)],
            "agent": [
                *COMMAND, "agent", "--spool", str(self.spool), "--state", str(self.state),
                "--no-samples", "--collector", self.url,
            ],
        }  # fmt: skip

    def start(self, name: str) -> None:
        """Start a process."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self.commands()[name], env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL and start it again.

        Half of the collectors are killed again while they start.
        """
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait(TIMEOUT_S)
        self.start(name)
        if name == "collector" and self.chooser.random() < WAITED_SHARE:
            self.wait_for(self.is_ready)

    def kill_only(self, name: str) -> None:
        """Kill a process and do not start it again."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(TIMEOUT_S)

    def pid_of(self, name: str) -> int:
        """Return the id of a process, 0 if it does not run."""
        process = self._processes.get(name)
        return 0 if process is None else process.pid

    def freeze(self, seconds: float) -> None:
        """Freeze the collector for some time: connections stay open without an answer."""
        self._processes["collector"].send_signal(signal.SIGSTOP)
        try:
            self.write()
            time.sleep(seconds)
        finally:
            self._processes["collector"].send_signal(signal.SIGCONT)

    def end(self, name: str) -> None:
        """Terminate a process and wait for its end."""
        process = self._processes.get(name)
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    def end_all(self) -> None:
        """Terminate all processes, the first one last."""
        for name in reversed(self.commands()):
            self.end(name)

    def cycle(self) -> None:
        """Write, wait for a moment, and cause one of the faults."""
        self.write()
        time.sleep(self.chooser.uniform(0.0, MOST_WAIT_S))
        fault = self.chooser.choice(sorted(FAULTS))
        self.faults.append(fault)
        FAULTS[fault](self)

    def write(self) -> None:
        """Write a burst for each rank."""
        if not self._builders:
            self._builders = self.begin_ranks()
        for builder in self._builders:
            write_spans(builder, self.oracle, self.rows_a_burst, chooser=self.chooser)

    def begin_ranks(self) -> list[SpoolBuilder]:
        """Return the writers of the spools."""
        return [SpoolBuilder(self.spool, run_id=RUN, rank=rank) for rank in range(NUM_RANKS)]

    def drain(self) -> float:
        """End the ranks, wait until all rows are stored, and return the seconds."""
        for builder in self._builders:
            builder.end()
        began_s = time.monotonic()
        with (self.folder / "oracle").open("rb") as lines:
            num_written = sum(b'"attempt"' in line for line in lines)
        self.wait_for(lambda: self.num_stored() >= num_written)
        return time.monotonic() - began_s

    def verdict(self) -> Verdict:
        """End the writers and compare the written rows with the stored ones."""
        for name in reversed(self.commands()):
            if name != "store":
                self.end(name)
        with open_store(self.store_url) as store:
            final = " FINAL" if read_stored_spans(store, RUN).has_repeated else ""
            rows = store.rows(SELECT_ROWS.format(final=final))
        return check(self.folder / "oracle", [seen_row(row) for row in rows])

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Poll until a condition holds; fail with the logs after a timeout."""
        until_s = time.monotonic() + TIMEOUT_S
        while not is_done():
            assert time.monotonic() < until_s, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the logs of the processes and the list of faults."""
        logs = [
            (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
            for name in self.commands()
            if (self.folder / f"{name}.log").exists()
        ]
        return "\n".join([", ".join(self.faults), *logs])

    def is_ready(self) -> bool:
        """Return whether the collector accepts rows."""
        assert self._processes["collector"].poll() is None, self.logs()
        return self.ask("/readyz") is not None

    def num_stored(self) -> int:
        """Return the number of rows that a query returns."""
        server = read_server_file(self.store)
        if server is None or server.token is None:
            return 0
        answer = self.ask("/", COUNT_ROWS, **{"X-ClickHouse-Key": server.token})
        return int(answer) if answer else 0

    def ask(self, path: str, body: str | None = None, **headers: str) -> str | None:
        """Query the collector; None if it does not answer or refuses."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else body.encode(),
            headers=headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, OSError):
            return None


def _kill_both(path: WholePath) -> None:
    path.kill("agent")
    path.kill("collector")


FAULTS: dict[str, Callable[[WholePath], None]] = {
    "agent killed": lambda path: path.kill("agent"),
    "collector killed": lambda path: path.kill("collector"),
    "both killed": _kill_both,
    "collector frozen": lambda path: path.freeze(path.chooser.uniform(0.2, 2.0)),
}


def seen_row(row: Mapping[str, object]) -> tuple[Key, str]:
    """Return the key of a row of `SELECT_ROWS` and the hash of its content."""
    key = key_of(*(row[name] for name in ("run_id", "epoch", "rank", "segment", "row")))
    return key, content_hash(row["name"], row["step"], row["duration_ns"])


def main() -> None:
    """Run cycles and print the result: ``python -m tests.faults.cycles FOLDER NUM SEED``."""
    from pathlib import Path

    folder, num_cycles, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    began_s = time.monotonic()
    with WholePath(folder=folder, chooser=random.Random(seed)) as path:
        for number in range(num_cycles):
            path.cycle()
            if number % 10 == 9:
                sys.stderr.write(f"{number + 1} of {num_cycles}\n")
        drained_s = path.drain()
        verdict = path.verdict()
    counts = {fault: path.faults.count(fault) for fault in sorted(FAULTS)}
    sys.stdout.write(
        f"seed {seed}, {num_cycles} cycles in {time.monotonic() - began_s:.0f} s: {counts}\n"
        f"drained {drained_s:.1f} s after the last fault\n"
        f"stored {verdict.num_stored}, lost {len(verdict.lost)}, doubled"
        f" {len(verdict.duplicated)}, invented {len(verdict.unexpected)}, changed"
        f" {len(verdict.corrupt)}, unaccounted {verdict.num_unaccounted}\n"
    )
    sys.exit(0 if verdict.is_clean else 1)


if __name__ == "__main__":
    main()
