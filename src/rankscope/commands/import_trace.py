"""`rankscope import`: store a trace that another program recorded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import BadInputError
from ..terminal.lines import Progress
from .flags import RunName, Store, open_store


def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Trace to store.", show_default=False)
    ],
    *,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="Format of the file: bytedance.")
    ],
    run: RunName,
    meta: Annotated[
        Path | None,
        typer.Option(
            "--meta", metavar="FILE", help="YAML file with the sizes of the job (bytedance)."
        ),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded."""
    typer.echo(import_files(files, file_format=file_format, run_id=run, meta=meta, store_url=store))


FORMATS = ("bytedance",)
"""Formats that `rankscope import` reads."""


def import_files(
    files: Sequence[Path],
    *,
    file_format: str,
    run_id: str,
    meta: Path | None,
    store_url: str | None,
) -> str:
    """Store a file as run ``run_id`` and return a line with the number of spans stored.

    Raises:
        BadInputError: The format is not supported, or there is not exactly one file.
        CollectorError: See `collector.importers.bytedance.import_bytedance`.
    """
    if file_format not in FORMATS:
        raise BadInputError(f"--format {file_format} is not supported: give {', '.join(FORMATS)}")
    if len(files) != 1:
        raise BadInputError(
            f"--format bytedance takes one file for each run, got {len(files)}:"
            " import each file under its own --run name"
        )
    from rankscope.collector.importers.bytedance import import_bytedance

    with open_store(store_url) as store, Progress() as progress:
        progress.show(f"importing {files[0].name} as run {run_id}")
        result = import_bytedance(store, files[0], run_id=run_id, meta=meta)
    counts = f"{result.num_spans:,} spans, {result.num_steps} steps, {result.num_ranks} ranks"
    if result.already_imported:
        return f"run {run_id} is already stored ({counts}): nothing was written"
    return f"imported run {run_id}: {counts}. Next: rankscope analyze {run_id}"
