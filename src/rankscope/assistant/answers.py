"""Answers to the questions that an assistant may ask of a store, each of bounded length."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.advice import advise
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.client.served_store import ServedStore
from rankscope.collector.gateway import CANONICAL, check_statement
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.hosts import read_excluded
from rankscope.collector.spool.descriptions import RUNNING

from ..errors import BadInputError
from ..server.bad_hosts import BadHosts
from ..server.run_answer import find_or_analyze, read_answer
from ..sources.store_source import StoreSource
from ..sources.stored_reports import read_run_lines
from ..terminal.proof_address import format_incident, format_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankscope.analysis.report.report import Finding
    from rankscope.collector.store.store import Store

    from ..server.run_answer import RunAnswer

MAX_ITEMS = 20
"""Items of a list in an answer. A context is small, and the first are the worst."""

MAX_ROWS = 100
"""Rows of a statement's result."""

MAX_CHARS = 24_000
"""Characters of an answer, some 8,000 tokens."""

PICTURE = ("proof", "noise_s")
"""Fields of a finding that only `Answers.evidence` has."""

SELECTS = re.compile(r"\s*(\(|SELECT\b|WITH\b)", re.IGNORECASE)
"""Begin of a statement whose result may be limited from outside."""


class Answers:
    """Answers the questions about the runs of a store. All values are ready for JSON.

    Args:
        store: The store. It is only read.
        unix_ns: Clock of its rows.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int]) -> None:
        self._store = store
        self._source = StoreSource(store)
        self._unix_ns = unix_ns

    def runs(self) -> dict[str, Any]:
        """Return the runs with their verdicts, the newest first."""
        lines = [
            {
                "run": line.run.run_id,
                "state": line.run.state,
                "ranks": line.run.world_size,
                "steps": line.run.num_steps,
                "started_ns": line.run.started_ns,
                "verdict": line.verdict or None,
                "cause": line.cause or None,
                "severity": line.severity or None,
                "tags": list(line.tags),
            }
            for line in read_run_lines(self._store)
        ]
        return bounded({"runs": lines})

    def verdict(
        self, run: str, *, first_step: int | None = None, last_step: int | None = None
    ) -> dict[str, Any]:
        """Return the diagnosis of a run, or of some of its steps, with what to do.

        Raises:
            UnknownRunError: The store holds no run of this name.
            EmptyRunError: The run has no spans in these steps.
        """
        answer = self._answer(run, first_step, last_step)
        report = answer.report
        document = answer.to_document(self._store)
        server = self._store.server if isinstance(self._store, ServedStore) else None
        top = report.findings.index(report.top_finding)
        kept = (
            "run", "world_size", "layout", "epochs", "step_time_s", "slowdown", "startup",
            "goodput", "rank_states", "host_moves", "excluded_hosts", "quality",
        )  # fmt: skip
        mfu = document["mfu"]
        return bounded(
            {
                "verdict": verdict_sentence(report),
                **{key: document[key] for key in kept},
                "steps": [report.steps[0], report.steps[-1]] if report.steps else [],
                "mfu": mfu and {"convention": mfu["convention"], "mean": mfu["mean"]},
                "findings": [
                    {key: value for key, value in finding.items() if key not in PICTURE}
                    | {"what_to_do": _advice(run, known)}
                    for finding, known in zip(document["findings"], report.findings, strict=True)
                ],
                "waiting_ranks": document["starved"],
                "proof": format_proof(report, server),
                "incident": format_incident(run, answer.numbers[top], server),
            }
        )

    def evidence(self, run: str, finding: int = 0) -> dict[str, Any]:
        """Return what proves a finding: the culprit's quantity beside that of its peers.

        Args:
            run: The run.
            finding: Place of the finding in `verdict`, from 0.

        Raises:
            UnknownRunError: The store holds no run of this name.
            BadInputError: The run has no such finding.
        """
        document = self._answer(run).to_document(self._store)
        if finding >= (num := len(document["findings"])):
            raise BadInputError(f"run {run!r} has the findings 0 to {num - 1}, no {finding}")
        found = document["findings"][finding]
        return bounded(found | {"ranks_of_hosts": self._places(run, found["ranks"])})

    def ranks(self, run: str, ranks: list[int] | None = None) -> dict[str, Any]:
        """Return host, device, position, slowdown and waiting of ranks, the slowest first.

        Args:
            run: The run.
            ranks: Only these. None: all.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        document = self._answer(run).to_document(self._store)
        slowdowns = document["slowdown_by_worker"]
        waiting = {rank["rank"]: rank for rank in document["starved"]}
        rows = []
        for row in self._places(run, ranks):
            worker = f"{row['dp']},{row['pp']}"
            rows.append(
                row
                | {
                    "slowdown_of_worker": slowdowns.get(worker),
                    "wait_ratio": waiting.get(row["rank"], {}).get("wait_ratio"),
                    "waits_on": waiting.get(row["rank"], {}).get("waits_on", []),
                }
            )
        rows.sort(key=lambda row: -(row["slowdown_of_worker"] or 0.0))
        return bounded({"run": run, "ranks": rows})

    def hosts(self) -> dict[str, Any]:
        """Return what checks and findings say against hosts, over all runs, and the exclusions.

        A host without a row has nothing against it; that is no proof that it is healthy.
        """
        running = {run.run_id for run in self._source.runs() if run.state == RUNNING}
        bad = BadHosts(self._store, unix_ns=self._unix_ns).read(running)
        excluded = read_excluded(self._store, self._unix_ns())
        return bounded(
            {
                "hosts": [asdict(host) | {"named_by": _runs(host.named_by)} for host in bad],
                "excluded": [asdict(change) for change in excluded],
            }
        )

    def findings(self, run: str | None = None) -> dict[str, Any]:
        """Return the recorded findings of a run, or of all runs, the newest first."""
        found = [
            {name: value for name, value in asdict(finding).items() if name != "card"}
            for finding in sorted(read_findings(self._store, run), key=lambda each: -each.opened_ns)
        ]
        return bounded({"findings": found})

    def query(self, sql: str) -> dict[str, Any]:
        """Return the first rows of one statement that reads (docs/sql.md has the tables).

        Raises:
            StoreQueryError: The statement is wrong.
            QueryError: It does more than read.
        """
        if not isinstance(self._store, ServedStore):  # that server checks it
            sql = self._store.rows(CANONICAL, {"statement": sql})[0].popitem()[1]
            check_statement(sql)
        if SELECTS.match(sql):
            sql = f"SELECT * FROM ({sql.strip().rstrip(';')}) LIMIT {MAX_ROWS + 1}"  # noqa: S608  # checked above
        table = self._store.arrow(sql, {})
        rows = [list(row.values()) for row in table.slice(0, MAX_ROWS).to_pylist()]
        return {
            "columns": table.column_names,
            "rows": rows,
            "has_more_rows": table.num_rows > MAX_ROWS,
        }

    def _answer(
        self, run: str, first_step: int | None = None, last_step: int | None = None
    ) -> RunAnswer:
        info = self._source.run_info(run)
        report = find_or_analyze(self._store, info, steps=(first_step, last_step))
        return read_answer(self._store, info, report)

    def _places(self, run: str, ranks: list[int] | None) -> list[dict[str, Any]]:
        known = self._source.run_info(run).ranks
        rows = []
        for rank in known if ranks is None else [rank for rank in ranks if rank in known]:
            placed = known[rank]
            coords = asdict(placed.coords)
            rows.append({"rank": rank, "host": placed.host, "device": placed.device_name, **coords})
        return rows


def _runs(causes_by_run: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [{"run": run, "causes": list(causes)} for run, causes in causes_by_run.items()]


def _advice(run: str, finding: Finding) -> dict[str, Any] | None:
    advice = advise(finding.cause, run=run, ranks=finding.ranks, hosts=finding.hosts)
    if advice is None:
        return None
    return dict(advice.parts) | {"commands": list(advice.commands)}


def bounded(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer whose lists have at most `MAX_ITEMS`, fewer if it is too long.

    What is left out is said where it was.
    """
    most = MAX_ITEMS
    while True:
        short = {key: _cut(value, most) for key, value in answer.items()}
        if most == 1 or len(json.dumps(short, default=str)) <= MAX_CHARS:
            return short
        most //= 2


def _cut(value: Any, most: int) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        return {key: _cut(part, most) for key, part in value.items()}
    if isinstance(value, list | tuple):
        more = len(value) - most
        kept = [_cut(part, most) for part in value[:most]]
        return [*kept, f"... and {more:,} more"] if more > 0 else kept
    return value
