"""Import of traces in ByteDance's published format.

A parquet file with one row per operation; times are float32 seconds from the step's start.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis", arXiv 2505.05713.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE
from rankscope.tracer.spool import open_regular_file

from ..errors import RunBegunError, RunExistsError, TraceError
from ..identity import check_run_name, segment_id
from ..retention.deletion import Deletions
from ..spool.cut import Cut, CutKey
from .bytedance_meta import TraceMeta, read_meta
from .parquet_reader import NOT_PARQUET

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..client.served_writer import RunWriter
    from ..identity import Row
    from ..store.store import Store
    from .bytedance_trace import TraceRows

SOURCE_FORMAT = "bytedance"
MAGIC = b"PAR1"
EPOCH = 0

SELECT_PRESENCE = """
SELECT
    (SELECT count() FROM runs WHERE run_id = {run_id:String}) AS num_runs,
    (SELECT any(source_format) FROM runs WHERE run_id = {run_id:String}) AS source_format,
    (SELECT count() FROM ledger WHERE run_id = {run_id:String}) AS num_cuts,
    (SELECT count() FROM ledger
     WHERE run_id = {run_id:String} AND sha256 = {sha256:String}) AS num_same,
    (SELECT count() FROM ledger
     WHERE run_id = {run_id:String} AND process != {sent:String}) AS num_others
"""

DELETE_LEFTOVERS = (
    "DELETE FROM spans WHERE run_id = {run_id:String}",
    "DELETE FROM steps WHERE run_id = {run_id:String}",
    "DELETE FROM ranks WHERE run_id = {run_id:String}",
    "DELETE FROM run_totals WHERE run_id = {run_id:String}",
    "DELETE FROM segment_totals WHERE run_id = {run_id:String}",
    "DELETE FROM ledger WHERE run_id = {run_id:String}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Result of an import."""

    run_id: str
    num_spans: int
    num_steps: int
    num_ranks: int
    already_imported: bool
    """The same file was stored under this name before; nothing was written."""


def import_bytedance(
    store: Store,
    file: Path,
    *,
    run_id: str,
    meta: Path | None,
    show: Callable[[str], None] = lambda _: None,
) -> ImportResult:
    """Store the trace in ``file`` as run ``run_id``.

    The run appears whole or not at all: its row in ``runs`` is written last, and the rows of an
    interrupted import are removed first.

    Args:
        meta: YAML file with the job's sizes, which a trace does not have.
        show: Gets a line that says how far the import is.

    Raises:
        RunNameError: The name is invalid.
        RunExistsError: The name is taken by another run.
        RunBegunError: A server holds the store, which has an unfinished run of that name.
        RunDeletedError: A run of that name was deleted.
        MetaError: ``meta`` is missing, unreadable, incomplete, or contradicts the trace.
        TraceError: The file is not a trace of this format.
    """
    check_run_name(run_id)
    Deletions(store).check(run_id)
    sizes = read_meta(meta, trace=file)
    from .bytedance_trace import read_trace  # imports pyarrow

    sha256 = _content_hash(file, sizes)
    presence = {"run_id": run_id, "sha256": sha256, "sent": _process_of(sha256)}
    present = store.rows(SELECT_PRESENCE, presence)[0]
    is_same = present["source_format"] == SOURCE_FORMAT and present["num_same"]
    if present["num_runs"] and not is_same:
        raise RunExistsError(run_id, source_format=present["source_format"])
    trace = read_trace(file, meta=sizes, show=show)
    if not present["num_runs"]:
        if not store.read_only and present["num_cuts"]:
            for statement in DELETE_LEFTOVERS:
                store.command(statement, {"run_id": run_id})
        elif present["num_others"]:
            raise RunBegunError(run_id)
        from ..client.served_writer import run_writer

        with closing(run_writer(store)) as writer:
            _store(writer, trace, run_id=run_id, meta=sizes, sha256=sha256, show=show)
    return ImportResult(
        run_id=run_id,
        num_spans=len(trace.start_ns),
        num_steps=len(trace.steps),
        num_ranks=len(trace.workers),
        already_imported=bool(present["num_runs"]),
    )


def _store(
    writer: RunWriter,
    trace: TraceRows,
    *,
    run_id: str,
    meta: TraceMeta,
    sha256: str,
    show: Callable[[str], None],
) -> None:
    """Store a trace, the run itself last."""
    import numpy as np

    from ..arrow_columns import numbers
    from ..spool.records import CutRows
    from ..wire.codec import fill_columns
    from ..wire.schema import WIRE_TABLES

    process = _process_of(sha256)
    segment = segment_id(process, 0)
    num_spans = len(trace.start_ns)
    steps = fill_columns(
        trace.step_table(run_id, epoch=EPOCH, segment=segment), WIRE_TABLES["steps"]
    )
    # The row numbers of a cut are unique over its tables: those of the steps follow the spans.
    at = steps.schema.get_field_index("row")
    last_rows = np.arange(num_spans, num_spans + steps.num_rows, dtype=np.uint32)
    steps = steps.set_column(at, "row", numbers(last_rows))
    for first in range(0, num_spans, writer.cut_rows):
        end = min(first + writer.cut_rows, num_spans)
        spans = trace.span_table(run_id, epoch=EPOCH, segment=segment, rows=slice(first, end))
        rows = CutRows(
            spans=fill_columns(spans, WIRE_TABLES["spans"]),
            steps=steps if end == num_spans else steps.slice(0, 0),
            microbatches=steps.slice(0, 0),
            bad_rows=steps.slice(0, 0),
        )
        key = CutKey(
            run_id=run_id,
            epoch=EPOCH,
            rank=NONE,
            process=process,
            segment=segment,
            first_row=first,
            end_row=end + rows.steps.num_rows,
        )
        writer.ingest([Cut(key=key, sha256=sha256, num_torn=0, rows=rows)])
        show(f"stored {end:,} of {num_spans:,} rows")
    writer.upsert("ranks", _rank_rows(trace, run_id=run_id, process=process))
    writer.upsert("runs", [_run_row(run_id, meta=meta, now_ns=time.time_ns())])


def _process_of(sha256: str) -> str:
    """Return the ``process`` of the rows of a file.

    Earlier versions named it by the first half of the hash and numbered the rows otherwise.
    """
    return sha256[32:]


def _rank_rows(trace: TraceRows, *, run_id: str, process: str) -> list[Row]:
    return [
        {
            "run_id": run_id,
            "epoch": EPOCH,
            "rank": rank,
            "process": process,
            "local_rank": NONE,
            "dp": dp,
            "pp": pp,
            "pid": NONE,
            "exit_state": "",
            "revision": 1,
        }
        for rank, dp, pp in trace.workers
    ]


def _run_row(run_id: str, *, meta: TraceMeta, now_ns: int) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "epoch": EPOCH,
        "created_ns": now_ns,
        "state": "ended",
        "source_format": SOURCE_FORMAT,
        "world_size": meta.layout.world_size,
        "layout": meta.layout.to_dict(),
        "model": json.dumps({"name": meta.trial_name}),
        "manifest": json.dumps(meta.document),
        "revision": 1,
    }


def _content_hash(file: Path, meta: TraceMeta) -> str:
    digest = hashlib.sha256(json.dumps(meta.layout.to_dict()).encode())
    try:
        with os.fdopen(open_regular_file(file), "rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:  # do not read a huge file of another type
                raise TraceError(file, NOT_PARQUET)
            digest.update(MAGIC)
            while block := opened.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise TraceError(file, f"cannot be read ({error.strerror}): check the path") from error
    return digest.hexdigest()
