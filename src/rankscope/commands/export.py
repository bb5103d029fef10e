"""`rankscope export`: the spans of a stored run as a file for another program."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from rankscope.analysis.report.text import FORMULA
from rankscope.tracer.span import NONE

from ..errors import BadInputError
from ..terminal.lines import Progress
from .analyze import parse_steps
from .flags import Store, open_existing_store

if TYPE_CHECKING:
    import pyarrow as pa

    from rankscope.collector.store.store import Store as OpenStore

    from ..sources.store_source import StoreSource

MAX_RANKS_SHOWN = 8
MAX_BLOCK_SPANS = 100_000
"""Spans that are held at once, unless a single step has more: some 200 MB as rows of JSON."""


class ExportFormat(StrEnum):
    """Formats of `rankscope export`."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    PARQUET = "parquet"
    CSV = "csv"


SUFFIX = {
    ExportFormat.PERFETTO: "json", ExportFormat.CHROME: "json",
    ExportFormat.PARQUET: "parquet", ExportFormat.CSV: "csv",
}  # fmt: skip


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    *,
    file_format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="perfetto, for ui.perfetto.dev: spans, waits, who waited for whom, counters;"
            " chrome, spans alone; parquet or csv, one row per span.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write. Default: RUN.json, .parquet or .csv here."
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B, both included. Default: all.")
    ] = ":",
    rank: Annotated[
        list[int] | None, typer.Option(min=0, metavar="R", help="Only this rank. May be repeated.")
    ] = None,
    store: Store = None,
) -> None:
    """Write the spans of a run into a file for another program."""
    out = out or Path(f"{run}.{SUFFIX[file_format]}")
    first, last = parse_steps(steps)
    with open_existing_store(store) as opened, Progress() as progress:
        num_spans = export_spans(
            opened, run, out, file_format=file_format, steps=(first, last), ranks=rank or [],
            show=progress.show,
        )  # fmt: skip
    hint = ". Open it at https://ui.perfetto.dev" if SUFFIX[file_format] == "json" else ""
    typer.echo(f"exported {num_spans:,} spans of run {run} to {out}{hint}")


def export_spans(  # noqa: PLR0913  # what, from where, to where
    store: "OpenStore",
    run_id: str,
    out: Path,
    *,
    file_format: ExportFormat,
    steps: tuple[int | None, int | None],
    ranks: list[int],
    show: Callable[[str], None],
) -> int:
    """Write spans into a new file, block by block, and return their number.

    Args:
        store: The store.
        run_id: The run.
        out: The file, which appears whole or not at all.
        file_format: Its format.
        steps: First and last step; (None, None) also has the spans outside any step.
        ranks: Only these ranks; empty: all. For Perfetto the others are read too.
        show: Takes a line about the progress.

    Raises:
        UnknownRunError: The store holds no run of this name.
        BadInputError: The file exists or can't be written, or there are no such spans.
    """
    from rankscope.collector.new_file import new_file

    from ..server.reports import find_run
    from ..sources.store_source import StoreSource

    source = StoreSource(store)
    find_run(source, run_id)  # raises for an unknown run
    if os.path.lexists(out):
        raise BadInputError(f"{out} exists: give another --out, or delete it")
    num_spans = 0
    is_whole = file_format is ExportFormat.PERFETTO  # what the other ranks did says who waited
    try:
        with new_file(out) as file, ExitStack() as stack:
            write = _open_writer(
                stack, file, file_format, source=source, run_id=run_id, ranks=ranks
            )
            for block in _read_blocks(store, run_id, steps, [] if is_whole else ranks):
                num_spans += write(block)
                show(f"exported {num_spans:,} spans")
            if not num_spans:
                raise BadInputError(_nothing_found(source, run_id, steps, ranks))
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(f"{out} can't be written ({reason}): give another --out") from error
    return num_spans


def _nothing_found(
    source: "StoreSource", run_id: str, steps: tuple[int | None, int | None], ranks: list[int]
) -> str:
    """Return why there is nothing to export, and what there is."""
    import numpy as np

    known = np.unique(source.steps(run_id).step)
    if not len(known):
        return f"run {run_id!r} has no step yet"
    recorded = ", ".join(map(str, sorted(source.run_info(run_id).ranks)[:MAX_RANKS_SHOWN]))
    first, last = (("" if step is None else str(step)) for step in steps)
    asked = f"steps {first}:{last}" + (f" of ranks {', '.join(map(str, ranks))}" if ranks else "")
    return (
        f"run {run_id!r} has no spans in {asked}: it has steps {known[0]} to {known[-1]} and ranks"
        f" {recorded}{', ...' if len(source.run_info(run_id).ranks) > MAX_RANKS_SHOWN else ''}"
    )


