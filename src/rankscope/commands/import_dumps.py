"""`rankscope import`: dumps of PyTorch's flight recorder, and snapshots of NCCL's RAS."""

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadInputError
from ..terminal.lines import Progress, say
from .flags import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.collector.client.served_writer import RunWriter
    from rankscope.collector.importers.flight_recorder import Recorded

    from .import_trace import ImportRequest

MAX_SHOWN = 5
"""Files that are named as left out."""


def import_flight_recorder(request: "ImportRequest") -> str:
    """Store the dumps of a job's ranks."""
    from rankscope.collector.importers.flight_recorder import read_dumps

    from ..memory import without_collection

    files = [file for path in request.paths for file in _dumps_of(path)]
    with without_collection(), Progress() as progress:
        recorded = read_dumps(
            files, show=lambda num: progress.show(f"read {num:,} of {len(files):,} dumps")
        )
    _say_left_out(recorded)
    return _store(request, recorded, "dumps")


def import_nccl_ras(request: "ImportRequest") -> str:
    """Store what snapshots of NCCL's RAS say of a job's ranks."""
    from rankscope.collector.importers.nccl_ras import read_snapshots

    files = [file for path in request.paths for file in _dumps_of(path)]
    return _store(request, read_snapshots(files), "counts")


def _store(request: "ImportRequest", recorded: "Recorded", what: str) -> str:
    from rankscope.collector.client.served_writer import run_writer
    from rankscope.collector.identity import check_run_name
    from rankscope.collector.importers.flight_recorder import to_processes
    from rankscope.collector.importers.spool_folder import write_process

    from ..sources.store_source import StoreSource
    from ..spool_check import read_spool, say_unread

    run_id = request.run_id
    check_run_name(run_id)
    num = f"{what} of {len(recorded.dumps):,} of {recorded.world_size:,} ranks"
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-") as folder,
        open_store(request.store_url) as store,
        closing(run_writer(store)) as writer,
        Progress() as progress,
    ):
        if any(run.run_id == run_id for run in StoreSource(store).runs()):
            _add_to_run(StoreSource(store).run_info(run_id), recorded, writer)
            return f"added {num} to run {run_id}. Next: rankscope analyze {run_id} --fresh"
        for process in to_processes(recorded, run_id):
            write_process(Path(folder), process)
        say_unread(read_spool(Path(folder), writer, run_id=run_id, show=progress.show))
    return f"imported run {run_id}: {num}. Next: rankscope analyze {run_id}"


def _add_to_run(run: "RunInfo", recorded: "Recorded", writer: "RunWriter") -> None:
    """Store dumps as evidence of the newest epoch of a run.

    Raises:
        BadInputError: They are of a job of another size.
        StoreError: The store could not be written.
    """
    from rankscope.collector.importers.flight_recorder import to_rows

    if recorded.world_size > run.world_size:
        raise BadInputError(
            f"run {run.run_id} has {run.world_size:,} ranks, and the dumps are of"
            f" {recorded.world_size:,}: give another --run NAME"
        )
    groups, events = to_rows(recorded, run.run_id, run.epochs[-1].epoch)
    writer.upsert("groups", groups)
    writer.upsert("events", events)


def _dumps_of(path: Path) -> "Sequence[Path]":
    """Return the file itself, or the files of a folder or, if it has none, of the folders in it."""
    files = [path]
    if path.is_dir():
        files = sorted(filter(Path.is_file, path.iterdir()))
        files = files or sorted(filter(Path.is_file, path.glob("*/*")))
    if not files or not all(file.is_file() for file in files):
        raise BadInputError(f"{path} is neither a dump nor a folder of dumps")
    return files


def _say_left_out(recorded: "Recorded") -> None:
    for line in recorded.left_out[:MAX_SHOWN]:
        say(line)
    if len(recorded.left_out) > MAX_SHOWN:
        say(f"{len(recorded.left_out) - MAX_SHOWN:,} more files are left out")
    if recorded.missing:
        from rankscope.analysis.report.text import format_ranks

        say(f"there is no dump of {format_ranks(recorded.missing)}")
