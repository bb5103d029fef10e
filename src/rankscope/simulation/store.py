"""Put a simulated run into the store, as the spool's tail puts a real one."""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.collector.client.served_writer import run_writer
from rankscope.collector.errors import RunBegunError, RunExistsError
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.descriptions import manifest_row
from rankscope.collector.spool.records import Decoded
from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from rankscope.collector.client.served_writer import RunWriter
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables

DESCRIPTION_ROWS = 5_000

SELECT_PRESENCE = """
SELECT
    (SELECT any(source_format) FROM runs WHERE run_id = {run_id:String}) AS source_format,
    (SELECT count() FROM runs WHERE run_id = {run_id:String}) AS num_runs,
    (SELECT count() FROM ledger WHERE run_id = {run_id:String}) AS num_cuts,
    (SELECT count() FROM ledger
     WHERE run_id = {run_id:String} AND process != {process:String}) AS num_others
"""

DELETE_LEFTOVERS = "DELETE FROM {table:Identifier} WHERE run_id = {run_id:String}"

TABLES = (
    "spans", "steps", "microbatches", "samples", "events", "ranks", "groups", "manifests", "ledger"
)  # fmt: skip
"""Tables that hold rows of a run before it appears in table ``runs``; the ledger last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation recorded."""

    num_spans: int
    num_steps: int


def store_simulation(
    store: Store, simulation: Simulation, steps: Iterable[StepTables]
) -> Simulated:
    """Store a run; it appears whole or not at all, since its row in ``runs`` is written last.

    Args:
        store: Where to.
        simulation: The run.
        steps: Its tables, read once.

    Raises:
        RunExistsError: The store holds a run of that name.
        RunBegunError: A server holds the store, and an unfinished run of that name is in it.
        RunDeletedError: A run of that name was deleted.
        StoreError: It could not be written.
    """
    run_id = simulation.run_id
    Deletions(store).check(run_id)
    presence = {"run_id": run_id, "process": simulation.process}
    found = store.rows(SELECT_PRESENCE, presence)[0]
    if found["num_runs"]:
        raise RunExistsError(run_id, source_format=found["source_format"])
    if store.read_only:
        # A server removes nothing for us. What the same simulation left is sent again, and is
        # known by its keys.
        if found["num_others"]:
            raise RunBegunError(run_id)
    elif found["num_cuts"]:
        for name in TABLES:  # what a simulation that was cut short left behind
            store.command(DELETE_LEFTOVERS, {"table": name, "run_id": run_id})
    with closing(run_writer(store)) as writer:
        return _store_all(writer, simulation, steps)


def _store_all(writer: RunWriter, simulation: Simulation, steps: Iterable[StepTables]) -> Simulated:
    num_spans, num_steps = 0, 0
    for tables in steps:
        for cut in _cuts(simulation, tables, cut_rows=writer.cut_rows):
            writer.ingest([cut])
        writer.insert("samples", tables.samples)
        writer.insert("events", tables.events)
        num_spans += tables.spans.num_rows
        num_steps += 1
    _describe(writer, simulation)
    return Simulated(num_spans=num_spans, num_steps=num_steps)


def _cuts(simulation: Simulation, tables: StepTables, *, cut_rows: int) -> Iterator[Cut]:
    """Cut a step into inserts; the last one holds the rows that are no spans."""
    spans, steps, microbatches = tables.spans, tables.steps, tables.microbatches
    firsts = range(0, max(1, spans.num_rows), cut_rows)
    for first in firsts:
        part = spans.slice(first, cut_rows)
        is_last = first == firsts[-1]
        rows = Decoded(
            spans=part,
            steps=steps if is_last else steps.slice(0, 0),
            microbatches=microbatches if is_last else microbatches.slice(0, 0),
            bad_rows=steps.slice(0, 0),
        )
        num_rows = part.num_rows + rows.steps.num_rows + rows.microbatches.num_rows
        key = CutKey(
            run_id=simulation.run_id,
            epoch=0,
            rank=NONE,
            process=simulation.process,
            segment=tables.segment,
            first_row=first,
            end_row=first + num_rows,
        )
        yield Cut(key=key, sha256=_content_hash(part), num_torn=0, rows=rows)


def _content_hash(rows: pa.Table) -> str:
    """Hash the columns that tell one simulation's rows from another's."""
    digest = hashlib.sha256()
    for name in ("rank", "start_ns", "duration_ns"):
        for chunk in rows[name].chunks:
            values = chunk.buffers()[1]
            width = chunk.type.bit_width // 8
            begin = chunk.offset * width
            if values is not None:
                digest.update(memoryview(values)[begin : begin + len(chunk) * width])
    return digest.hexdigest()


def _describe(writer: RunWriter, simulation: Simulation) -> None:
    """Store what is known of the run besides its spans; the run itself last."""
    run_id = simulation.run_id
    groups: list[Row] = [
        {
            "run_id": run_id,
            "epoch": 0,
            "group_id": group.group_id,
            "kind": group.kind.value,
            "name": group.name,
            "members": list(group.members),
        }
        for group in simulation.groups
    ]
    manifests: dict[str, Row] = {}
    ranks: list[Row] = []
    for row in simulation.rank_rows():
        told = manifest_row(run_id, simulation.manifest(row["rank"]))
        manifests[told["manifest_hash"]] = told
        ranks.append({**row, "manifest_hash": told["manifest_hash"]})
    for table, rows in (
        ("groups", groups),
        ("manifests", list(manifests.values())),
        ("clock", list(simulation.clock_rows())),
        ("ranks", ranks),
    ):
        for first in range(0, len(rows), DESCRIPTION_ROWS):
            writer.upsert(table, rows[first : first + DESCRIPTION_ROWS])
    writer.upsert("runs", [simulation.run_row(created_ns=time.time_ns())])