def _read_blocks(
    store: "OpenStore", run_id: str, steps: tuple[int | None, int | None], ranks: list[int]
) -> Iterator["pa.Table"]:
    """Yield the spans in blocks of whole steps, as many as one block may hold."""
    import numpy as np

    from rankscope.collector.arrow_columns import to_numpy
    from rankscope.collector.read.spans import read_filtered_spans
    from rankscope.collector.read.steps import read_steps

    first, last = steps
    known = np.unique(to_numpy(read_steps(store, run_id, first=first, last=last)["step"])).tolist()
    begin = NONE if (first, last) == (None, None) else first or 0
    num = 1
    while True:
        later = [step for step in known if step >= begin]
        end = later[num] - 1 if len(later) > num else last
        block = read_filtered_spans(store, run_id, first=begin, last=end, ranks=ranks)
        if block.num_rows:
            yield block
        if end is None or end == last:
            return
        num = max(1, num * MAX_BLOCK_SPANS // max(block.num_rows, MAX_BLOCK_SPANS // 10))
        begin = end + 1


def _open_writer(
    stack: ExitStack,
    file: BinaryIO,
    file_format: ExportFormat,
    *,
    source: "StoreSource",
    run_id: str,
    ranks: list[int],
) -> Callable[["pa.Table"], int]:
    """Return the function that writes a block into a file, and returns how many spans it wrote."""
    if file_format is ExportFormat.PERFETTO:
        return _open_perfetto(stack, file, source, run_id, ranks)
    write = (
        _open_chrome(stack, file)
        if file_format is ExportFormat.CHROME
        else _open_table(stack, file, file_format)
    )

    def write_all(block: "pa.Table") -> int:
        write(block)
        return block.num_rows

    return write_all


def _open_perfetto(
    stack: ExitStack, file: BinaryIO, source: "StoreSource", run_id: str, ranks: list[int]
) -> Callable[["pa.Table"], int]:
    import numpy as np

    from rankscope.analysis.readers.formats import split_run_waits

    from ..sources.arrow_tables import span_table
    from ..sources.chrome_trace import ChromeTrace
    from ..sources.trace_counters import TraceCounters

    run = source.run_info(run_id)
    trace = ChromeTrace(stack.enter_context(TextIOWrapper(file, encoding="utf-8")).write)
    stack.callback(trace.end)
    counters = TraceCounters(source, run, ranks)

    def write(block: "pa.Table") -> int:
        spans = span_table(block)
        trace.add(block, split=split_run_waits(run, spans), ranks=ranks)
        trace.add_counters(counters.of_block(spans))
        return int(np.isin(spans.rank, ranks).sum()) if ranks else block.num_rows

    return write


def _open_table(
    stack: ExitStack, file: BinaryIO, file_format: ExportFormat
) -> Callable[["pa.Table"], None]:
    import pyarrow.parquet as pq
    from pyarrow import csv

    from ..sources.chrome_trace import plain_table

    is_csv = file_format is ExportFormat.CSV
    writers: list[Any] = []

    def write(block: "pa.Table") -> None:
        block = plain_table(block)
        if is_csv:
            block = _without_formulas(block)
        if not writers:
            writer: Any = (
                csv.CSVWriter(file, block.schema)
                if is_csv
                else pq.ParquetWriter(file, block.schema, compression="zstd")
            )
            writers.append(stack.enter_context(writer))
        writers[0].write_table(block)

    return write


def _open_chrome(stack: ExitStack, file: BinaryIO) -> Callable[["pa.Table"], None]:
    from ..sources.chrome_trace import ChromeTrace

    trace = ChromeTrace(stack.enter_context(TextIOWrapper(file, encoding="utf-8")).write)
    stack.callback(trace.end)
    return trace.add


def _without_formulas(block: "pa.Table") -> "pa.Table":
    """Return a table in which no text begins as a formula of a spreadsheet does."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for place, field in enumerate(block.schema):
        if pa.types.is_string(field.type):
            texts = pc.replace_substring_regex(
                block.column(place), pattern=f"^([{FORMULA.replace('-', '')}-])", replacement=r"'\1"
            )
            block = block.set_column(place, field, texts)
    return block
