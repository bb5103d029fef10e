"""Write a simulated run to parquet files, with the store's columns, and its truth beside them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from ..errors import BadInputError
from .store import Simulated

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables

TABLES = ("spans", "steps", "microbatches", "samples", "events")
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"--out {folder} is not an empty folder: choose another")
    folder.mkdir(parents=True, exist_ok=True)
    num_spans, num_steps = 0, 0
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for tables in steps:
            for name in TABLES:
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
