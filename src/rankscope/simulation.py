"""Simulated runs: the scenario of the command's flags, and storage in a store or in files."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rankscope.collector.client.served_writer import run_writer
from rankscope.collector.errors import RunBegunError, RunExistsError, StoreError
from rankscope.collector.new_file import new_file
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.descriptions import manifest_row
from rankscope.collector.spool.records import CutRows
from rankscope.tracer.span import NONE

from .errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rankscope.collector.client.served_writer import RunWriter
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables

SCENARIO_SUFFIXES = (".toml", ".json")
INSERT_ROWS = 100_000
"""Spans that are stored together: an insert of one step of few ranks takes as long."""

DESCRIPTION_ROWS = 5_000
"""Rows of one insert of groups, manifests, clocks or ranks."""

FILE_TABLES = ("spans", "steps", "microbatches", "samples", "events")
ROW_GROUP_ROWS = 1_000_000
"""Rows of one row group of a parquet file."""

SELECT_PRESENCE = """
SELECT
    (SELECT any(source_format) FROM runs WHERE run_id = {run_id:String}) AS source_format,
    (SELECT count() FROM runs WHERE run_id = {run_id:String}) AS num_runs,
    (SELECT count() FROM ledger WHERE run_id = {run_id:String}) AS num_cuts,
    (SELECT count() FROM ledger
     WHERE run_id = {run_id:String} AND process != {process:String}) AS num_others
