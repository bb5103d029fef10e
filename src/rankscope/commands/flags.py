"""Flags that several subcommands have."""

from pathlib import Path
from typing import Annotated

import typer

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="RANKSCOPE_STORE",
        help="chdb:///absolute/path or clickhouse://user:password@host:8123/database; "
        "default: the embedded store in your data folder.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
SpoolFolder = Annotated[
    Path | None, typer.Option("--spool", metavar="DIR", help="Folder that the ranks write to.")
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        help="Default: 8050, or the next free one.",
        show_default=False,
    ),
]
