"""A small run with real spans in which one value is replaced, and its ways into a server."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.descriptions import manifest_row
from rankscope.collector.spool.records import CutRows
from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.spool import EVENTS_FILE, EXIT_FILE, GROUPS_FILE, MANIFEST_FILE
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import Simulation
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.identity import Row

SLOW_RANK, ODD_STEP = 1, 3
SCENARIO = Scenario(
    dp=2, pp=2, num_steps=6, num_microbatches=2, num_layers=4,
    faults=parse_simulated_faults([f"slow-compute:rank={SLOW_RANK},factor=1.8"]),
)  # fmt: skip
AGE_NS = 20_000_000_000
"""Age of a new run's first step."""

DEEP_TEXT = "[" * 1000 + "]" * 1000
DEEP = "<nested 1000 deep>"
"""Means `DEEP_TEXT` in a document: Python cannot serialize the value itself."""


class Way(StrEnum):
    """Ways into a server."""

    SPOOL = "spool"
    ROWS = "rows"
    """``POST /v1/rows/TABLE``"""

    WIRE = "wire"
    """``POST /v1/spans``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One value that no healthy run has."""

    way: Way
    part: str
    """Table, file of the spool, ``header`` of a spool or ``key`` of a cut."""

    path: tuple[str, ...]
    """Column or key, and the keys below it."""

    value: Any
    is_everywhere: bool = True
    """Whether all rows, or all processes, have the value; else one."""

    @property
    def name(self) -> str:
        """Text for a person."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:45]}... ({len(shown)})"
        place = "" if self.is_everywhere else " of one"
        return f"{self.way} {self.part}.{'.'.join(self.path)}{place} = {shown}"


class SmallRun:
    """Four ranks that train six steps, of which rank 1 is slow.

    Args:
        run_id: Its name.
        state: ``running`` or ``ended``.
    """

    def __init__(self, run_id: str, *, state: str = "ended") -> None:
        now_ns = time.time_ns()
        self.run_id, self.state, self.started_ns = run_id, state, now_ns - AGE_NS
        scenario = replace(SCENARIO, started_ns=self.started_ns)
        simulation = Simulation(scenario, run_id=run_id)
        steps = list(simulation.tables())
        self.cuts = [
            {"spans": step.spans, "steps": step.steps, "microbatches": step.microbatches}
            for step in steps
        ]
        self.segments = [step.segment for step in steps]
        self.key: dict[str, Any] = {"epoch": 0, "rank": NONE, "process": simulation.process}
        self.manifests = [simulation.manifest(rank) for rank in range(scenario.world_size)]
        self.rows = _describe(simulation, now_ns=now_ns, state=state)
        self.rows["samples"] = [
            {**row, "host": self.host_of(row["host"])}
            for step in steps
            for row in step.samples.to_pylist()
        ]
        for table in ("ranks", "clock", "heartbeats"):
            for row in self.rows[table]:
                row["host"] = self.host_of(row["host"])

    def host_of(self, name: str) -> str:
        """Return a name of a host that no other run has: the rows of its clock are its own."""
        return f"{self.run_id}-{name}"

    def with_edge(self, edge: Edge) -> SmallRun:
        """Replace a value of what is sent over the network; return the run."""
        if edge.way is Way.ROWS:
            _change(self.rows[edge.part], edge)
        elif edge.part == "key":
            self.key[edge.path[0]] = edge.value
        else:
            for step, tables in enumerate(self.cuts):
                if edge.is_everywhere or step == ODD_STEP:
                    tables[edge.part] = _with_value(tables[edge.part], edge)
        return self

    def to_cuts(self) -> list[Cut]:
        """Return the rows of the spans, steps and micro-batches, a cut for each step."""
        return [
            Cut(
                key=CutKey(**self._key_of(number)),
                sha256=hashlib.sha256(f"{self.run_id} {number}".encode()).hexdigest(),
                num_torn=0,
                rows=CutRows(**tables, bad_rows=tables["steps"].slice(0, 0)),
            )
            for number, tables in enumerate(self.cuts)
        ]

    def _key_of(self, number: int) -> dict[str, Any]:
        num_rows = sum(table.num_rows for table in self.cuts[number].values())
        usual = {"segment": self.segments[number], "first_row": 0, "end_row": num_rows}
        return {"run_id": self.run_id, **usual, **self.key}

    def write_spool(self, spool: Path, edge: Edge | None = None) -> None:
        """Write the spools of the four processes; they appear at once."""
        hidden = spool.parent / "unfinished"
        for rank in range(SCENARIO.world_size):
            is_odd = edge is not None and (edge.is_everywhere or rank == SLOW_RANK)
            self._write_process(hidden, rank, edge if is_odd else None)
        os.rename(hidden / self.run_id, spool / self.run_id)  # noqa: PTH104 -- both are folders

    def _write_process(self, spool: Path, rank: int, edge: Edge | None) -> None:
        parts = self._parts_of(rank)
        if edge is not None:
            _change(parts[edge.part], edge)
        (header,) = parts["header"]
        builder = SpoolBuilder(spool, run_id=self.run_id, capacity=256, **header)
        for name, documents in ((MANIFEST_FILE, parts["manifest"]), (EXIT_FILE, parts["exit"])):
            for document in documents:
                (builder.folder / name).write_text(to_json(document), encoding="utf-8")
        for name, lines in ((GROUPS_FILE, parts["groups"]), (EVENTS_FILE, parts["events"])):
            for line in lines:
                builder.append_line(name, to_json(line))
        for row in parts["spans"]:
            _write_span(builder, row)
        for row in parts["steps"]:
            _write_step(builder, row)
        for row in parts["microbatches"]:
            builder.microbatch(
                row["microbatch"],
                step=row["step"],
                num_tokens=row["num_tokens"],
                sum_squared_lengths=row["sum_squared_lengths"],
            )
        if self.state != "running":
            builder.seal()

    def _parts_of(self, rank: int) -> dict[str, list[Row]]:
        """Return what a process writes: its header, documents and records."""
        at_ns = self.started_ns
        records = {
            table: [
                row
                for tables in self.cuts
                for row in tables[table].to_pylist()
                if row["rank"] == rank
            ]
            for table in ("spans", "steps", "microbatches")
        }
        for row in records["steps"]:
            row["duration_ns"] = row["end_ns"] - row["start_ns"]
        for row in (*records["spans"], *records["steps"]):
            row["start_ns"] -= at_ns  # as the host's monotonic clock reads it
        event = {"at_ns": at_ns, "kind": "checkpoint", "text": "saved", "data": {"step": 1}}
        groups = [
            {
                "group_id": f"{row['group_id']:016x}",
                **{name: row[name] for name in ("kind", "name", "members")},
            }
            for row in self.rows["groups"]
            if rank in row["members"]
        ]
        header = {
            "rank": rank, "epoch": 0, "world_size": SCENARIO.world_size, "pid": 7,
            "host": self.host_of("a"), "anchor_unix_ns": at_ns, "anchor_monotonic_ns": 0,
        }  # fmt: skip
        ended = {"state": "ended", "at_ns": time.time_ns()}
        return {
            "header": [header],
            "manifest": [copy.deepcopy(self.manifests[rank])],
            "groups": groups,
            "events": [event],
            "exit": [] if self.state == "running" else [ended],
            **records,
        }


def _change(rows: list[Row], edge: Edge) -> None:
    for row in rows if edge.is_everywhere else rows[:1]:
        _put(row, edge.path, edge.value)


def _put(document: Row, path: tuple[str, ...], value: Any) -> None:  # noqa: ANN401 -- of JSON
    """Replace the value at a path of keys; ``*`` replaces several keys at once."""
    *outer, last = path
    for key in outer:
        document = document.setdefault(key, {})
    document.update(value if last == "*" else {last: value})


def to_json(document: object) -> str:
    """Return a document as JSON, with `DEEP_TEXT` for `DEEP`."""
    return json.dumps(document).replace(json.dumps(DEEP), DEEP_TEXT)


def _describe(simulation: Simulation, *, now_ns: int, state: str) -> dict[str, list[Row]]:
    run_id, is_running = simulation.run_id, state == "running"
    manifest = manifest_row(run_id, simulation.manifest(0))
    named: Row = {"run_id": run_id, "epoch": 0}
    groups = [
        {
            **named,
            "group_id": group.group_id,
            "kind": group.kind.value,
            "name": group.name,
            "members": list(group.members),
        }
        for group in simulation.groups
    ]
    run: Row = {**simulation.run_row(created_ns=now_ns), "state": state, "revision": now_ns}
    ended = {"state": state, "ended_ns": None} if is_running else {}
    exited = {"exit_state": "running", "exit_ns": None} if is_running else {}
    ranks = [
        {**row, **exited, "manifest_hash": manifest["manifest_hash"], "revision": now_ns}
        for row in simulation.rank_rows()
    ]
    event = {
        **named, "rank": SLOW_RANK, "at_ns": now_ns, "kind": "checkpoint", "text": "saved",
        "data": "{}", "process": simulation.process, "line": 0,
    }  # fmt: skip
    beat = {"at_ns": now_ns, "pid": 7, "step": 6, "state": "training" if is_running else "ended"}
    beats = [{**named, "rank": row["rank"], "host": row["host"], **beat} for row in ranks]
    return {
        "runs": [run | ended],
        "ranks": ranks,
        "groups": groups,
        "events": [event],
        "manifests": [manifest],
        "clock": list(simulation.clock_rows()),
        "heartbeats": beats,
    }


def _with_value(rows: pa.Table, edge: Edge) -> pa.Table:
    (name,) = edge.path
    column = rows[name].combine_chunks()
    values = column.to_pylist()
    ranks = rows["rank"].to_pylist()
    places = range(len(values)) if edge.is_everywhere else [ranks.index(SLOW_RANK)]
    for place in places:
        values[place] = edge.value
    is_coded = pa.types.is_dictionary(column.type)
    changed = pa.array(values, column.type.value_type if is_coded else column.type)
    changed = changed.dictionary_encode() if is_coded else changed
    return rows.set_column(rows.schema.get_field_index(name), name, changed)


def _write_span(builder: SpoolBuilder, row: Row) -> None:
    comm = tuple(
        row[name]
        for name in ("group_id", "seq", "src_rank", "dst_rank", "num_bytes", "interval_id")
    )
    kind = row["kind"]
    plain = ("step", "start_ns", "duration_ns", "microbatch", "chunk", "track", "flags", "depth")
    builder.span(
        row["name"],
        kind=kind if isinstance(kind, int) else SpanKind(kind),
        comm=comm if row["group_id"] or row["src_rank"] != NONE else None,
        **{name: row[name] for name in plain},
    )


def _write_step(builder: SpoolBuilder, row: Row) -> None:
    plain = ("start_ns", "duration_ns", "num_tokens", "loss", "peak_memory_bytes")
    builder.step(row["step"], **{name: row[name] for name in plain})
