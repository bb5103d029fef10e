"""Takes a renewed certificate while the server runs; connections that stand keep the old one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..errors import TlsError
from ..file_change import read_file_stamps
from .tls import ServerTls, TlsFiles, load_tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..file_change import FileStamps


class Renewal:
    """Watches the files of a certificate.

    A renewed pair is loaded and checked as at the start, into a context of its own, and served
    to those who come from then on. One that can't be served is told once, and the old one
    stays: certificate managers write two files one after the other.

    Args:
        files: The flags of the server.
        served: What was loaded from them.
        tell: Takes one line for the person at the log.
    """

    def __init__(self, files: TlsFiles, served: ServerTls, *, tell: Callable[[str], None]) -> None:
        self._files = files
        self._tell = tell
        self._marks = self._look()
        self.served = served

    def take(self) -> bool:
        """Load the files if they have changed; return whether others are served from now on."""
        marks = self._look()
        if marks == self._marks:
            return False
        self._marks = marks
        try:
            fresh = load_tls(self._files)
        except TlsError as error:
            self._tell(f"the certificate was changed and is not served, the old one is: {error}")
            return False
        self.served = fresh
        ends = datetime.fromtimestamp(fresh.expires_s, UTC)
        self._tell(f"the renewed certificate is served; it ends {ends:%Y-%m-%d %H:%M} UTC")
        return True

    def _look(self) -> FileStamps:
        client_ca = self._files.client_ca
        named = [self._files.cert, self._files.key, *([] if client_ca is None else [client_ca])]
        return read_file_stamps(*named)
