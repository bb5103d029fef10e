"""`rankscope import`: store a trace that another program recorded, or a spool whose job ended."""

import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.analysis.report.text import format_ranks

from ..errors import BadInputError
from ..terminal.lines import Progress, say
from .flags import Store, open_store
from .import_dumps import import_flight_recorder, import_nccl_ras

if TYPE_CHECKING:
    from rankscope.collector.importers.spool_folder import Process
    from rankscope.collector.store.store import Store as OpenStore

MAX_LEFT_OUT = 5
"""Files that are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """Arguments of `rankscope import`."""

    paths: Sequence[Path]
    run_id: str
    """Empty if it was not given."""

    store_url: str | None
    meta: Path | None = None
    rank: int | None = None
    step_name: str | None = None
    comm_kernel: Sequence[str] | None = None
    """Regular expressions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format that `rankscope import` reads."""

    description: str
    """What a path is, for the help."""

    read: Callable[[ImportRequest], str]
    """Stores what the paths hold, and returns a line that says what was stored.

    Raises:
        BadInputError: A path holds nothing of the format, or the spool of a job that still runs.
        CollectorError: The name of the run is not valid, or a file can't be read; see the reading
            functions of `collector.importers`.
        StoreError: The store could not be opened or written.
    """

    options: tuple[str, ...] = ()
    """Fields of `ImportRequest` that only some formats take."""

    has_many_paths: bool = False
    needs_run: bool = True


def import_files(  # noqa: PLR0913  # one parameter an option
    files: Sequence[Path],
    *,
    file_format: str,
    run_id: str | None,
    store_url: str | None,
    meta: Path | None = None,
    rank: int | None = None,
    step_name: str | None = None,
    comm_kernel: Sequence[str] | None = None,
) -> str:
    """Store files or a spool, and return a line with what was stored.

    Raises:
        BadInputError: The format is not supported, there is not exactly one path, or an option is
            missing or belongs to another format.
        CollectorError: See `Format.read`.
        StoreError: See `Format.read`.
    """
    if file_format not in FORMATS:
        raise BadInputError(f"--format {file_format} is not supported: give {', '.join(FORMATS)}")
    chosen = FORMATS[file_format]
    request = ImportRequest(
        paths=files, run_id=run_id or "", store_url=store_url, meta=meta, rank=rank,
        step_name=step_name, comm_kernel=comm_kernel or None,
    )  # fmt: skip
    for option in ("meta", "rank", "step_name", "comm_kernel"):
        if getattr(request, option) is not None and option not in chosen.options:
            others = " or ".join(name for name, each in FORMATS.items() if option in each.options)
            name = option.replace("_", "-")
            raise BadInputError(f"--{name} belongs to --format {others}: leave it out")
    if chosen.needs_run and run_id is None:
        raise BadInputError(f"--format {file_format} needs --run NAME, the name of the run")
    if len(files) != 1 and not chosen.has_many_paths:
        raise BadInputError(
            f"--format {file_format} takes one path, got {len(files)}: import each on its own"
        )
    return chosen.read(request)


def import_bytedance_file(request: ImportRequest) -> str:
    """Store a parquet file of ByteDance's format."""
    path, run_id = request.paths[0], request.run_id
    if not path.is_file():
        raise BadInputError(f"{path} is not a file: give the trace")
    from rankscope.collector.importers.bytedance import import_bytedance

    from ..memory import without_collection
    from ..sources.store_source import StoreSource

    with without_collection(), open_store(request.store_url) as store, Progress() as progress:
        what = f"importing {path.name} as run {run_id}"
        progress.show(what)
        result = import_bytedance(
            store,
            path,
            run_id=run_id,
            meta=request.meta,
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


def import_kineto(request: ImportRequest) -> str:
    """Store the traces of `torch.profiler` of a job's ranks."""
    from rankscope.collector.importers.kineto import read_traces
    from rankscope.collector.importers.kineto_comm import CommKernels
    from rankscope.collector.importers.kineto_files import find_job

    from ..memory import without_collection

    try:
        kernels = CommKernels(request.comm_kernel or ())
    except re.error as error:
        raise BadInputError(f"--comm-kernel {error.pattern!r} is no pattern: {error}") from None
    for path in request.paths:
        _trace_files(path)
    job = find_job(request.paths, rank=request.rank)
    if job.left_out:
        names = ", ".join(str(path) for path in job.left_out[:MAX_LEFT_OUT])
        say(f"{len(job.left_out):,} files are no traces and were left out: {names}")
    with without_collection(), Progress() as progress:
        processes = read_traces(
            job,
            request.run_id,
            kernels=kernels,
            step_name=request.step_name,
            show=progress.show,
        )
        return store_processes(processes, request, progress=progress)


def import_nccl_inspector(request: ImportRequest) -> str:
    """Store the logs of NCCL's Inspector of a job's processes."""
    from rankscope.collector.importers.nccl_inspector import read_logs

    from ..memory import without_collection

    files = [
        file
        for path in request.paths
        for file in (sorted(path.glob("*.log*")) if path.is_dir() else [path])
    ]
    if not files:
        raise BadInputError(f"{request.paths[0]} has no file *.log of NCCL's Inspector")
    with without_collection(), Progress() as progress:
        processes = read_logs(files, request.run_id, show=progress.show)
        return store_processes(processes, request, progress=progress)


def import_chrome(request: ImportRequest) -> str:
    """Store a Chrome trace in which a training framework wrote forwards and backwards."""
    from rankscope.collector.importers.chrome import read_events

    files = [
        file
        for path in request.paths
        for file in sorted(path.glob("trace_step*")) or _trace_files(path)  # ndtimeline
    ]
    return store_processes(read_events(files, request.run_id), request)


def store_processes(
    processes: "Iterable[Process]", request: ImportRequest, *, progress: Progress | None = None
) -> str:
    """Store the processes of a run that an importer reads, by a spool that is written first.

    Args:
        processes: The processes.
        request: Says where, and under which name.
        progress: Line on which the importer shows its progress; None: one with the number of ranks.

    Raises:
        BadInputError: There is no process.
        CollectorError: The name of the run is not valid, or the processes can't be read.
        StoreError: The store could not be opened or written.
    """
    from rankscope.collector.identity import check_run_name
    from rankscope.collector.importers.spool_folder import write_process

    check_run_name(request.run_id)
    ranks, world_size = set[int](), 0
    notes: dict[str, None] = {}
    with tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
        with progress or Progress() as shown:
            for number, process in enumerate(processes, 1):
                if progress is None:
                    shown.show(f"read {number} ranks")
                notes |= dict.fromkeys(process.notes)
                write_process(Path(folder), process)
                ranks.add(process.rank)
                world_size = max(world_size, process.world_size)
        say_missing(ranks, world_size)
        for note in notes:
            say(note)
        return _store_spool(Path(folder), run_id=request.run_id, store_url=request.store_url)


def say_missing(ranks: Collection[int], world_size: int) -> None:
    """Say which ranks of a job were not imported, if any."""
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if ranks and missing:
        have = "has" if len(missing) == 1 else "have"
        say(
            f"{format_ranks(missing)} of {world_size:,} {have} no file: the diagnosis is of"
            f" {format_ranks(sorted(ranks))}"
        )


def _trace_files(path: Path) -> list[Path]:
    """Return the JSON files of a folder and of the folders directly in it, or the file itself.

    Raises:
        BadInputError: There is none.
    """
    from rankscope.collector.importers.foreign_formats import describe_format
    from rankscope.collector.importers.kineto_files import SUFFIXES, list_json

    if path.is_file():
        return [path]
    files = list_json(path) if path.is_dir() else []
    if not files:
        others = sorted(each for each in path.glob("*") if each.is_file())[:1]
        what = "".join(f": {each.name} {describe_format(each)}" for each in others)
        raise BadInputError(
            f"{path} is neither a trace nor a folder of {' or '.join(SUFFIXES)}{what}"
        )
    return files


def import_spool(request: ImportRequest) -> str:
    """Store the runs of a spool whose processes have ended. The spool is not changed."""
    run_id = request.run_id or None
    return _store_spool(request.paths[0], run_id=run_id, store_url=request.store_url)


def _store_spool(folder: Path, *, run_id: str | None, store_url: str | None) -> str:
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


FORMATS = {
    "bytedance": Format(
        description="a parquet file", read=import_bytedance_file, options=("meta",)
    ),
    "flight-recorder": Format(
        description="dumps of PyTorch's flight recorder, one of each rank, or their folder; a"
        " stored run gets them as evidence",
        read=import_flight_recorder,
        has_many_paths=True,
    ),
    "nccl-inspector": Format(
        description="verbose logs of NCCL's Inspector, one of each process, or their folder",
        read=import_nccl_inspector,
        has_many_paths=True,
    ),
    "nccl-ras": Format(
        description="output of `ncclras --format json`, twice within a minute, of a job that"
        " hangs; a stored run gets it as evidence",
        read=import_nccl_ras,
        has_many_paths=True,
    ),
    "kineto": Format(
        description="JSON files of torch.profiler, one of each rank, or their folder",
        read=import_kineto,
        options=("rank", "step_name", "comm_kernel"),
        has_many_paths=True,
    ),
    "chrome": Format(
        description="Chrome traces of MegaScan, ndtimeline and the like, or their folder",
        read=import_chrome,
        has_many_paths=True,
    ),
    "rankscope": Format(
        description="a spool folder whose jobs have ended", read=import_spool, needs_run=False
    ),
}
"""Formats that `rankscope import` reads, by their names."""


def import_(  # noqa: PLR0913  # one parameter a flag
    files: Annotated[list[Path], typer.Argument(metavar="PATH", help="Trace, or spool, to store.")],
    *,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="; ".join(f"{name}: {each.description}" for name, each in FORMATS.items()) + ".",
        ),
    ],
    run: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name under which the run is stored. rankscope: the only run to read.",
        ),
    ] = None,
    meta: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file with the sizes of the job (bytedance)."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Rank of the file, if neither it nor its name has one (kineto).",
        ),
    ] = None,
    step_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Annotation of a step, or the begin of its name; all: the whole trace is one step"
            " (kineto). Default: ProfilerStep.",
        ),
    ] = None,
    comm_kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Regular expression of the names of kernels that communicate, besides those of"
            " known libraries (kineto). May be given several times.",
        ),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded, or the spool of a job that has ended."""
    done = import_files(
        files,
        file_format=file_format,
        run_id=run,
        store_url=store,
        meta=meta,
        rank=rank,
        step_name=step_name,
        comm_kernel=comm_kernel,
    )
    typer.echo(done)
