"""Put a simulated run into the store, as the spool's tail puts a real one."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collector.cut import Cut, CutKey
from collector.deletion import Deletions
from collector.errors import RunExistsError
from collector.manifests import manifest_row
from collector.records import Decoded
from collector.samples import write_samples
from collector.writer import StoreWriter
from tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from collector.store import Row, Store
    from trainer.simulator.simulation import Simulation
    from trainer.simulator.tables import StepTables

CUT_ROWS = 1_000_000
"""Most spans in one insert."""

DESCRIPTION_ROWS = 5_000

SELECT_PRESENCE = """
SELECT
    (SELECT any(source_format) FROM runs WHERE run_id = {run_id:String}) AS source_format,
    (SELECT count() FROM runs WHERE run_id = {run_id:String}) AS num_runs,
    (SELECT count() FROM ledger WHERE run_id = {run_id:String}) AS num_cuts
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
        RunDeletedError: A run of that name was deleted.
        StoreError: It could not be written.
    """
    run_id = simulation.run_id
    Deletions(store).check(run_id)
    found = store.rows(SELECT_PRESENCE, {"run_id": run_id})[0]
    if found["num_runs"]:
        raise RunExistsError(run_id, source_format=found["source_format"])
    if found["num_cuts"]:
        for name in TABLES:  # what a simulation that was cut short left behind
            store.command(DELETE_LEFTOVERS, {"table": name, "run_id": run_id})
    writer = StoreWriter(store)
    num_spans, num_steps = 0, 0
    for tables in steps:
        for cut in _cuts(simulation, tables):
            writer.ingest([cut])
        write_samples(store, tables.samples)
        if tables.events.num_rows:
            store.insert_arrow("events", tables.events)
        num_spans += tables.spans.num_rows
        num_steps += 1
    _describe(writer, simulation)
    return Simulated(num_spans=num_spans, num_steps=num_steps)


def _cuts(simulation: Simulation, tables: StepTables) -> Iterator[Cut]:
    """Cut a step into inserts; the last one holds the rows that are no spans."""
    spans, steps, microbatches = tables.spans, tables.steps, tables.microbatches
    firsts = range(0, max(1, spans.num_rows), CUT_ROWS)
    for first in firsts:
        part = spans.slice(first, CUT_ROWS)
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


def _describe(writer: StoreWriter, simulation: Simulation) -> None:
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
