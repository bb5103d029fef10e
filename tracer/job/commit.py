"""The commit of the job's code, read from git's own files.

No program is started: the settings of a foreign repository name programs that git would run
(``core.fsmonitor``, hooks, filters). Source: gitrepository-layout(5).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..spool import read_regular_file

MAX_BYTES = 16 << 20
"""Of ``packed-refs``, which has a line of some 100 bytes for each branch and tag."""

MAX_LINKS = 5
"""Names that may lead to each other, as ``HEAD`` to a branch."""

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REF = re.compile(r"refs(?:/(?!\.)[^/\0]+)+")


def read_commit() -> str | None:
    """Return the commit of the working folder's checkout, 40 or 64 hex digits.

    Returns:
        None outside of a repository, before its first commit, or if git's files cannot be read.
    """
    with contextlib.suppress(OSError, ValueError):
        here = Path.cwd()
        for folder in (here, *here.parents):
            repository = _repository_of(folder)
            if repository is not None:
                return _resolve(repository, "HEAD")
    return None


def _repository_of(checkout: Path) -> Path | None:
    """Return git's folder of a checkout: ``.git``, or the one that the file ``.git`` names."""
    folder = checkout / ".git"
    if folder.is_file():
        folder = checkout / _read(folder).removeprefix("gitdir: ")
    return folder if (folder / "HEAD").is_file() else None


def _resolve(repository: Path, name: str) -> str | None:
    for _ in range(MAX_LINKS):
        text = _read_ref(repository, name)
        if COMMIT.fullmatch(text):
            return text
        name = text.removeprefix("ref: ")
        if not REF.fullmatch(name):
            return None
    return None


def _read_ref(repository: Path, name: str) -> str:
    """Return the content of a ref; "" if there is none. Branches are shared by linked checkouts."""
    shared = repository
    if (repository / "commondir").is_file():
        shared = repository / _read(repository / "commondir")
    for folder in (repository, shared):
        if (folder / name).is_file():
            return _read(folder / name)
    packed = re.search(rf"^(\w+) {re.escape(name)}$", _read(shared / "packed-refs"), re.MULTILINE)
    return packed[1] if packed else ""


def _read(path: Path) -> str:
    return os.fsdecode(read_regular_file(path, max_bytes=MAX_BYTES)).removesuffix("\n")
