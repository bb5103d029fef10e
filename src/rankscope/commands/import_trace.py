"""`rankscope import`: hand a recorded trace to the importer of its format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import BadInputError
from .flags import Store


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)],
    *,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="What the files are: bytedance.")
    ],
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    meta: Annotated[
        Path | None,
        typer.Option("--meta", metavar="FILE", help="YAML with the job's sizes (bytedance)."),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded, as a run."""
    typer.echo(import_files(files, file_format=file_format, run_id=run, meta=meta, store_url=store))


FORMATS = ("bytedance",)
"""What `rankscope import --format` takes."""


def import_files(
    files: Sequence[Path],
    *,
    file_format: str,
    run_id: str,
    meta: Path | None,
    store_url: str | None,
) -> str:
    """Import ``files`` as run ``run_id``; return the line that says what was stored.

    Raises:
        BadInputError: The format is not supported, or takes one file a run.
        CollectorError: As `collector.importers.bytedance.import_bytedance`.
    """
    if file_format not in FORMATS:
        raise BadInputError(
            f"--format {file_format} is not supported: this rankscope imports {', '.join(FORMATS)}"
        )
    if len(files) != 1:
        raise BadInputError(
            f"--format bytedance has one file a run, got {len(files)}:"
            " import each under a --run name of its own"
        )
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.importers.bytedance import import_bytedance
    from rankscope.collector.store.location import default_store_url

    with open_for_reading(store_url or default_store_url()) as store:
        result = import_bytedance(store, files[0], run_id=run_id, meta=meta)
    counts = f"{result.num_spans:,} spans, {result.num_steps} steps, {result.num_ranks} ranks"
    if result.already_imported:
        return f"{run_id} is already in the store ({counts}); nothing was written"
    return f"imported {run_id}: {counts}; next: rankscope analyze {run_id}"
