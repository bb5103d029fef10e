"""`rankscope notebooks`: copies of the notebooks that come with the package."""

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ..errors import BadInputError

SUFFIX = ".ipynb"


def notebooks(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the copies. It is created if missing.")
    ],
) -> None:
    """Copy the notebooks into a folder, to open them in Jupyter."""
    for path in copy_notebooks(folder):
        typer.echo(path)


def copy_notebooks(folder: Path) -> list[Path]:
    """Copy each notebook and return the copies, by name.

    Args:
        folder: Where to; created if it is missing.

    Raises:
        BadInputError: A file of that name exists.
        OSError: The folder cannot be written.
    """
    found = resources.files("rankscope.notebooks").iterdir()
    sources = {entry.name: entry for entry in found if entry.name.endswith(SUFFIX)}
    copies = [folder / name for name in sorted(sources)]
    existing = [path for path in copies if os.path.lexists(path)]
    if existing:
        raise BadInputError(f"{existing[0]} exists and is not replaced: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path in copies:
        with path.open("xb") as file:  # not through a link that was put there meanwhile
            file.write(sources[path.name].read_bytes())
    return copies
