"""`rankscope import`: store a trace that another program recorded, or a spool whose job ended."""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInputError
from ..terminal.lines import Progress
from .flags import Store, open_store

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store as OpenStore

BYTEDANCE, KINETO, RANKSCOPE = "bytedance", "kineto", "rankscope"
FORMATS = (BYTEDANCE, KINETO, RANKSCOPE)
"""Formats that `rankscope import` reads."""

TRACE_SUFFIXES = (".json", ".json.gz")
"""Names of the files of `torch.profiler`."""


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="Trace, or spool, to store.", show_default=False),
    ],
    *,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="bytedance (a parquet file), kineto (JSON files of torch.profiler, one of each"
            " rank, or their folder), or rankscope (a spool folder whose jobs have ended).",
        ),
    ],
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="NAME",
            help="bytedance, kineto: name under which the run is stored. rankscope: the only run to"
            " read.",
            show_default=False,
        ),
    ] = None,
    meta: Annotated[
        Path | None,
        typer.Option(
            "--meta", metavar="FILE", help="YAML file with the sizes of the job (bytedance)."
        ),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded, or the spool of a job that has ended."""
    typer.echo(import_files(files, file_format=file_format, run_id=run, meta=meta, store_url=store))


def import_files(
    files: Sequence[Path],
    *,
    file_format: str,
    run_id: str | None,
    meta: Path | None,
    store_url: str | None,
) -> str:
    """Store a file or a spool, and return a line with what was stored.

    Raises:
        BadInputError: The format is not supported, there is not exactly one path, or an option is
            missing or belongs to the other format.
        CollectorError: See `collector.importers.bytedance.import_bytedance`.
        StoreError: The store could not be opened or written.
    """
    if file_format not in FORMATS:
        raise BadInputError(f"--format {file_format} is not supported: give {', '.join(FORMATS)}")
    if meta is not None and file_format != BYTEDANCE:
        raise BadInputError("--meta belongs to --format bytedance: leave it out")
    if file_format != RANKSCOPE and run_id is None:
        raise BadInputError(f"--format {file_format} needs --run NAME, the name of the run")
    if file_format == KINETO and run_id is not None:
        return import_kineto(files, run_id=run_id, store_url=store_url)
    if len(files) != 1:
        raise BadInputError(
            f"--format {file_format} takes one path, got {len(files)}: import each on its own"
        )
    if file_format == RANKSCOPE or run_id is None:
        return import_spool(files[0], run_id=run_id, store_url=store_url)
    if not files[0].is_file():
        raise BadInputError(f"{files[0]} is not a file: give the trace")
    from rankscope.collector.importers.bytedance import import_bytedance

    from ..memory import without_collection
    from ..sources.store_source import StoreSource

    with without_collection(), open_store(store_url) as store, Progress() as progress:
        what = f"importing {files[0].name} as run {run_id}"
        progress.show(what)
        result = import_bytedance(
            store,
            files[0],
            run_id=run_id,
            meta=meta,
            show=lambda text: progress.show(f"{what}: {text}"),
        )
        world_size = next(
            run.world_size for run in StoreSource(store).runs() if run.run_id == result.run_id
        )
    counts = f"{result.num_spans:,} spans, {result.num_steps:,} steps, {world_size:,} ranks"
    if result.num_ranks != world_size:  # one rank of each worker was traced
        counts += f" ({result.num_ranks:,} traced)"
    if result.already_imported:
        return f"run {run_id} is already stored ({counts}): nothing was written"
    return f"imported run {run_id}: {counts}. Next: rankscope analyze {run_id}"


def import_kineto(paths: Sequence[Path], *, run_id: str, store_url: str | None) -> str:
    """Store the traces of `torch.profiler` of a job's ranks, which are turned into a spool first.

    Raises:
        BadInputError: A path holds no trace.
        CollectorError: See `collector.importers.kineto.read_traces`.
        StoreError: The store could not be opened or written.
    """
    from rankscope.collector.identity import check_run_name
    from rankscope.collector.importers.kineto import read_traces
    from rankscope.collector.importers.spool_folder import write_process

    check_run_name(run_id)
    files = [file for path in paths for file in _trace_files(path)]
    with tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
        with Progress() as progress:
            for number, process in enumerate(read_traces(files, run_id), 1):
                progress.show(f"read {number} of {len(files)} files")
                write_process(Path(folder), process)
        return import_spool(Path(folder), run_id=run_id, store_url=store_url)


def _trace_files(path: Path) -> list[Path]:
    """Return the traces of a folder, or the file itself."""
    found = sorted(file for suffix in TRACE_SUFFIXES for file in path.glob(f"*{suffix}"))
    files = found if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise BadInputError(
            f"{path} is neither a trace nor a folder of {' or '.join(TRACE_SUFFIXES)}"
        )
    return files


def import_spool(folder: Path, *, run_id: str | None, store_url: str | None) -> str:
    """Store the runs of a spool whose processes have ended. The spool is not changed.

    Raises:
        BadInputError: The folder holds no such run, or one of its processes still runs.
        StoreError: The store could not be opened or written.
    """
    from rankscope.collector.client.served_writer import run_writer

    from ..spool_check import read_spool, say_unread

    if not folder.is_dir():
        raise BadInputError(f"{folder} is not a folder: give the spool, as in RANKSCOPE_TRACE")
    with open_store(store_url) as store, Progress() as progress:
        before = _count_spans(store)
        with closing(run_writer(store)) as writer:
            reading = read_spool(
                folder,
                writer,
                run_id=run_id,
                show=lambda text: progress.show(f"importing {folder}: {text}"),
            )
        stored = _count_spans(store)
    say_unread(reading)
    new = {run: num - before.get(run, 0) for run, num in stored.items() if num > before.get(run, 0)}
    if not reading.num_processes:
        raise BadInputError(f"no process of {folder} could be read: see above")
    if not new:
        return f"{folder} is already stored: nothing was written"
    runs = ", ".join(f"run {run}: {num:,} spans" for run, num in new.items())
    return f"imported {runs}. Next: rankscope analyze {next(iter(new))}"


def _count_spans(store: "OpenStore") -> dict[str, int]:
    """Return the number of stored spans by run."""
    from ..sources.store_source import StoreSource

    return {run.run_id: run.num_spans for run in StoreSource(store).runs()}
