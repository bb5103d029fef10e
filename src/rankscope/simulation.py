"""Put a simulated run into the store, as the spool's tail puts a real one."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.collector.client.served_writer import run_writer
from rankscope.collector.errors import RunBegunError, RunExistsError
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.descriptions import manifest_row
from rankscope.collector.spool.records import CutRows
from rankscope.tracer.span import NONE

from .errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from rankscope.collector.client.served_writer import RunWriter
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.trainer.simulator.scenario import Scenario
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
        rows = CutRows(
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


FILE_TABLES = ("spans", "steps", "microbatches", "samples", "events")


GROUP_ROWS = 1_000_000


def write_files(simulation: Simulation, steps: Iterable[StepTables], *, folder: Path) -> Simulated:
    """Write one parquet file a table, and the run's description as JSON.

    Args:
        simulation: The run.
        steps: Its tables, read once.
        folder: Where to; made where it is missing.

    Raises:
        BadInputError: The folder holds files, or is none.
        OSError: It cannot be written.
    """
    import pyarrow.parquet as pq

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--out {folder} is not an empty folder: choose another")
    folder.mkdir(parents=True, exist_ok=True)
    num_spans, num_steps = 0, 0
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for tables in steps:
            for name in FILE_TABLES:
                rows = getattr(tables, name)
                if name not in writers:
                    path = folder / f"{name}.parquet"
                    writers[name] = stack.enter_context(
                        pq.ParquetWriter(path, rows.schema, compression="zstd")
                    )
                writers[name].write_table(rows, row_group_size=GROUP_ROWS)
            num_spans += tables.spans.num_rows
            num_steps += 1
    _write_description(simulation, folder)
    return Simulated(num_spans=num_spans, num_steps=num_steps)


def _write_description(simulation: Simulation, folder: Path) -> None:
    documents: dict[str, Iterable[object]] = {
        "runs": [simulation.run_row(created_ns=simulation.scenario.started_ns)],
        "ranks": simulation.rank_rows(),
        "groups": (asdict(group) for group in simulation.groups),
        "clock": simulation.clock_rows(),
        "truth": (asdict(truth) for truth in simulation.truth),
    }
    for name, rows in documents.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


SCENARIO_SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to simulate and where to; None: as the scenario says."""

    scenario: str
    """Name of a preset, or path of a TOML or JSON file."""

    run_id: str
    num_ranks: int | None = None
    """Reached by dp, the other sizes staying."""

    seed: int | None = None
    num_steps: int | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    faults: tuple[str, ...] = ()
    """Added to the scenario's own."""

    out: Path | None = None
    """Folder for parquet files; None: into the store."""

    store_url: str | None = None
    as_json: bool = False


def scenario_of(options: SimulateOptions) -> Scenario:
    """Return the scenario that the options name, with what they replace.

    Raises:
        ConfigError: It cannot be simulated.
        BadInputError: ``--ranks`` does not fit, or contradicts ``--dp``.
    """
    from rankscope.trainer.simulator.fault import parse_simulated_faults
    from rankscope.trainer.simulator.presets import preset_faults, preset_settings
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.scenario_file import read_scenario_file

    path = Path(options.scenario)
    is_file = path.suffix in SCENARIO_SUFFIXES
    replaced = _replaced(options)
    if is_file:
        settings = read_scenario_file(path) | replaced
    else:
        settings = preset_settings(options.scenario, **replaced)
    planted = settings.pop("faults", ())
    # Faults are checked last: against the sizes that the flags made, not the scenario's own.
    bare = _resized(Scenario(**settings), options)
    if not is_file:
        planted = preset_faults(options.scenario, bare)
    return replace(bare, faults=(*planted, *parse_simulated_faults(options.faults)))


def _replaced(options: SimulateOptions) -> dict[str, Any]:
    given = {
        "seed": options.seed,
        "num_steps": options.num_steps,
        "dp": options.dp,
        "pp": options.pp,
        "tp": options.tp,
    }
    return {name: value for name, value in given.items() if value is not None}


def _resized(scenario: Scenario, options: SimulateOptions) -> Scenario:
    """Return the scenario with as many data-parallel positions as make the ranks asked for."""
    if options.num_ranks is None:
        return scenario
    per_position = scenario.world_size // scenario.dp
    dp, rest = divmod(options.num_ranks, per_position)
    if rest or not dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} must be a multiple of pp x tp x cp = {per_position}:"
            " choose another number, or other sizes"
        )
    if options.dp is not None and options.dp != dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} needs --dp {dp}, got --dp {options.dp}: leave one out"
        )
    return replace(scenario, dp=dp)
