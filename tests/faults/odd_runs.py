"""A server on which odd runs arrive beside healthy ones, and everything that is asked of it.

``python -m tests.faults.odd_runs`` tries all values of `edge_values`, some on each server, and with
``--soak SECONDS`` one every minute on one server.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from rankscope.analysis.report.exchange import read_report
from rankscope.collector.errors import CollectorError
from rankscope.collector.ingest.router import ARROW_TYPE
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.collector.wire.codec import CutBatch, encode_cuts
from tests.faults.cycles import TIMEOUT_S, WholePath
from tests.faults.edge_run import SLOW_RANK, SmallRun, Way, to_json
from tests.faults.edge_values import EDGES
from tests.faults.many_commands import commands
from tests.integration.programs import COMMAND
from tests.integration.test_serve import Job
from tests.support.dashboard.posts import ask_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut
    from tests.faults.edge_run import Edge
    from tests.faults.many_commands import Run

MOST_BYTES = 1_500 << 20
"""Largest resident set of a server and its children."""

LOOK_S = 0.5
NUM_TURNS = 2
"""Turns of each loop that see all rows before the server is asked."""

LOOPS = ("analysis", "alerts", "upkeep", "tail")
LOOP = re.compile(
    r'^rankscope_loop_(up|turns_total)\{loop="([a-z-]+)"\} ([0-9.e+]+)$', re.MULTILINE
)
UPDATE = "/_dash-update-component"
RUN_PAGES = ("timeline", "rank", "mfu", "links", "graph", "start-up", "compare")
COMMON_PAGES = ("runs", "alerts", "health")
RUN_FILES = ("report.html", "findings.csv")
SPANS_PATH, OK = "/v1/spans", 200
PER_SERVER = 60
"""Odd runs of one server."""

MINUTE_S = 60
FAULT_STEP = 30
MOST_BEHIND = 60
"""Steps of a second each by which a report may be behind on a busy machine."""

RUNNING_SHARE = 4
"""One odd run of so many runs, and is analysed again and again."""


@dataclass(kw_only=True)
class OddRuns(WholePath):
    """A server, healthy runs before, beside and after odd ones, and what went wrong."""

    problems: list[str] = field(default_factory=list)
    taken: dict[str, Edge] = field(default_factory=dict)
    """The odd values that were not refused, by run."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Answers to the rows and spans of odd runs, by way."""

    peak_bytes: int = 0

    def commands(self) -> dict[str, list[str]]:
        return {
            "collector": [
                *COMMAND, "serve", "--spool", str(self.spool), "--port", str(self.port),
            ]
        }  # fmt: skip

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the memory of the server and its children until the block ends."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOK_S):
                self.peak_bytes = max(self.peak_bytes, _family_bytes(self.pid_of("collector")))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """Return a client with the server's own token."""
        server = read_server_file(self.store)
        assert server is not None, self.logs()
        headers = {"authorization": f"Bearer {server.token}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S) as client:
            yield client

    def take(self, client: httpx.Client, run: SmallRun) -> None:
        """Bring a healthy run through the network."""
        for table, rows in run.rows.items():
            self._post_rows(client, table, rows)
        self._post(client, SPANS_PATH, encode_cuts(run.to_cuts()), ARROW_TYPE)

    def take_odd(self, client: httpx.Client, edges: Mapping[str, Edge]) -> None:
        """Bring odd runs in: what is odd by its way alone, the rest of all together."""
        plain: defaultdict[str, list[Row]] = defaultdict(list)
        cuts: list[Cut] = []
        for run_id, edge in edges.items():
            run, is_taken = SmallRun(run_id, state=_state(run_id)), True
            if edge.way is Way.SPOOL:
                run.write_spool(self.spool, edge)
                self.taken[run_id] = edge
                continue
            for table, rows in run.with_edge(edge).rows.items():
                # What a run declares decides which of its ranks and groups are refused.
                if edge.way is Way.ROWS and edge.part in {table, "runs"}:
                    answer = self._post_rows(client, table, rows, edge)
                    is_taken &= table != edge.part or answer == OK
                else:
                    plain[table] += rows
            if edge.way is Way.WIRE:
                body = encode_cuts(run.to_cuts())
                is_taken = self._post(client, SPANS_PATH, body, ARROW_TYPE, edge) == OK
            else:
                cuts += run.to_cuts()
            if is_taken:
                self.taken[run_id] = edge
        for table, rows in plain.items():
            self._post_rows(client, table, rows)
        if cuts:
            self._post(client, SPANS_PATH, encode_cuts(cuts), ARROW_TYPE)

    def put_stored(self, edges: Mapping[str, Edge]) -> None:
        """Store odd runs without any check, as an earlier version may have; no server runs."""
        with open_store(self.store_url) as store:
            writer = StoreWriter(store)
            for run_id, edge in edges.items():
                run = SmallRun(run_id, state=_state(run_id)).with_edge(edge)
                try:
                    for table, rows in run.rows.items():
                        store.insert_rows(table, rows)
                    writer.store([CutBatch.from_cut(cut) for cut in run.to_cuts()])
                except CollectorError:  # no column can hold the value
                    self.statuses["refused by the engine"] += 1
                else:
                    self.statuses["stored"] += 1
                    self.taken[run_id] = edge

    def turns(self, client: httpx.Client) -> dict[str, float]:
        """Return how many turns each loop has ended since the start of the server."""
        return self._loops(client)["turns_total"]

    def wait_for_turns(self, client: httpx.Client, least: Mapping[str, float]) -> None:
        """Wait until each loop has ended so many turns, or one of them has stopped."""

        def is_done() -> bool:
            time.sleep(LOOK_S)
            found = self._loops(client)
            return not all(found["up"].get(name) for name in LOOPS) or all(
                found["turns_total"][name] >= num for name, num in least.items()
            )

        self.wait_for(is_done)

    def check_server(self, client: httpx.Client) -> None:
        """Check that the server is ready, its loops go on, and the pages of all runs answer."""
        for path in ("/healthz", "/readyz", "/metrics", "/export/runs.csv"):
            answer = client.get(path)
            if answer.status_code != OK:
                self.problems.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        for page in COMMON_PAGES:
            answer = client.post(UPDATE, json=ask_page(f"/{page}"))
            if answer.status_code != OK:
                self.problems.append(f"page of {page}: {answer.status_code}")
        down = [name for name, up in self._loops(client)["up"].items() if not up]
        self.problems += [f"the loop {name} is down" for name in down]

    def check_healthy(
        self, client: httpx.Client, run_ids: Sequence[str], *, pages: Sequence[str] = RUN_PAGES
    ) -> None:
        """Check that these runs have their report with the slow rank, and their pages."""
        for run_id in run_ids:
            report = self._report(client, run_id)
            top = None if report is None else report.top_finding
            if top is None or (top.cause, top.ranks) != ("slow-compute", (SLOW_RANK,)):
                self.problems.append(f"report of {run_id}: {top}")
            self._check_pages(client, run_id, pages=pages, below=400)

    def check_progress(self, client: httpx.Client, jobs: Sequence[Job]) -> None:
        """Check that the analysis follows live runs."""
        for job in jobs:
            run_id = job.ranks[0].identity[0]
            report = self._report(client, run_id)
            last = -1 if report is None else report.steps[-1]
            if last < job.num_steps - MOST_BEHIND:
                self.problems.append(f"{run_id}: analysed to step {last} of {job.num_steps}")

    def check_odd(self, client: httpx.Client, run: Run, *, pages: Sequence[str] = ()) -> None:
        """Check that the pages and the analysis of each odd run answer."""
        for run_id, edge in self.taken.items():
            self._check_pages(client, run_id, pages=pages, below=500, about=edge.name)
            status, _, err = run("analyze", run_id)
            is_plain = status in {0, 1, 2} and err.count("\n") == (status != 0)
            if not is_plain or "Traceback" in err:
                self.problems.append(f"analyze of {edge.name}: {status} {err[-300:]}")

    def check_commands(self, run: Run, run_ids: Sequence[str]) -> None:
        """Check the commands that list all runs, and those of healthy runs."""
        asked = [("runs",), ("findings",), ("alerts",), *(("analyze", each) for each in run_ids)]
        for run_id in run_ids:
            out = self.folder / f"{run_id}-{time.monotonic_ns()}.csv"
            asked.append(("export", run_id, "--format", "csv", "--out", str(out)))
        for arguments in asked:
            status, _, err = run(*arguments)
            if status or "Traceback" in err:
                self.problems.append(f"{' '.join(arguments)}: {status} {err[-300:]}")

    def check_memory(self) -> None:
        """Check the peak of the memory."""
        if self.peak_bytes > MOST_BYTES:
            self.problems.append(f"the server took {self.peak_bytes >> 20} MiB")

    def check_log(self) -> None:
        """Check that the server's log has no traceback."""
        log = (self.folder / "collector.log").read_text(errors="replace")
        for found in re.finditer(r"Traceback \(most recent call last\)", log):
            self.problems.append(f"log: {log[found.start() : found.start() + 3000][-600:]}")

    def wait_for_alert(self, run: Run, run_id: str) -> None:
        """Wait until an alert of a run's slow rank was raised."""
        wanted = (run_id, [SLOW_RANK])
        self.wait_for(
            lambda: wanted in [(each["run_id"], each["ranks"]) for each in _listed(run, "alerts")]
        )

    def wait_for_findings(self, run: Run, run_ids: Sequence[str]) -> None:
        """Wait until the server has recorded a finding of each of these runs by itself."""
        self.wait_for(lambda: set(run_ids) <= {each["run_id"] for each in _listed(run, "findings")})

    @contextmanager
    def asking(self) -> Iterator[Run]:
        """Return a function that runs commands on the server's host."""
        with commands(self._environment) as run:
            yield run

    def _report(self, client: httpx.Client, run_id: str) -> RunReport | None:
        asked = {"run_id": run_id, "version": version("rankscope")}
        answer = client.get("/v1/report", params=asked)
        return read_report(answer.text) if answer.status_code == OK else None

    def _post_rows(
        self, client: httpx.Client, table: str, rows: list[Row], edge: Edge | None = None
    ) -> int:
        body = to_json({"schema": 1, "rows": rows}).encode()
        return self._post(client, f"/v1/rows/{table}", body, "application/json", edge)

    def _post(
        self, client: httpx.Client, path: str, body: bytes, media: str, edge: Edge | None = None
    ) -> int:
        """Post a body and return the status; only an odd one may be refused."""
        answer = client.post(path, content=body, headers={"content-type": media})
        what = "what is healthy" if edge is None else edge.name
        if answer.status_code >= (400 if edge is None else 500):
            self.problems.append(f"{path} of {what}: {answer.status_code} {answer.text[:200]}")
        if edge is not None:
            self.statuses[f"{edge.way} {answer.status_code}"] += 1
        return answer.status_code

    def _check_pages(
        self,
        client: httpx.Client,
        run_id: str,
        *,
        below: int,
        pages: Sequence[str] = RUN_PAGES,
        about: str = "",
    ) -> None:
        """Check that the status of each page and file of a run is below a limit."""
        search = f"?run={run_id}&with=after"
        for path in (f"/run/{run_id}", *(f"/{page}" for page in pages)):
            answer = client.post(UPDATE, json=ask_page(f"{path}{search}"))
            if answer.status_code >= below:
                self.problems.append(f"page {path}{search} {about}: {answer.status_code}")
        for name in RUN_FILES:
            answer = client.get(f"/export/{name}", params={"run": run_id})
            if answer.status_code >= below:
                self.problems.append(f"{name} of {run_id} {about}: {answer.status_code}")

    def _loops(self, client: httpx.Client) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {"up": {}, "turns_total": {}}
        for figure, loop, value in LOOP.findall(client.get("/metrics").text):
            found[figure][loop] = float(value)
        return found


def _listed(run: Run, command: str) -> list[Row]:
    """Return what a command lists, after a pause; nothing if it fails."""
    time.sleep(LOOK_S)
    status, out, _ = run(command, "--json")
    return [] if status else list(json.loads(out)[command])


def _family_bytes(pid: int) -> int:
    """Return the resident set of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def _state(run_id: str) -> str:
    """Return the state of an odd run, whose name ends in its number."""
    return "ended" if int(run_id.rpartition("-")[2]) % RUNNING_SHARE else "running"


def _named(edges: Sequence[Edge]) -> dict[str, Edge]:
    return {f"odd-{number:03d}": edge for number, edge in enumerate(edges)}


def try_sent(folder: Path, edges: Sequence[Edge], *, pages: Sequence[str] = ()) -> OddRuns:
    """Send odd runs to a server; return what went wrong, restart included."""
    path = OddRuns(folder=folder, chooser=random.Random(0))
    with path, path.watched(), path.asking() as run:
        live = Job(path.spool, run_id="beside")
        live.record_steps(8)
        with path.client() as client:
            path.take(client, SmallRun("before"))
            path.take_odd(client, _named(edges))
            path.take(client, SmallRun("after"))
            live.record_steps(4, slow_ms=180)
            _ask_all(path, client, run, ("before", "beside", "after"), pages=pages)
        _restart(path, run, live, ("before", "beside", "after"))
    path.check_log()
    path.check_memory()
    return path


def try_stored(folder: Path, edges: Sequence[Edge], *, pages: Sequence[str] = ()) -> OddRuns:
    """Start a server on a store that holds odd runs already; return what went wrong."""
    path = OddRuns(folder=folder, chooser=random.Random(0))
    folder.mkdir(parents=True, exist_ok=True)
    named = {run_id: edge for run_id, edge in _named(edges).items() if edge.way is not Way.SPOOL}
    path.put_stored(named)
    with path, path.watched(), path.asking() as run:
        live = Job(path.spool, run_id="beside")
        live.record_steps(8)
        with path.client() as client:
            path.take(client, SmallRun("after"))
            live.record_steps(4, slow_ms=180)
            _ask_all(path, client, run, ("beside", "after"), pages=pages)
        _restart(path, run, live, ("beside", "after"))
    path.check_log()
    path.check_memory()
    return path


def _ask_all(
    path: OddRuns,
    client: httpx.Client,
    run: Run,
    healthy: Sequence[str],
    *,
    pages: Sequence[str] = (),
) -> None:
    begun = path.turns(client)
    path.wait_for_alert(run, "beside")
    path.wait_for_findings(run, healthy)
    path.check_healthy(client, healthy)
    path.check_odd(client, run, pages=pages)
    path.check_commands(run, healthy)
    path.wait_for_turns(client, {name: begun[name] + NUM_TURNS for name in LOOPS})
    path.check_server(client)


def _restart(path: OddRuns, run: Run, live: Job, healthy: Sequence[str]) -> None:
    """Restart the server, and check that it goes on: with the live run, and with a new one."""
    path.end("collector")
    path.start("collector")
    path.wait_for(path.is_ready)
    again = Job(path.spool, run_id="again")
    again.record_steps(8)
    live.record_steps(4, slow_ms=180)
    again.record_steps(4, slow_ms=180)
    with path.client() as client:
        path.wait_for_alert(run, "again")
        path.check_healthy(client, (*healthy, "again"), pages=())
        path.check_commands(run, ("again",))
        path.wait_for_turns(client, dict.fromkeys(LOOPS, 1))
        path.check_server(client)


def soak(folder: Path, *, seconds: int, every_s: int, seed: int) -> OddRuns:
    """Send an odd run every ``every_s`` beside a healthy and a slow live run, a step a second each.

    Prints a line each minute.
    """
    chooser = random.Random(seed)
    path = OddRuns(folder=folder, chooser=chooser)
    capacity, now_ns = 4 * seconds, time.time_ns()
    with path, path.watched(), path.asking() as run:
        healthy, slow = (
            Job(path.spool, run_id=name, capacity=capacity, anchor_unix_ns=now_ns)
            for name in ("healthy", "slow")
        )
        begun_s = time.monotonic()
        with path.client() as client:
            for second in range(seconds):
                time.sleep(max(0.0, begun_s + second - time.monotonic()))
                healthy.record_steps(1)
                slow.record_steps(1, slow_ms=100 if second < FAULT_STEP else 180)
                if second % every_s == 0:
                    path.take_odd(client, {f"odd-{second // every_s:03d}": chooser.choice(EDGES)})
                if second % MINUTE_S == MINUTE_S - 1:
                    path.check_server(client)
                    path.check_progress(client, (healthy, slow))
                    _print_row(second // MINUTE_S + 1, len(path.taken), path)
            path.wait_for_alert(run, "slow")
            path.check_healthy(client, ("slow",))
            path.check_odd(client, run)
            path.check_commands(run, ("healthy", "slow"))
    path.check_log()
    path.check_memory()
    return path


def main() -> None:
    """Try all values, or a choice of them for some time, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stored", action="store_true", help="into the store, without any check")
    parser.add_argument("--only", default="", help="values whose name holds this text")
    parser.add_argument("--per-server", type=int, default=PER_SERVER)
    parser.add_argument("--soak", type=int, metavar="SECONDS", help="an odd run every minute")
    parser.add_argument("--every", type=int, default=MINUTE_S, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.soak is not None:
            _print_row("minute", "odd runs")
            found = soak(
                Path(folder) / "path",
                seconds=options.soak, every_s=options.every, seed=options.seed,
            )  # fmt: skip
            problems = found.problems
        else:
            problems = _try_all(Path(folder), options)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    sys.exit(1 if problems else 0)


def _try_all(folder: Path, options: argparse.Namespace) -> list[str]:
    edges = [
        edge
        for edge in EDGES
        if options.only in edge.name and not (options.stored and edge.way is Way.SPOOL)
    ]
    problems = []
    _print_row("values", "answers")
    for first in range(0, len(edges), options.per_server):
        part = edges[first : first + options.per_server]
        try_them = try_stored if options.stored else try_sent
        path = try_them(folder / f"from-{first}", part, pages=RUN_PAGES)
        answers = ", ".join(f"{count} {what}" for what, count in sorted(path.statuses.items()))
        _print_row(f"{first} to {first + len(part) - 1}", answers, path)
        problems += path.problems
    return problems


def _print_row(first: object, second: object, path: OddRuns | None = None) -> None:
    """Print a row of the table; without a path its head."""
    rest = ("peak", "problems") if path is None else (path.peak_bytes >> 20, len(path.problems))
    cells = [first, second, f"{rest[0]} MiB" if path else rest[0], rest[1]]
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    if path is None:
        sys.stdout.write("| --- | --- | ---: | ---: |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