"""

DELETE_LEFTOVERS = "DELETE FROM {table:Identifier} WHERE run_id = {run_id:String}"

RUN_TABLES = (
    "spans", "steps", "microbatches", "samples", "events", "ranks", "groups", "manifests",
    "run_totals", "segment_totals", "ledger",
)  # fmt: skip
"""Tables that get rows before ``runs``. The ledger is last: its rows are the sign of leftovers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Flags of `rankscope simulate`. None: as the scenario says."""

    scenario: str
    """Name of a preset, or path of a TOML or JSON file."""

    run_id: str
    num_ranks: int | None = None
    """dp is chosen to match it; the other sizes stay."""

    seed: int | None = None
    num_steps: int | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    faults: tuple[str, ...] = ()
    """Faults in addition to those of the scenario."""

    out: Path | None = None
    """Folder for parquet files. None: the run goes to the store."""

    store_url: str | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSize:
    """Number of spans and steps of a simulation."""

    num_spans: int
    num_steps: int


def build_scenario(options: SimulateOptions) -> Scenario:
    """Return the scenario of the flags: a preset or a file, with the given sizes and faults.

    Raises:
        ConfigError: The scenario or a fault is invalid.
        BadInputError: ``--ranks`` does not fit the layout, or contradicts ``--dp``.
    """
    from rankscope.trainer.faults.spec import parse_simulated_faults
    from rankscope.trainer.simulator.presets import preset_faults, preset_settings
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.scenario_file import read_scenario_file

    path = Path(options.scenario)
    is_file = path.suffix in SCENARIO_SUFFIXES
    given = {name: getattr(options, name) for name in ("seed", "num_steps", "dp", "pp", "tp")}
    given = {name: value for name, value in given.items() if value is not None}
    if is_file:
        settings = read_scenario_file(path) | given
    else:
        settings = preset_settings(options.scenario, **given)
    faults = settings.pop("faults", ())
    # Faults are added last, because they are checked against the sizes that the flags give.
    scenario = _with_num_ranks(Scenario(**settings), options)
    if not is_file:
        faults = preset_faults(options.scenario, scenario)
    return replace(scenario, faults=(*faults, *parse_simulated_faults(options.faults)))


def _with_num_ranks(scenario: Scenario, options: SimulateOptions) -> Scenario:
    """Return the scenario with the dp that gives the number of ranks of ``--ranks``."""
    if options.num_ranks is None:
        return scenario
    per_position = scenario.world_size // scenario.dp
    dp, rest = divmod(options.num_ranks, per_position)
    if rest or not dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} must be a multiple of pp x tp x cp = {per_position}:"
            " give another number, or other sizes"
        )
    if options.dp is not None and options.dp != dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} needs --dp {dp}, got --dp {options.dp}: leave one out"
        )
    return replace(scenario, dp=dp)


def store_simulation(
    store: Store,
    simulation: Simulation,
    steps: Iterable[StepTables],
    *,
    on_stored: Callable[[int], None] = lambda _: None,
) -> SimulationSize:
    """Store a run. Its row in ``runs`` is written last, so the run appears whole or not at all.

    Args:
        store: The store.
        simulation: The run.
        steps: Its tables.
        on_stored: Called after an insert, with the number of spans of the step that are stored.

    Raises:
        RunExistsError: The store holds a run of this name.
        RunBegunError: A server holds the store, which has an unfinished run of this name.
        RunDeletedError: A run of this name was deleted.
        StoreError: The store could not be written.
    """
    run_id = simulation.run_id
    Deletions(store).check(run_id)
    presence = {"run_id": run_id, "process": simulation.process}
    found = store.rows(SELECT_PRESENCE, presence)[0]
    if found["num_runs"]:
        raise RunExistsError(run_id, source_format=found["source_format"])
    if store.read_only:
        # The server deletes nothing for us. Rows of the same simulation are sent again, and the
        # server recognizes them by their keys.
        if found["num_others"]:
            raise RunBegunError(run_id)
    elif found["num_cuts"]:
        for name in RUN_TABLES:  # rows of an interrupted simulation
            store.command(DELETE_LEFTOVERS, {"table": name, "run_id": run_id})
    try:
        return _write_run(store, simulation, steps, on_stored)
    except StoreError as error:
        if not store.read_only:
            raise
        raise StoreError(
            f"{error}. What it has taken is kept: run the same command again, and it takes the rest"
        ) from error


def _write_run(
    store: Store,
    simulation: Simulation,
    steps: Iterable[StepTables],
    on_stored: Callable[[int], None],
) -> SimulationSize:
    with closing(run_writer(store)) as writer:
        num_spans, num_steps = 0, 0
        waiting: list[Cut] = []
        num_waiting = 0
        beside: dict[str, list[pa.Table]] = {"samples": [], "events": []}

        def flush() -> None:
            if waiting:
                writer.ingest(waiting)
            for table, rows in beside.items():
                if rows:
                    writer.insert(table, pa.concat_tables(rows))
                rows.clear()
            waiting.clear()

        for tables in steps:
            num_of_step = 0
            for cut in _cuts(simulation, tables, cut_rows=writer.cut_rows):
                waiting.append(cut)
                num_of_step += cut.rows.spans.num_rows
                num_waiting += cut.rows.spans.num_rows
                if num_waiting >= INSERT_ROWS:
                    flush()
                    num_waiting = 0
                    on_stored(num_of_step)
            beside["samples"].append(tables.samples)
            beside["events"].append(tables.events)
            num_spans += tables.spans.num_rows
            num_steps += 1
        flush()
        _describe(writer, simulation)
        return SimulationSize(num_spans=num_spans, num_steps=num_steps)


def _cuts(simulation: Simulation, tables: StepTables, *, cut_rows: int) -> Iterator[Cut]:
    """Yield the cuts of a step. The last one also holds the rows of the other tables."""
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
    """Return a hash of the columns that differ between simulations."""
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
    """Store the description of a run: groups, manifests, clocks, ranks, and the run itself last."""
    run_id = simulation.run_id
    manifests: dict[str, Row] = {}
    ranks: list[Row] = []
    for row in simulation.rank_rows():
        manifest = manifest_row(run_id, simulation.manifest(row["rank"]))
        manifests[manifest["manifest_hash"]] = manifest
        ranks.append({**row, "manifest_hash": manifest["manifest_hash"]})
    for table, rows in (
        ("groups", list(simulation.group_rows())),
        ("manifests", list(manifests.values())),
        ("clock", list(simulation.clock_rows())),
        ("ranks", ranks),
    ):
        for first in range(0, len(rows), DESCRIPTION_ROWS):
            writer.upsert(table, rows[first : first + DESCRIPTION_ROWS])
    writer.upsert("runs", [simulation.run_row(created_ns=time.time_ns())])


def write_files(
    simulation: Simulation, steps: Iterable[StepTables], *, folder: Path
) -> SimulationSize:
    """Write one parquet file for each table, and the description of the run as JSON lines.

    Raises:
        BadInputError: The folder is not empty, or is not a folder.
        OSError: A file could not be written.
    """
    import pyarrow.parquet as pq

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--out {folder} is not an empty folder: give another")
    folder.mkdir(parents=True, exist_ok=True)
    num_spans, num_steps = 0, 0
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for tables in steps:
            for name in FILE_TABLES:
                rows = getattr(tables, name)
                if name not in writers:
                    file = stack.enter_context(new_file(folder / f"{name}.parquet"))
                    writers[name] = stack.enter_context(
                        pq.ParquetWriter(file, rows.schema, compression="zstd")
                    )
                writers[name].write_table(rows, row_group_size=ROW_GROUP_ROWS)
            num_spans += tables.spans.num_rows
            num_steps += 1
    _write_description(simulation, folder)
    return SimulationSize(num_spans=num_spans, num_steps=num_steps)


def _write_description(simulation: Simulation, folder: Path) -> None:
    documents: dict[str, Iterable[object]] = {
        "runs": [simulation.run_row(created_ns=simulation.scenario.started_ns)],
        "ranks": simulation.rank_rows(),
        "groups": (asdict(group) for group in simulation.groups),
        "clock": simulation.clock_rows(),
        "truth": (asdict(label) for label in simulation.labels),
    }
    for name, rows in documents.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        with new_file(folder / f"{name}.jsonl") as file:
            file.write(lines.encode())
