"""Flags of several subcommands."""

import getpass
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store as OpenStore

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="RANKSCOPE_STORE",
        help="chdb:///absolute/path or clickhouse://user:password@host:8123/database. "
        "Default: the embedded store in your data folder.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
RunName = Annotated[
    str, typer.Option("--run", metavar="NAME", help="Name under which the run is stored.")
]
SpoolFolder = Annotated[
    Path | None,
    typer.Option("--spool", metavar="DIR", help="Folder into which the ranks of this host write."),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        help="Port to listen on. Default: 8050, or the next free one up to 8099.",
        show_default=False,
    ),
]


def user_name() -> str:
    """Return the user who runs the command; "" if the system has no name."""
    with suppress(KeyError, OSError):  # a container's user may have none
        return getpass.getuser()[:100]
    return ""


def open_store(url: str | None) -> "OpenStore":
    """Open the store of the flag ``--store``, through the server that holds it if there is one."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.store.location import default_store_url

    return open_for_reading(url or default_store_url())


def open_existing_store(url: str | None) -> "OpenStore":
    """Open the store of the flag ``--store`` for a command that only reads.

    Raises:
        StoreError: There is no embedded store at a path that was given: opening would create one.
    """
    return open_store(existing_store_url(url))


def existing_store_url(url: str | None) -> str:
    """Return the URL of the flag ``--store``, or that of the default store.

    Raises:
        StoreError: An embedded store was given, and there is no folder at its path.
    """
    from rankscope.collector.errors import StoreError
    from rankscope.collector.store.location import (
        EmbeddedLocation,
        default_store_url,
        parse_store_url,
    )

    if url is None:
        return default_store_url()
    location = parse_store_url(url)
    if isinstance(location, EmbeddedLocation) and not location.path.exists():
        raise StoreError(
            f"there is no store at {location.path}: check --store or RANKSCOPE_STORE"
            " (serve, import, simulate and demo create one)"
        )
    return url
