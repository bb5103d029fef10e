"""Where batches lie that the collector never took: their bytes, and why."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from .errors import JournalError
from .journal_file import sync_folder

if TYPE_CHECKING:
    from pathlib import Path

MAX_PARKED_BYTES = 256 << 20
MAX_PARKED_FILES = 10_000


class Parking:
    """A folder with a file of bytes and a file of reasons for each batch.

    Args:
        folder: Made when the first batch comes.
        max_bytes: Of all bodies together; beyond it only the reasons are kept.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_PARKED_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def park(self, name: str, body: bytes, document: dict[str, Any]) -> None:
        """Keep a batch; returns once it is on disk.

        Args:
            name: Of the two files, without their endings.
            body: What was refused, as it was sent.
            document: Who, what and why.

        Raises:
            JournalError: It can't be kept.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            num_files, num_bytes = self._used()
            is_kept = num_bytes + len(body) <= self._max_bytes and num_files < MAX_PARKED_FILES
            if is_kept:
                _write(self.folder / f"{name}.body", body)
            if num_files < MAX_PARKED_FILES:
                told = json.dumps({**document, "is_body_kept": is_kept}, indent=1)
                _write(self.folder / f"{name}.json", told.encode())
            sync_folder(self.folder)
        except OSError as error:
            raise JournalError(
                f"{self.folder} can't be written ({error.strerror or error}): a batch that the"
                " collector refuses waits until it can"
            ) from error

    def _used(self) -> tuple[int, int]:
        sizes = [entry.stat().st_size for entry in os.scandir(self.folder)]
        return len(sizes), sum(sizes)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
